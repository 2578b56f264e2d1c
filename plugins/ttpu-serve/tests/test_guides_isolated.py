"""Grammars of strangers are compiled and followed in processes that may end: what ends one harms no other request."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
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
from ttpu_serve.api.open_engine import open_engine, read_options
from ttpu_serve.guided import isolated
from ttpu_serve.guided.grammar import MOST_BYTES
from ttpu_serve.guided.guides import Guide, GuideFactory
from ttpu_serve.server import ServerSettings

OBJECT = GuidedDecoding(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


def chain(length: int, kind: str) -> dict[str, Any]:
    """A schema of definitions that refer to the next one."""
    following = [{"$ref": f"#/$defs/d{place + 1}"} for place in range(length - 1)] + [{"type": "string"}]
    wrap = {"properties": lambda one: {"type": "object", "properties": {"a": one}}, "anyOf": lambda one: {kind: [one]}}
    return {"$ref": "#/$defs/d0", "$defs": {f"d{place}": wrap[kind](one) for place, one in enumerate(following)}}


def rules(length: int, letter: str) -> str:
    lines = [f"{letter}{place}: {letter}{place + 1}" for place in range(length - 1)]
    return "\n".join(["start: " + f"{letter}0", *lines, f'{letter}{length - 1}: "a"'])


HOSTILE = {
    "properties": GuidedDecoding(json=chain(1200, "properties")),
    "anyOf": GuidedDecoding(json=chain(1200, "anyOf")),
    "rules": GuidedDecoding(grammar=rules(4000, "r")),
    "terminals": GuidedDecoding(grammar=rules(4000, "T")),
    "optional letters": GuidedDecoding(regex="a?" * 14_000),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("bytes")
    tiny.write_tokenizer(folder)
    return AutoTokenizer.from_pretrained(str(folder))


@pytest.fixture(scope="module")
def factory(tokenizer: Any) -> Iterator[GuideFactory]:
    made = GuideFactory(tokenizer, 256, 288, [2], "isolated")
    yield made
    made.close()


def masks_process(factory: GuideFactory) -> isolated.GuideProcess:
    matchers: Any = factory._matchers
    assert isinstance(matchers, isolated.IsolatedMatchers)
    process = matchers._masks
    assert process is not None
    return process


def stop(process: isolated.GuideProcess) -> None:
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


def test_large_automata_are_given_back(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of some regular expressions may be followed, and together they take more than there may be."""
    monkeypatch.setattr(isolated, "MASKS", replace(isolated.MASKS, memory=150 * isolated.MIB))
    monkeypatch.setattr(isolated, "TRIED_SECONDS", 3.0)
    monkeypatch.setattr(isolated, "MASK_SECONDS", 5.0)
    factory = GuideFactory(tokenizer, 256, 288, [2], "isolated")
    first = factory.compile(GuidedDecoding(regex="a?" * 2000))
    process = masks_process(factory)
    for extra in range(1, 8):
        assert factory.compile(GuidedDecoding(regex="a?" * (3000 + extra))).accept(ord("a"))
    assert first.accept(ord("a")) and not first.accept(ord("b"))
    assert process._process.poll() is not None and masks_process(factory).held < 300 * isolated.MIB
    factory.close()


def test_what_is_too_long_is_refused_before_it_is_compiled(factory: GuideFactory) -> None:
    with pytest.raises(RequestError, match=r"it has 262,\d+ bytes, and 262,144 are allowed"):
        factory.compile(GuidedDecoding(regex="a" * MOST_BYTES))


def test_outputs_go_on_when_the_process_of_their_masks_ends(factory: GuideFactory) -> None:
    guide, other = factory.compile(OBJECT), factory.compile(GuidedDecoding(regex="[0-9]{4}"))
    assert guide.accept(ord("{")) and other.accept(ord("1"))
    expected = mask(guide)
    process = masks_process(factory)
    os.kill(process._process.pid, signal.SIGKILL)
    process._process.wait()
    np.testing.assert_array_equal(mask(guide), expected)
    assert other.accept(ord("2")) and not other.accept(ord("a")) and not other.finished
    assert masks_process(factory) is not process


def test_a_mask_that_takes_too_long_ends_its_own_output(
    factory: GuideFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide, other = factory.compile(OBJECT), factory.compile(GuidedDecoding(regex="[0-9]{4}"))
    assert guide.accept(ord("{")) and other.accept(ord("1"))
    stop(masks_process(factory))
    with monkeypatch.context() as patched:
        patched.setattr(isolated, "MASK_SECONDS", 0.2)
        found = mask(guide)
    assert guide.error is not None and "longer than 0.2 seconds" in guide.error
    np.testing.assert_array_equal(found, factory.stop_mask)
    assert other.accept(ord("2")) and other.error is None


def test_a_grammar_whose_masks_take_long_is_refused(factory: GuideFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "TRIED_SECONDS", 1e-9)
    with pytest.raises(RequestError, match="finding the next tokens takes longer than 1e-09 seconds"):
        factory.compile(GuidedDecoding(regex="[0-9]{7}"))


def test_the_bounds_are_those_of_the_documentation() -> None:
    text = " ".join((Path(__file__).parents[3] / "docs" / "serving.md").read_text(encoding="utf-8").split())
    trial, masks = isolated.TRIAL, isolated.MASKS
    assert f"{trial.seconds:g} seconds and {isolated.GRAMMAR_BYTES // isolated.MIB} MiB for each grammar" in text
    assert f"masks take at most {isolated.TRIED_SECONDS:g} s each" in text
    assert f"longer than {isolated.MASK_SECONDS:g} s ends its request" in text
    assert f"holds more than {masks.memory // isolated.MIB} MiB" in text


def test_memory_is_given_back_when_no_output_has_a_guide(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "IDLE_SECONDS", 0.05)
    monkeypatch.setattr(isolated, "IDLE_MEMORY", 0)
    factory = GuideFactory(tokenizer, 256, 288, [2], "isolated")
    guide = factory.compile(GuidedDecoding(regex="a?" * 2000))
    assert guide.accept(ord("a"))
    process = masks_process(factory)
    time.sleep(0.3)
    assert masks_process(factory) is process, "an output has a guide"
    del guide
    until(lambda: process._process.poll() is not None)
    assert factory.compile(GuidedDecoding(regex="a?" * 2000)).accept(ord("a")), "and comes again when it is needed"
    factory.close()


def test_another_process_waits_to_take_over(factory: GuideFactory) -> None:
    guide = factory.compile(OBJECT)
    mask(guide)
    matchers: Any = factory._matchers
    spare = matchers._spare.result(30)
    masks_process(factory).kill()
    assert guide.accept(ord("{")) and masks_process(factory) is spare
    assert matchers._spare.result(30) is not spare


def test_a_compilation_that_nobody_waits_for_is_ended(factory: GuideFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    matchers: Any = factory._matchers
    slow = GuidedDecoding(json={"type": "object", "properties": {"slow": {"type": "null"}}})
    started = threading.Event()
    original = isolated.GuideProcess.try_out

    def stopped(self: isolated.GuideProcess, *arguments: Any) -> str:
        stop(self)
        started.set()
        return original(self, *arguments)

    failures: list[str] = []

    def compile_slowly() -> None:
        try:
            factory.compile(slow)
        except RequestError as error:
            failures.append(str(error))

    monkeypatch.setattr(isolated.GuideProcess, "try_out", stopped)
    thread = threading.Thread(target=compile_slowly)
    thread.start()
    assert started.wait(10)
    monkeypatch.undo()
    assert factory.compile(OBJECT).accept(ord("{")), "another grammar does not wait"
    matchers.interrupt(slow)
    thread.join(2)
    assert not thread.is_alive() and failures


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


def test_a_server_survives_hostile_grammars(served: Running) -> None:
    """While an ordinary client streams."""
    import openai

    client = served.client()
    name = client.models.list().data[0].id
    stream = client.completions.create(model=name, prompt=[3, 4], max_tokens=40, stream=True, temperature=0)
    for guided in HOSTILE.values():
        extra = {"guided_json": guided.json} if guided.json else {
            "guided_regex" if guided.regex else "guided_grammar": guided.regex or guided.grammar
        }  # fmt: skip
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model=name, prompt=[3, 4], max_tokens=2, extra_body=extra)
        assert "guided decoding cannot follow this" in str(refused.value)
    assert len(list(stream)) > 10
    extra = {"guided_json": {"enum": ["yes"]}}
    answer = client.completions.create(model=name, prompt=[3, 4], max_tokens=20, extra_body=extra)
    assert answer.choices[0].text == '"yes"'
    stats = httpx.get(f"{served.url}/stats", timeout=30).json()["engine"]
    assert stats["running"] == 0 and not any(stats["pages_in_use"].values())
