"""The asyncio side of the engine: one core and its thread, any number of tasks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from fake_core import FakeCore, FakeLimits, FakeScheduler

from ttpu_core.errors import RequestError
from ttpu_core.generation.sampling_params import SamplingParams
from ttpu_core.registry import default_registry
from ttpu_serve.api.async_engine import MOST_FAILURES, AsyncEngine
from ttpu_serve.api.engine_config import EngineConfig
from ttpu_serve.api.output_queue import (
    EngineClosingError,
    EngineDeadError,
    RequestFailedError,
    RequestTimeoutError,
    merged,
)
from ttpu_serve.api.outputs import Logprob, OutputDelta
from ttpu_serve.execution.errors import QueueFullError

LONG = SamplingParams(max_tokens=200, ignore_eos=True)


@asynccontextmanager
async def started(core: FakeCore) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(core).start()
    try:
        yield engine
    finally:
        await engine.shutdown(0)


async def text_of(engine: AsyncEngine, prompt: str, params: SamplingParams | None = None, **options: Any) -> str:
    said = ""
    async for delta in engine.generate(prompt, params or SamplingParams(max_tokens=50), **options):
        said += delta.text
    return said


async def until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline, "it did not come true"
        await asyncio.sleep(0.005)


def test_many_tasks_share_one_core(bytes_tokenizer: Any) -> None:
    async def scenario() -> None:
        core = FakeCore(bytes_tokenizer, seconds=0.001)
        async with started(core) as engine:
            said = await asyncio.gather(*(text_of(engine, f"say: number {n}") for n in range(30)))
            assert said == [f"number {n}" for n in range(30)]
            assert core.counts.steps < 100, "they were answered together"
        assert core.closed and threading.active_count() < 20

    asyncio.run(scenario())


def test_leaving_a_stream_aborts_its_request(bytes_tokenizer: Any) -> None:
    async def scenario() -> None:
        core = FakeCore(bytes_tokenizer, seconds=0.001)
        async with started(core) as engine:
            stream = await engine.submit("say: on ", LONG, request_id="one")
            async for _ in stream:
                break
            stream.close()
            await until(lambda: core.aborted == ["one"] and not core.outputs)
            task = asyncio.create_task(text_of(engine, "say: on ", LONG, request_id="two"))
            await until(lambda: core.outputs)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: core.aborted == ["one", "two"] and not core.outputs)

    asyncio.run(scenario())


def test_an_aborted_request_ends_for_whoever_reads_it(bytes_tokenizer: Any) -> None:
    async def scenario() -> None:
        core = FakeCore(bytes_tokenizer, seconds=0.001)
        async with started(core) as engine:
            stream = await engine.submit("say: on ", replace(LONG, n=2), request_id="one", timeout=60)
            deltas: list[OutputDelta] = []
            async for delta in stream:
                if not deltas:
                    engine.abort("one")
                    engine.abort("nobody's")
                deltas.append(delta)
            assert [deltas[-1].finish_reason, deltas[-2].finish_reason] == ["abort", "abort"]
            assert deltas[-1].num_prompt_tokens == 8 and deltas[-1].num_output_tokens > 0
            assert not core.outputs and await engine.drain(1)

    asyncio.run(scenario())


def test_a_request_is_aborted_before_it_said_anything(bytes_tokenizer: Any) -> None:
    async def scenario() -> None:
        async with started(FakeCore(bytes_tokenizer)) as engine:
            adding = asyncio.create_task(engine.submit("say: on ", LONG, request_id="one"))
            await asyncio.sleep(0)
            engine.abort("one")
            deltas = [delta async for delta in await adding]
            assert deltas[-1].finish_reason == "abort"

    asyncio.run(scenario())


def test_a_submission_that_is_cancelled_aborts_nobody_elses_request(bytes_tokenizer: Any) -> None:
    async def scenario() -> None:
        core = FakeCore(bytes_tokenizer, seconds=0.001)
        async with started(core) as engine:
            first = await engine.submit("say: to the end", SamplingParams(max_tokens=50), request_id="same")
            blocked = asyncio.create_task(engine.call(lambda: time.sleep(0.05)))
            await asyncio.sleep(0.02)
            second = asyncio.create_task(engine.submit("say: on ", LONG, request_id="same"))
            third = asyncio.create_task(engine.submit("say: on ", LONG, request_id="other"))
            await asyncio.sleep(0)
            second.cancel()
            third.cancel()
            await asyncio.gather(blocked, second, third, return_exceptions=True)
            assert "".join([delta.text async for delta in first]) == "to the end"
            await until(lambda: not core.outputs)
            assert core.aborted in ([], ["other"]) and await engine.drain(1)

    asyncio.run(scenario())


def test_prompts_of_a_refused_request_are_not_counted(bytes_tokenizer: Any) -> None:
    async def scenario() -> None:
        core = FakeCore(bytes_tokenizer, max_running=2)
        async with started(core) as engine:
            with pytest.raises(QueueFullError):
                await engine.submit_all(["say: a", "say: b", "say: c"], LONG)
            assert not core.outputs and (core.counts.requests, core.counts.prompt_tokens) == (0, 0)

    asyncio.run(scenario())


def test_an_answer_that_fails_takes_the_others_of_its_request_along(bytes_tokenizer: Any) -> None:
    async def scenario() -> None:
        core = FakeCore(bytes_tokenizer, seconds=0.001)
        step = core.step

        def failing() -> list[OutputDelta]:
            bad = [answer for answer in core.outputs if (answer.id, answer.index) == ("bad", 1)]
            core.outputs = [answer for answer in core.outputs if answer not in bad]
            return [*step(), *(OutputDelta("bad", 1, "", [], None, "error", error="not a number.") for _ in bad)]

        core.step = failing  # type: ignore[method-assign]
        async with started(core) as engine:
            with pytest.raises(RequestFailedError, match="not a number"):
                await text_of(engine, "say: on ", replace(LONG, n=3), request_id="bad")
            await until(lambda: not core.outputs)
            assert core.aborted == ["bad"]

    asyncio.run(scenario())


def test_a_slow_reader_gets_everything_in_fewer_pieces(bytes_tokenizer: Any) -> None:
    async def scenario() -> None:
        core = FakeCore(bytes_tokenizer)
        async with started(core) as engine:
            stream = await engine.submit("say: one two three", SamplingParams(max_tokens=50, logprobs=0))
            await until(lambda: not core.outputs)
            await asyncio.sleep(0.01)
            deltas = [delta async for delta in stream]
            assert "".join(delta.text for delta in deltas) == "one two three" and len(deltas) < 5
            assert sum(len(delta.token_ids) for delta in deltas) == 14
            assert sum(len(delta.logprobs or ()) for delta in deltas) == 14
            assert deltas[-1].finish_reason == "stop" and deltas[-1].num_output_tokens == 14

    asyncio.run(scenario())


def test_merging_keeps_order_and_the_last_state() -> None:
    first = OutputDelta("r", 0, "a", [1], [{1: Logprob(-1.0)}], None, num_output_tokens=1, prompt_logprobs=[None])
    last = OutputDelta("r", 0, "b", [2, 3], [{2: Logprob(-2.0)}, {3: Logprob(-3.0)}], "stop", 3, num_output_tokens=3)
    both = merged([first, last])
    assert (both.text, both.token_ids, both.finish_reason, both.stop_reason) == ("ab", [1, 2, 3], "stop", 3)
    assert [next(iter(one)) for one in both.logprobs or ()] == [1, 2, 3]
    assert both.num_output_tokens == 3 and both.prompt_logprobs == [None]


def test_a_refusal_reaches_its_caller_and_nobody_else(bytes_tokenizer: Any) -> None:
    async def scenario() -> None:
        async with started(FakeCore(bytes_tokenizer)) as engine:
            with pytest.raises(RequestError, match="999"):
                await engine.submit([999], SamplingParams())
            assert await text_of(engine, "say: fine") == "fine"

    asyncio.run(scenario())


def test_a_request_that_fails_in_the_engine_fails_alone(bytes_tokenizer: Any) -> None:
    async def scenario() -> None:
        core = FakeCore(bytes_tokenizer, seconds=0.001)
        step = core.step

        def failing() -> list[OutputDelta]:
            deltas = step()
            bad = [answer for answer in core.outputs if answer.id == "bad"]
            core.outputs = [answer for answer in core.outputs if answer.id != "bad"]
            return [*deltas, *(OutputDelta("bad", 0, "", [], None, "error", error="not a number.") for _ in bad)]

        core.step = failing  # type: ignore[method-assign]
        async with started(core) as engine:
            good = asyncio.create_task(text_of(engine, "say: a long good answer"))
            with pytest.raises(RequestFailedError, match="not a number"):
                await text_of(engine, "say: bad", request_id="bad")
            assert await good == "a long good answer"

    asyncio.run(scenario())


def test_a_core_that_raises_fails_all_and_nothing_hangs(bytes_tokenizer: Any) -> None:
    async def scenario() -> None:
        core = FakeCore(bytes_tokenizer, seconds=0.002, fail_at=5)
        async with started(core) as engine:
            tasks = [asyncio.create_task(text_of(engine, "say: on ", LONG)) for _ in range(3)]
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(error, EngineDeadError) and "on fire" in str(error) for error in done)
            assert not engine.alive and engine.error == "RuntimeError: the device is on fire"
            with pytest.raises(EngineDeadError, match="on fire"):
                await engine.submit("say: hello", SamplingParams())
            assert (await engine.stats()).steps == 5 + MOST_FAILURES

    asyncio.run(scenario())


def test_a_deadline_ends_a_request_after_what_it_said(bytes_tokenizer: Any) -> None:
    async def scenario() -> None:
        core = FakeCore(bytes_tokenizer, seconds=0.005)
        async with started(core) as engine:
            said = ""
            with pytest.raises(RequestTimeoutError):
                async for delta in engine.generate("say: on ", LONG, timeout=0.1):
                    said += delta.text
            assert said.startswith("on ")
            await until(lambda: not core.outputs)

    asyncio.run(scenario())


def test_draining_lets_answers_end_and_takes_no_new_ones(bytes_tokenizer: Any) -> None:
    async def scenario() -> None:
        core = FakeCore(bytes_tokenizer, seconds=0.002)
        async with started(core) as engine:
            task = asyncio.create_task(text_of(engine, "say: to the end"))
            await until(lambda: core.outputs)
            draining = asyncio.create_task(engine.drain(10))
            await asyncio.sleep(0)
            with pytest.raises(EngineClosingError):
                await engine.submit("say: late", SamplingParams())
            assert await draining and await task == "to the end"

    asyncio.run(scenario())


def test_draining_waits_for_work_that_submits_one_request_after_another(bytes_tokenizer: Any) -> None:
    async def scenario() -> None:
        async with started(FakeCore(bytes_tokenizer)) as engine:
            engine.ongoing.add("a search")
            draining = asyncio.create_task(engine.drain(10))
            await asyncio.sleep(0.05)
            for prompt in ("say: one", "say: two"):
                (stream,) = await engine.submit_all([prompt], SamplingParams(), goes_on=True)
                assert "".join([delta.text async for delta in stream]) == prompt[5:]
                await asyncio.sleep(0.05)
            with pytest.raises(EngineClosingError):
                await engine.submit_all(["say: no"], SamplingParams())
            assert not draining.done()
            engine.ongoing.discard("a search")
            assert await draining
        async with started(FakeCore(bytes_tokenizer)) as engine:
            engine.ongoing.add("a search")
            assert not await engine.drain(0.05)
            with pytest.raises(EngineClosingError):
                await engine.submit_all(["say: too late"], SamplingParams(), goes_on=True)

    asyncio.run(scenario())


def test_a_request_that_never_fits_into_the_queue_is_no_full_queue(bytes_tokenizer: Any) -> None:
    """After which clients, and lines of batches, would ask again and again."""

    async def scenario() -> None:
        core = FakeCore(bytes_tokenizer, scheduler=FakeScheduler(FakeLimits(max_num_seqs=2, max_waiting=3)))
        async with started(core) as engine:
            assert len(await engine.submit_all(["say: a"], replace(LONG, n=5))) == 1
            with pytest.raises(RequestError, match="SamplingParams are needed"):
                await engine.submit("say: a", {"n": 1})  # type: ignore[arg-type]
            for prompts, n in ((["say: a"], 6), (["say: a"] * 2, 3)):
                with pytest.raises(RequestError, match="6 sequences, but at most 2 run") as refusal:
                    await engine.submit_all(prompts, replace(LONG, n=n))
                assert not isinstance(refusal.value, QueueFullError)

    asyncio.run(scenario())


def test_draining_gives_up_in_time_and_says_so(bytes_tokenizer: Any) -> None:
    async def scenario() -> None:
        core = FakeCore(bytes_tokenizer, seconds=0.01)
        async with started(core) as engine:
            task = asyncio.create_task(text_of(engine, "say: on ", LONG))
            await until(lambda: core.outputs)
            assert not await engine.drain(0.05)
            with pytest.raises(EngineClosingError):
                await task

    asyncio.run(scenario())


def test_calls_run_between_steps_in_the_engines_thread(bytes_tokenizer: Any) -> None:
    async def scenario() -> None:
        async with started(FakeCore(bytes_tokenizer)) as engine:
            assert await engine.call(lambda: threading.current_thread().name) == "ttpu-engine"
            with pytest.raises(ZeroDivisionError):
                await engine.call(lambda: 1 // 0)
            assert engine.alive

    asyncio.run(scenario())


def test_an_engine_that_stopped_refuses_calls_and_can_be_closed_again(bytes_tokenizer: Any) -> None:
    async def scenario() -> None:
        engine = AsyncEngine(FakeCore(bytes_tokenizer))
        with pytest.raises(EngineDeadError, match="not running"):
            await engine.call(lambda: 1)
        engine.start()
        await engine.shutdown(1)
        engine.close()
        with pytest.raises(EngineDeadError, match="shut down for good: make another one"):
            await engine.submit("say: hello", SamplingParams())

    asyncio.run(scenario())


def test_an_engine_is_made_of_a_checkpoint_and_lives_as_long_as_it_is_entered(
    bytes_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = FakeCore(bytes_tokenizer)
    options = default_registry().backend().options
    made: list[Any] = []
    monkeypatch.setattr("ttpu_serve.api.open_engine.open_engine", lambda *given, **options: made.append(given) or core)

    async def scenario() -> None:
        async with AsyncEngine.from_pretrained("./llama", max_num_seqs=4) as engine:
            assert await text_of(engine, "say: hello") == "hello"
        assert core.closed and made == [("./llama", options(), EngineConfig(max_num_seqs=4))]

    asyncio.run(scenario())


def test_embeddings_come_as_outputs(bytes_tokenizer: Any) -> None:
    async def scenario() -> None:
        async with started(FakeCore(bytes_tokenizer)) as engine:
            output = await engine.embed([1, 2, 3])
            assert output.prompt_token_ids == [1, 2, 3] and float((output.embedding**2).sum()) == pytest.approx(1)
            assert (await engine.embed("hello")).prompt_token_ids == list(b"hello")

    asyncio.run(scenario())


def test_counters_are_told_though_the_core_is_busy(bytes_tokenizer: Any) -> None:
    async def scenario() -> None:
        core = FakeCore(bytes_tokenizer)
        async with started(core) as engine:
            assert (await engine.stats()).steps == 0
            blocked = asyncio.create_task(engine.call(lambda: time.sleep(0.3)))
            await asyncio.sleep(0.01)
            began = time.monotonic()
            assert (await engine.stats(patience=0.05)).steps == 0
            assert time.monotonic() - began < 0.25
            await blocked

    asyncio.run(scenario())
