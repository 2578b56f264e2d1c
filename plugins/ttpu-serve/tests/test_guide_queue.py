"""Guides are compiled beside the engine's steps: clients take turns, slow grammars let quick ones go first, and what
nobody waits for is ended."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

import pytest
from fake_core import FakeCore
from serving import running, until

from ttpu_core.errors import RequestError
from ttpu_core.generation.sampling_params import GuidedDecoding, SamplingParams
from ttpu_serve.api import async_engine
from ttpu_serve.api.async_engine import AsyncEngine
from ttpu_serve.api.guide_queue import GuideQueue
from ttpu_serve.api.output_queue import EngineClosingError, RequestTimeoutError
from ttpu_serve.guided.grammar import key_of
from ttpu_serve.guided.matchers import CompilationEndedError, SlowGrammarError
from ttpu_serve.server import ServerSettings, run


class Guides:
    """Regular expressions that begin with `slow` take until `gate` is set, and overrun any time that is given; one of
    `wrong` is refused."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.done: list[str] = []
        self.began: list[tuple[str, float | None]] = []
        self.ended: set[str] = set()

    def compile(self, guided: GuidedDecoding, seconds: float | None = None) -> None:
        """Compile."""
        name = str(guided.regex)
        self.began.append((name, seconds))
        if name == "block":
            self.gate.wait(10)
        if name == "wrong":
            raise RequestError("it is wrong.")
        if name.startswith("slow"):
            if seconds is not None:
                raise SlowGrammarError
            while not self.gate.wait(0.005):
                if name in self.ended:
                    self.began.append((f"{name} ended", None))
                    raise CompilationEndedError
        self.done.append(name)

    def is_compiled(self, guided: GuidedDecoding) -> bool:
        """Whether it was."""
        return guided.regex in self.done

    def interrupt(self, guided: GuidedDecoding) -> None:
        """End it."""
        self.ended.add(str(guided.regex))


def scenario(test: Callable[[Guides, GuideQueue], Coroutine[Any, Any, None]]) -> None:
    guides = Guides()
    queue = GuideQueue(guides)

    async def timed() -> None:
        async with asyncio.timeout(20):
            await test(guides, queue)

    try:
        asyncio.run(timed())
    finally:
        guides.gate.set()
        queue.close()


async def came(true: Callable[[], Any]) -> None:
    while not true():
        await asyncio.sleep(0.002)


def regex(text: str) -> GuidedDecoding:
    return GuidedDecoding(regex=text)


def test_slow_grammars_hold_up_no_quick_one() -> None:
    async def test(guides: Guides, queue: GuideQueue) -> None:
        slow = [asyncio.ensure_future(queue.compile(regex(f"slow{n}"), "a")) for n in range(3)]
        await came(lambda: ("slow0", None) in guides.began)
        for client in ("a", "b"):
            await queue.compile(regex(f"quick of {client}"), client)
        assert guides.done == ["quick of a", "quick of b"]
        guides.gate.set()
        await asyncio.gather(*slow)
        assert guides.done[2:] == ["slow0", "slow1", "slow2"]

    scenario(test)


def test_short_grammars_of_a_client_come_before_its_long_ones() -> None:
    async def test(guides: Guides, queue: GuideQueue) -> None:
        tasks = [asyncio.ensure_future(queue.compile(regex("block"), "a"))]
        await came(lambda: guides.began)
        tasks += [asyncio.ensure_future(queue.compile(regex("x" * size), "a")) for size in (900, 20, 3)]
        await came(lambda: len(queue._running) == 4)
        await asyncio.sleep(0.02)
        guides.gate.set()
        await asyncio.gather(*tasks)
        assert [len(name) for name in guides.done] == [len("block"), 3, 20, 900]

    scenario(test)


def test_clients_take_turns_at_slow_grammars_too() -> None:
    async def test(guides: Guides, queue: GuideQueue) -> None:
        tasks = [asyncio.ensure_future(queue.compile(regex(f"slow {n}a"), "a")) for n in range(3)]
        await came(lambda: len(guides.began) == 4)  # all were tried, and one goes on
        tasks.append(asyncio.ensure_future(queue.compile(regex("slow b"), "b")))
        await came(lambda: len(guides.began) == 5)
        await asyncio.sleep(0.02)
        guides.gate.set()
        await asyncio.gather(*tasks)
        assert guides.done == ["slow 0a", "slow 1a", "slow b", "slow 2a"]

    scenario(test)


def test_a_grammar_is_compiled_once_and_ended_when_the_last_of_its_requests_left() -> None:
    async def test(guides: Guides, queue: GuideQueue) -> None:
        first, second = (asyncio.ensure_future(queue.compile(regex("slow"), client)) for client in "ab")
        await came(lambda: ("slow", None) in guides.began)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert not guides.ended and [name for name, _ in guides.began] == ["slow", "slow"]
        second.cancel()
        await came(lambda: ("slow ended", None) in guides.began)
        guides.ended.clear()
        guides.gate.set()
        await queue.compile(regex("slow"), "c")
        assert guides.done == ["slow"], "who asks for it then has it compiled"

    scenario(test)


def test_a_schema_is_written_once_for_a_request() -> None:
    class Schema(Mapping[str, Any]):
        """Counts how often it is read."""

        def __init__(self) -> None:
            self.read = 0

        def __getitem__(self, name: str) -> Any:
            return {"type": "string"}[name]

        def __iter__(self) -> Iterator[str]:
            self.read += 1
            return iter(("type",))

        def __len__(self) -> int:
            return 1

    schema = Schema()

    class Reading(Guides):
        def compile(self, guided: GuidedDecoding, seconds: float | None = None) -> None:
            assert guided.json == '{"type": "string"}'
            assert key_of(guided) == key_of(GuidedDecoding(json={"type": "string"}))

    queue = GuideQueue(Reading())
    try:
        asyncio.run(queue.compile(GuidedDecoding(json=schema)))
    finally:
        queue.close()
    assert schema.read == 1


def test_what_waits_when_its_requests_left_is_never_begun() -> None:
    async def test(guides: Guides, queue: GuideQueue) -> None:
        one, other = (asyncio.ensure_future(queue.compile(regex(f"slow{n}"), "a")) for n in range(2))
        await came(lambda: len(guides.began) == 3)
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
        guides.gate.set()
        await one
        await queue.compile(regex("slow2"), "a")
        assert guides.done == ["slow0", "slow2"]

    scenario(test)


def test_a_refusal_reaches_all_who_wait_for_a_grammar() -> None:
    async def test(guides: Guides, queue: GuideQueue) -> None:
        found = await asyncio.gather(*(queue.compile(regex("wrong")) for _ in range(2)), return_exceptions=True)
        assert [str(error) for error in found] == ["it is wrong."] * 2 and len(guides.began) == 1

    scenario(test)


def test_what_waits_can_be_refused_at_once() -> None:
    async def test(guides: Guides, queue: GuideQueue) -> None:
        waiting = [asyncio.ensure_future(queue.compile(regex(f"slow{n}"))) for n in range(2)]
        await came(lambda: len(guides.began) == 3)
        queue.refuse(EngineClosingError("no more."))
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert [str(error) for error in found] == ["no more."] * 2
        assert "slow0" in guides.ended  # and slow1 where its first try had not returned yet
        with pytest.raises(EngineClosingError):
            await queue.compile(regex("quick"))

    scenario(test)


def test_a_guide_is_compiled_within_the_requests_time(bytes_tokenizer: Any) -> None:
    core = FakeCore(bytes_tokenizer, guides=Guides())  # type: ignore[arg-type]

    async def test() -> None:
        async with asyncio.timeout(10), AsyncEngine(core) as engine:
            with pytest.raises(RequestTimeoutError, match=r"waited for 0\.05 s for its guide"):
                await engine.submit("say: x", SamplingParams(guided=regex("slow")), timeout=0.05)

    asyncio.run(test())
    assert not core.outputs


@pytest.mark.parametrize("done", [True, False])
def test_a_server_that_leaves_waits_for_quick_guides_and_says_to_others_that_it_leaves(
    bytes_tokenizer: Any, done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_engine, "GUIDES_SECONDS", 10.0 if done else 0.1)
    monkeypatch.setattr(run, "LAST_WORDS_SECONDS", 0 if done else 5)
    guides = Guides()
    core = FakeCore(bytes_tokenizer, guides=guides)  # type: ignore[arg-type]
    asked = {"model": "fake", "prompt": "say: x", "guided_regex": "slow", "max_tokens": 1}
    answers: list[Any] = []
    with running(core, ServerSettings(drain_timeout=20)) as server:
        client = threading.Thread(target=lambda: answers.append(server.http().post("/v1/completions", json=asked)))
        client.start()
        until(lambda: ("slow", None) in guides.began)
        server.stop()
        until(lambda: not server.engine.accepting)
        began = time.monotonic()
        if done:
            time.sleep(0.3)
            guides.gate.set()
        client.join(20)
    assert time.monotonic() - began < 10
    assert answers[0].status_code == (200 if done else 503), answers[0].text
    assert done or answers[0].json()["error"]["code"] == "shutting_down"
