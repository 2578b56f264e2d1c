"""Grammars of strangers are compiled and followed in processes that may end: what ends one harms no other request."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tiny

pytest.importorskip("llguidance")

from serving import Running, running, until
from transformers import AutoTokenizer

from ttpu_core.errors import RequestError
from ttpu_core.generation.sampling_params import GuidedDecoding
from ttpu_serve.api.guide_queue import QUICK_SECONDS
from ttpu_serve.api.open_engine import open_engine, read_options
from ttpu_serve.guided import isolated
from ttpu_serve.guided import process as processes
from ttpu_serve.guided.grammar_size import MOST_BYTES, MOST_CHAIN, MOST_DEFINITIONS, MOST_RULES, oversized_grammar
from ttpu_serve.guided.guides import Guide, GuideFactory
from ttpu_serve.guided.matchers import CompilationEndedError, SlowGrammarError
from ttpu_serve.guided.process import MASKS, MIB, TRIAL, GuideProcess
from ttpu_serve.server import ServerSettings

OBJECT = GuidedDecoding(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


def chain(length: int, kind: str) -> dict[str, Any]:
    """A schema of definitions that refer to the next one."""
    following = [{"$ref": f"#/$defs/d{place + 1}"} for place in range(length - 1)] + [{"type": "string"}]

    def wrapped(one: Any) -> dict[str, Any]:
        return {"type": "object", "properties": {"a": one}} if kind == "properties" else {kind: [one]}

    return {"$ref": "#/$defs/d0", "$defs": {f"d{place}": wrapped(one) for place, one in enumerate(following)}}


def rules(length: int, letter: str) -> str:
    lines = [f"{letter}{place}: {letter}{place + 1}" for place in range(length - 1)]
    return "\n".join(["start: " + f"{letter}0", *lines, f'{letter}{length - 1}: "a"'])


HOSTILE = {
    "properties": GuidedDecoding(json=chain(1200, "properties")),
    "anyOf": GuidedDecoding(json=chain(1200, "anyOf")),
    "allOf": GuidedDecoding(json=chain(1200, "allOf")),
    "rules": GuidedDecoding(grammar=rules(4000, "r")),
    "terminals": GuidedDecoding(grammar=rules(4000, "T")),
    "chain of rules": GuidedDecoding(grammar=rules(2000, "r")),
    "optional letters": GuidedDecoding(regex="a?" * 14_000),
    # which the limits do not see, so that its process ends
    "schema in a grammar": GuidedDecoding(grammar=f"start: %json {json.dumps(chain(1200, 'anyOf'))}"),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("bytes")
    tiny.write_tokenizer(folder)
    return AutoTokenizer.from_pretrained(str(folder))


@pytest.fixture(scope="module")
def factory(tokenizer: Any) -> Iterator[GuideFactory]:
    made = GuideFactory(tokenizer, 256, 288, [2], "isolated")
    made.compile(GuidedDecoding(regex="first"))  # whichever test comes first, what compiles is there
    yield made
    made.close()


@pytest.fixture
def own_factory(tokenizer: Any) -> Iterator[GuideFactory]:
    """One of which no other test's outputs follow guides."""
    made = GuideFactory(tokenizer, 256, 288, [2], "isolated")
    yield made
    made.close()


def masks_process(factory: GuideFactory) -> GuideProcess:
    matchers: Any = factory._matchers
    assert isinstance(matchers, isolated.IsolatedMatchers)
    process: GuideProcess = matchers._masks.process
    return process


def stop(process: GuideProcess) -> None:
    """Let a process answer nothing more, until it is killed."""
    os.kill(process._process.pid, signal.SIGSTOP)
    stat = Path(f"/proc/{process._process.pid}/stat")
    until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")  # the signal may come after the next call


def mask(guide: Guide) -> np.ndarray:
    found = np.zeros(guide.factory.words, np.uint32)
    guide.fill(found)
    return found


def test_masks_are_those_of_this_process(factory: GuideFactory, tokenizer: Any) -> None:
    inline = GuideFactory(tokenizer, 256, 288, [2])
    ours, theirs = (each.compile(OBJECT) for each in (factory, inline))
    for token in [*b'{"a', ord("x"), *b'": 1', *b"2}", 2]:
        np.testing.assert_array_equal(mask(ours), mask(theirs))
        assert ours.legal_prefix([token, 3]) == theirs.legal_prefix([token, 3])
        assert ours.accept(token) == theirs.accept(token)
        assert ours.finished == theirs.finished
    ours.rollback(3)
    theirs.rollback(3)
    np.testing.assert_array_equal(mask(ours), mask(theirs))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_grammar_that_ends_its_process_is_refused(factory: GuideFactory, name: str) -> None:
    """Twice: the refusal is remembered."""
    before = factory.compile(OBJECT)
    assert before.accept(ord("{"))
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(RequestError, match="guided decoding cannot follow this"):
            factory.compile(HOSTILE[name])
    assert time.monotonic() - began < 0.1
    assert before.accept(ord('"')) and factory.compile(OBJECT).accept(ord("{"))


def large(number: int) -> GuidedDecoding:
    """A grammar that takes some 14 MiB."""
    draw = random.Random(number)
    return GuidedDecoding(choice=tuple("a" + "".join(draw.choices("abcdefghij", k=59)) for _ in range(3900)))


def test_large_automata_are_given_back(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of some choices may be followed, and together they take more than there may be."""
    monkeypatch.setattr(isolated, "MASKS", replace(MASKS, memory=110 * MIB))
    factory = GuideFactory(tokenizer, 256, 288, [2], "isolated")
    first = factory.compile(GuidedDecoding(regex="(ab)*c"))
    assert first.accept(ord("a"))
    process = masks_process(factory)
    for extra in range(1, 8):
        assert factory.compile(large(extra)).accept(ord("a"))
    # The other process may not stand by yet on a busy machine: it takes over at a later step.
    until(lambda: mask(first).any() and masks_process(factory) is not process, 60)
    assert first.accept(ord("b")), first.error
    until(lambda: not process.alive)
    assert masks_process(factory).held < 220 * MIB
    factory.close()


@pytest.mark.parametrize(
    ("guided", "why"),
    [
        (GuidedDecoding(json=chain(MOST_CHAIN + 1, "anyOf")), f"a chain of more than {MOST_CHAIN} definitions"),
        (GuidedDecoding(json={"$defs": {f"d{n}": {} for n in range(MOST_DEFINITIONS + 1)}}), "5,001 definitions, and"),
        (GuidedDecoding(grammar=rules(MOST_RULES, "r")), "3,001 rules and terminals, and 3,000 are allowed"),
        (GuidedDecoding(grammar=rules(MOST_CHAIN, "T")), f"a chain of more than {MOST_CHAIN} rules and terminals"),
        (
            GuidedDecoding(grammar="root ::= r0\n" + "\n".join(f"r{n} ::= r{n + 1}" for n in range(300))),
            "a chain of more",
        ),
        (GuidedDecoding(grammar=json.dumps({"grammars": [{"json_schema": chain(1200, "allOf")}]})), "a chain of more"),
        (GuidedDecoding(regex="ab\\"), "ends in a backslash"),
        (GuidedDecoding(json="{" + " " * 600_000 + "}"), "600,002 characters"),
        (GuidedDecoding(json="[" * 20_000), "nested too deeply"),
        (GuidedDecoding(json="[]"), "it is a list, not an object"),
    ],
    ids=["chain", "definitions", "rules", "chain of terminals", "gbnf", "list", "backslash", "blanks", "deep", "array"],
)
def test_what_is_too_large_is_named(factory: GuideFactory, guided: GuidedDecoding, why: str) -> None:
    with pytest.raises(RequestError, match=f"^guided decoding cannot follow this .*{why}") as refused:
        factory.compile(guided)
    assert str(refused.value).count("cannot follow") == 1


@pytest.mark.parametrize(
    "guided",
    [
        GuidedDecoding(json=chain(MOST_CHAIN, "properties")),
        GuidedDecoding(json=chain(400, "anyOf") | {"$ref": "#/$defs/d399", "examples": [{"$ref": "#/$defs/d0"}]}),
        GuidedDecoding(json={"$defs": {f"d{n}": {"$ref": "#"} for n in range(900)}, "enum": ["ab"]}),
        GuidedDecoding(json={"properties": {"a": {"const": {"$ref": "#/nowhere"}}, "b": {"$ref": "#/properties/b"}}}),
        GuidedDecoding(grammar=rules(MOST_CHAIN - 1, "r") + "\n// x: y\n"),
        GuidedDecoding(grammar='start: "x: y" | "a"'),
        GuidedDecoding(regex="ab\\\\"),
    ],
    ids=["chain", "constant", "definitions", "circle", "rules", "text", "backslashes"],
)
def test_what_is_large_is_followed(factory: GuideFactory, guided: GuidedDecoding) -> None:
    factory.compile(guided)


@pytest.mark.parametrize("unit", ['"\\', "/\\", "/*", '"/', "a [", "a: ", "a\n", '{"$ref": "#'])
def test_the_size_of_a_grammar_is_found_in_linear_time(unit: str) -> None:
    """A search that begins again at each quote would take minutes."""
    began = time.thread_time()
    oversized_grammar(unit * (200_000 // len(unit)))
    assert time.thread_time() - began < 5


def test_what_is_too_long_is_refused_before_it_is_compiled(factory: GuideFactory) -> None:
    with pytest.raises(RequestError, match=r"it has 262,\d+ bytes, and 262,144 are allowed"):
        factory.compile(GuidedDecoding(regex="a" * MOST_BYTES))


def test_outputs_go_on_when_the_process_of_their_masks_ends(factory: GuideFactory) -> None:
    guide, other = factory.compile(OBJECT), factory.compile(GuidedDecoding(regex="[0-9]{4}"))
    assert guide.accept(ord("{")) and other.accept(ord("1"))
    expected = mask(guide)
    process = masks_process(factory)
    for _ in range(2):  # as often as it may be
        os.kill(process._process.pid, signal.SIGKILL)
        process._process.wait()
        np.testing.assert_array_equal(mask(guide), expected)
        assert not other.accept(ord("a")) and not other.finished
        process = masks_process(factory)
    assert other.accept(ord("2"))


def test_the_process_that_takes_over_knows_the_grammars_of_all_outputs(
    factory: GuideFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that outputs do not wait for them to be compiled; and one that it does not know holds nobody up for long."""
    matchers: Any = factory._matchers
    guide, other = factory.compile(OBJECT), factory.compile(GuidedDecoding(regex="[0-9]{4}"))
    assert guide.accept(ord("{")) and other.accept(ord("1"))
    standby = matchers._standby
    until(lambda: standby.started and all(map(standby.knows, matchers._in_use)), 60)
    masks_process(factory).kill()
    assert guide.accept(ord('"')) and masks_process(factory) is standby.process

    until(lambda: matchers._standby.started and all(map(matchers._standby.knows, matchers._in_use)), 60)
    monkeypatch.setattr(matchers._standby, "_left", 0.2)
    monkeypatch.setattr(matchers._standby, "_known", set())
    monkeypatch.setattr(matchers._standby, "_given", {})
    monkeypatch.setattr(matchers._standby, "compile", lambda *_: time.sleep(1.5))
    masks_process(factory).kill()
    began = time.monotonic()
    assert not other.accept(ord("2")) and "reading it again takes long" in str(other.error)
    assert time.monotonic() - began < 2


def test_a_grammar_of_earlier_outputs_is_given_to_a_process_that_took_over_before_an_output_follows_it(
    own_factory: GuideFactory,
) -> None:
    """So that no step of the engine waits for its compilation."""
    factory, old = own_factory, GuidedDecoding(regex="[a-f]{7}")
    assert factory.compile(old).accept(ord("a"))
    assert factory.is_compiled(old)
    matchers: Any = factory._matchers
    matchers._promised.clear()
    until(lambda: matchers._standby is not None and matchers._standby.knows(isolated.key_of(old)), 60)
    matchers._standby._known.discard(isolated.key_of(old))
    matchers._standby._given.clear()
    masks_process(factory).kill()
    matchers.server(isolated.key_of(OBJECT), OBJECT)
    assert not factory.is_compiled(old)
    guide = factory.compile(old)
    assert matchers._masks.knows(isolated.key_of(old)) and factory.is_compiled(old)
    assert isolated.key_of(old) in matchers._promised, "for the next process as well"
    assert guide.accept(ord("b"))


def test_a_new_grammar_waits_for_another_process_where_that_of_masks_is_full(
    own_factory: GuideFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    factory, following = own_factory, own_factory.compile(OBJECT)
    assert following.accept(ord("{"))
    matchers: Any = factory._matchers
    before = matchers._masks
    until(lambda: matchers._standby is not None and matchers._standby.started, 60)
    monkeypatch.setattr(before.process, "held", MASKS.memory + 1)
    assert factory.compile(GuidedDecoding(regex="[g-k]{6}")).accept(ord("g"))
    assert matchers._masks is not before and not before.knows(isolated.key_of(GuidedDecoding(regex="[g-k]{6}")))
    assert following.accept(ord('"'))
    until(lambda: not before.alive)


def test_compilations_give_way_to_steps_and_masks(factory: GuideFactory) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    factory.compile(OBJECT).accept(ord("{"))
    process = masks_process(factory)
    *compilers, masks = process._threads
    assert [os.getpriority(os.PRIO_PROCESS, thread) for thread in compilers] == [min(own + 19, 19)] * MASKS.compilers
    assert os.getpriority(os.PRIO_PROCESS, masks) == own
    matchers: Any = factory._matchers
    trial = matchers._trials.get()
    matchers._trials.put(trial)
    assert os.getpriority(os.PRIO_PROCESS, trial._process.pid) == min(own + 19, 19)


def test_a_mask_that_takes_too_long_ends_its_own_output(factory: GuideFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    guide, other = factory.compile(OBJECT), factory.compile(GuidedDecoding(regex="[0-9]{4}"))
    assert guide.accept(ord("{")) and other.accept(ord("1"))
    stop(masks_process(factory))
    began = time.monotonic()
    with monkeypatch.context() as patched:
        patched.setattr(processes, "MASK_SECONDS", 0.1)
        found = mask(guide)
    assert time.monotonic() - began < 5
    assert guide.error is not None and "longer than 0.1 seconds" in guide.error
    np.testing.assert_array_equal(found, factory.stop_mask)
    assert other.accept(ord("2")) and other.error is None


def test_an_output_whose_process_another_one_ends_goes_on_and_one_that_ends_each_does_not(
    factory: GuideFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = factory.compile(OBJECT)
    expected = [mask(guide)]
    for token in b'{"a':  # each time in the middle of a call
        process = masks_process(factory)
        stop(process)
        threading.Timer(0.1, process.kill).start()
        assert guide.accept(token)
        expected.append(mask(guide))
        assert guide.error is None and masks_process(factory) is not process
    call, ended = GuideProcess.on_matcher, list[int]()

    def ending(self: GuideProcess, name: str, *arguments: Any) -> Any:
        if name == "mask":
            ended.append(self._process.pid)
            self.kill()
        return call(self, name, *arguments)

    monkeypatch.setattr(GuideProcess, "on_matcher", ending)
    mask(guide)
    assert guide.error is not None and "too much stack or memory" in guide.error and len(set(ended)) == 2


def test_a_process_that_gets_no_processor_is_given_time(factory: GuideFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = factory.compile(OBJECT)
    assert guide.accept(ord("{"))
    process = masks_process(factory)
    stop(process)
    monkeypatch.setattr(processes, "MASK_SECONDS", 0.2)
    threading.Timer(0.5, lambda: os.kill(process._process.pid, signal.SIGCONT)).start()
    assert guide.accept(ord('"')) and guide.error is None and masks_process(factory) is process


def test_a_grammar_whose_masks_take_long_is_refused(factory: GuideFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "TRIED_SECONDS", 1e-9)
    with pytest.raises(RequestError, match="finding the next tokens takes longer than 1e-09 seconds"):
        factory.compile(GuidedDecoding(regex="[0-9]{7}"))


def test_a_grammar_that_cannot_go_on_after_its_first_tokens_is_refused(factory: GuideFactory) -> None:
    """Rather than each of its outputs, after every other one waited for its masks."""
    many = GuidedDecoding(json={"type": "object", "properties": {f"p{number}": {} for number in range(1500)}})
    with pytest.raises(RequestError, match=r"cannot follow this JSON schema .*Current row has .* items; max is"):
        factory.compile(many)
    assert factory.compile(OBJECT).accept(ord("{"))


def test_a_grammar_may_be_given_less_time_first(factory: GuideFactory) -> None:
    slow = GuidedDecoding(regex="a?" * 4000)
    with pytest.raises(SlowGrammarError):
        factory.compile(slow, 0.02)
    assert not factory.is_compiled(slow), "which says nothing of it"


def test_the_bounds_are_those_of_the_documentation() -> None:
    text = " ".join((Path(__file__).parents[3] / "docs" / "serving.md").read_text(encoding="utf-8").split())
    assert (
        f"{TRIAL.seconds:g} seconds of the processor and {processes.GRAMMAR_BYTES // MIB} MiB for each grammar" in text
    )
    assert f"tokens take at most {processes.TRIED_SECONDS:g} s each" in text
    assert f"longer than {processes.MASK_SECONDS:g} s ends its request" in text
    assert f"holds more than {MASKS.memory // MIB} MiB" in text
    assert f"{MOST_DEFINITIONS:,} definitions, {MOST_RULES:,} rules and terminals, chains of {MOST_CHAIN}" in text
    assert f"{MOST_BYTES >> 10} KiB" in text and f"within {QUICK_SECONDS:g} s" in text


def test_memory_is_given_back_when_no_output_has_a_guide(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "IDLE_SECONDS", 0.05)
    monkeypatch.setattr(isolated, "IDLE_MEMORY", 0)
    factory = GuideFactory(tokenizer, 256, 288, [2], "isolated")
    guide = factory.compile(large(0))
    assert guide.accept(ord("a"))
    process = masks_process(factory)
    time.sleep(0.3)
    assert masks_process(factory) is process, "an output has a guide"
    del guide
    until(lambda: process._process.poll() is not None)
    assert factory.compile(large(0)).accept(ord("a")), "and comes again when it is needed"
    factory.close()


def test_a_compilation_that_nobody_waits_for_is_ended(factory: GuideFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """And who asks for it then is not told that it takes too much."""
    matchers: Any = factory._matchers
    slow = GuidedDecoding(json={"type": "object", "properties": {"slow": {"type": "null"}}})
    started = threading.Event()
    original = GuideProcess.try_out

    def stopped(self: GuideProcess, *arguments: Any) -> str:
        stop(self)
        started.set()
        return original(self, *arguments)

    failures: list[BaseException] = []

    def compile_slowly() -> None:
        try:
            factory.compile(slow)
        except BaseException as error:
            failures.append(error)

    monkeypatch.setattr(GuideProcess, "try_out", stopped)
    thread = threading.Thread(target=compile_slowly)
    thread.start()
    assert started.wait(10)
    monkeypatch.undo()
    assert factory.compile(OBJECT).accept(ord("{")), "another grammar does not wait"
    matchers.interrupt(slow)
    thread.join(5)
    assert not thread.is_alive() and isinstance(failures[0], CompilationEndedError)
    assert factory.compile(slow).accept(ord("{"))


def test_guides_may_be_off(tokenizer: Any) -> None:
    with pytest.raises(RequestError, match="guided decoding was asked for, but this engine has it turned off"):
        GuideFactory(tokenizer, 256, 288, [2], "off").compile(OBJECT)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    pytest.importorskip("openai")
    folder: Path = tiny.llama_checkpoint(tmp_path_factory.mktemp("guided") / "llama")
    given = {"max_model_len": 64, "max_num_seqs": 2, "page_size": 16, "guides": "isolated"}
    load, config = read_options(str(folder), given, "jax")
    with running(open_engine(str(folder), load, config, backend="jax", progress=None), ServerSettings()) as server:
        yield server


def test_slow_grammars_of_some_hold_up_no_other_requests(served: Running) -> None:
    """Neither those with quick grammars nor those without."""
    with served.http() as http, ExitStack() as stack:
        ask = {"model": http.get("/v1/models").json()["data"][0]["id"], "prompt": [3, 4], "max_tokens": 2}
        assert http.post("/v1/completions", json=ask | {"guided_regex": "[0-9]{3}"}).status_code == 200
        slow = []
        for number in range(3):
            body = json.dumps(ask | {"guided_regex": "a?" * (15_000 + number)}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
            address = ("127.0.0.1", int(served.url.rpartition(":")[2]))
            slow.append(stack.enter_context(socket.create_connection(address)))
            slow[-1].sendall(f"{head}content-type: application/json\r\n\r\n".encode() + body)
        queue: Any = served.engine._guides
        until(lambda: len(queue._running) == 3)
        for extra in ({"guided_regex": "[a-f]{5}"}, {}):
            assert http.post("/v1/completions", json=ask | extra).status_code == 200
        for client in slow:
            with pytest.raises(BlockingIOError):
                client.recv(1, socket.MSG_DONTWAIT)
    until(lambda: not queue._running)  # nobody waits for them any more


def test_a_server_survives_hostile_grammars(served: Running) -> None:
    """While an ordinary client streams. A schema, a grammar, and one whose process ends."""
    import openai

    client = served.client()
    name = client.models.list().data[0].id
    asked: Any = {"model": name, "prompt": [3, 4], "max_tokens": 40, "extra_body": {"ignore_eos": True}}
    stream = client.completions.create(stream=True, stream_options={"include_usage": True}, **asked)
    for guided in (HOSTILE[name] for name in ("anyOf", "terminals", "schema in a grammar")):
        extra = {"guided_json": guided.json} if guided.json else {"guided_grammar": guided.grammar}
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model=name, prompt=[3, 4], max_tokens=2, extra_body=extra)
        assert "guided decoding cannot follow this" in str(refused.value)
    assert [*stream][-1].usage.completion_tokens == 40
    extra = {"guided_json": {"enum": ["yes"]}}
    answer = client.completions.create(model=name, prompt=[3, 4], max_tokens=20, extra_body=extra)
    assert answer.choices[0].text == '"yes"'
    stats = httpx.get(f"{served.url}/stats", timeout=30).json()["engine"]
    assert stats["running"] == 0 and not any(stats["pages_in_use"].values())
