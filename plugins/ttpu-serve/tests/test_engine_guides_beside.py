"""Guides are followed beside the steps of other outputs: these do not wait, and what is written stays the same."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import tiny

pytest.importorskip("llguidance")

from serving import until

from ttpu import LLM, AutoModelForTPU, SamplingParams
from ttpu_core.generation.sampling_params import GuidedDecoding
from ttpu_serve.execution.engine_core import EngineCore
from ttpu_serve.guided.guides import GuideState

pytestmark = pytest.mark.usefixtures("collector_starts_anew")

PROMPT, OTHER = [5, 6, 7], [50, 60, 70, 80]
PLAIN = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
GUIDED = [
    GuidedDecoding(regex="[a-f]{5}x[0-9]*"),
    GuidedDecoding(choice=("yes", "no", "perhaps")),
    GuidedDecoding(json={"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}),
    GuidedDecoding(grammar='start: "a" B+\nB: /[bc]d/'),
]
OPTIONS: dict[str, Any] = {
    "max_model_len": 48,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 12,
    "sequence_buckets": (4,),
    "token_buckets": (12,),
    "page_size": 4,
    "num_pages": 60,
    "progress": None,
}


def params(guided: GuidedDecoding, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 16} | fields, guided=guided)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineCore, EngineCore]]:
    """One that computes masks between its steps, and one that does so in another process."""
    model = AutoModelForTPU.from_pretrained(tiny.llama_checkpoint(tmp_path_factory.mktemp("beside") / "llama"))
    made = [LLM(model, **OPTIONS, guides=place) for place in ("inline", "isolated")]
    yield made[0].engine, made[1].engine
    for one in made:
        one.close()


@pytest.fixture
def core(engines: tuple[EngineCore, EngineCore]) -> Iterator[EngineCore]:
    """The second one, which has nothing left to do afterwards."""
    yield engines[1]
    assert not engines[1].has_work and not engines[1]._followed
    gc.collect()
    stats = engines[1].stats()
    assert not (stats.running or stats.waiting or any(stats.pages_in_use.values()))


class Told:
    """What an engine told of some requests."""

    def __init__(self, core: EngineCore, **asked: SamplingParams) -> None:
        self.core, self.tokens = core, {name: list[int]() for name in asked}
        self.ends: dict[str, str | None] = {}
        for name, each in asked.items():
            core.add(name, OTHER if name == "plain" else PROMPT, each)

    def step(self) -> None:
        for delta in self.core.step():
            self.tokens[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                assert delta.request_id not in self.ends, "it ends once"
                self.ends[delta.request_id] = delta.error or delta.finish_reason

    def all(self) -> tuple[dict[str, list[int]], dict[str, str | None]]:
        while self.core.has_work:
            self.step()
        return self.tokens, self.ends


def alone(core: EngineCore, each: SamplingParams) -> tuple[list[int], str | None]:
    tokens, ends = Told(core, one=each).all()
    return tokens["one"], ends["one"]


class Gate:
    """Holds guides back from being told tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.waiting = threading.Event(), threading.Event()
        follow = GuideState._follow

        def held(state: GuideState, token: int) -> int:
            self.waiting.set()
            assert self.open.wait(20)
            return follow(state, token)

        monkeypatch.setattr(GuideState, "_follow", held)


@pytest.mark.parametrize("most", [3, 5, 16])
def test_outputs_and_their_ends_are_those_of_an_engine_that_waits(
    engines: tuple[EngineCore, EngineCore], core: EngineCore, most: int
) -> None:
    waiting, _ = engines
    asked = {f"guided {number}": params(each, max_tokens=most) for number, each in enumerate(GUIDED[:3])}
    expected = {name: alone(waiting, each) for name, each in asked.items()}
    expected["plain"] = alone_of_other(waiting)
    assert len({end for _, end in expected.values()}) == (2 if most == 16 else 1) or most == 5
    tokens, ends = Told(core, plain=PLAIN, **asked).all()
    assert {name: (tokens[name], ends[name]) for name in tokens} == expected


def alone_of_other(core: EngineCore) -> tuple[list[int], str | None]:
    tokens, ends = Told(core, plain=PLAIN).all()
    return tokens["plain"], ends["plain"]


def test_rules_and_sequences_of_one_request(engines: tuple[EngineCore, EngineCore], core: EngineCore) -> None:
    fields: dict[str, Any] = {"bad_words": ["ab"], "min_tokens": 7, "logprobs": 2, "temperature": 1.0, "seed": 3}
    each = params(GUIDED[0], n=3, **fields)
    found = []
    for engine in (engines[0], core):
        engine.add("one", PROMPT, each)
        texts = dict.fromkeys(range(3), "")
        while engine.has_work:
            for delta in engine.step():
                texts[delta.index] += delta.text
                assert delta.logprobs is None or len(delta.logprobs) == len(delta.token_ids)
        found.append(texts)
    assert found[0] == found[1] and len(set(found[0].values())) > 1
    assert not any("ab" in text for text in found[1].values())


def test_a_slow_mask_delays_its_own_output_alone(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = alone(core, params(GUIDED[0]))
    gate = Gate(monkeypatch)
    told = Told(core, plain=PLAIN, guided=params(GUIDED[0]))
    while "plain" not in told.ends:
        told.step()
    assert gate.waiting.is_set() and len(told.tokens["plain"]) == 16
    assert len(told.tokens["guided"]) == 1, "which was told before its guide knew of it"
    gate.open.set()
    tokens, ends = told.all()
    assert (tokens["guided"], ends["guided"]) == expected


def test_steps_overlap_while_an_output_has_a_guide(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(core, plain=PLAIN, guided=params(GUIDED[0]))
    most, dispatch = [0], core._dispatch

    def counted(scheduled: Any) -> None:
        dispatch(scheduled)
        most[0] = max(most[0], len(core._in_flight))

    monkeypatch.setattr(core, "_dispatch", counted)
    told.all()
    assert most[0] == 2


def test_a_guide_that_fails_ends_its_own_output_alone(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = alone_of_other(core)

    def failing(*_: Any) -> int:
        raise ValueError("a mistake")

    monkeypatch.setattr(GuideState, "_follow", failing)
    tokens, ends = Told(core, plain=PLAIN, guided=params(GUIDED[0])).all()
    assert (tokens["plain"], ends["plain"]) == expected
    assert ends["guided"] is not None and "ValueError: a mistake" in ends["guided"]


def test_a_mask_that_fails_ends_its_own_output_alone(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(guide: Any) -> None:
        guide.error = "the output cannot go on."

    told = Told(core, plain=PLAIN, guided=params(GUIDED[0]))
    monkeypatch.setattr("ttpu_serve.guided.guides.Guide.prepare", prepare)
    _, ends = told.all()
    assert ends == {"plain": "length", "guided": "the output cannot go on."}


def test_an_output_may_be_aborted_while_its_guide_is_followed(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    told = Told(core, plain=PLAIN, guided=params(GUIDED[0]))
    until(lambda: told.step() or gate.waiting.is_set())
    core.abort("guided")
    tokens, ends = told.all()
    assert ends == {"plain": "length"} and len(tokens["plain"]) == 16
    gate.open.set()


def test_an_output_whose_guide_is_followed_is_computed_again(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a sleep, and after a step that failed: with its tokens so far, and before its guide knows the last one."""
    expected = {"plain": alone_of_other(core), "guided": alone(core, params(GUIDED[0]))}
    for failing in (False, True):
        gate = Gate(monkeypatch)
        told = Told(core, plain=PLAIN, guided=params(GUIDED[0]))
        until(lambda told=told, gate=gate: told.step() or gate.waiting.is_set())
        if failing:
            with monkeypatch.context() as patched:
                patched.setattr(core.scheduler, "schedule", lambda: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    core.step()
        else:
            core.sleep()
            core.wake_up()
        threading.Timer(0.2, gate.open.set).start()
        tokens, ends = told.all()
        assert {name: (tokens[name], ends[name]) for name in tokens} == expected
        monkeypatch.undo()


def test_nothing_else_to_do_is_no_reason_to_spin(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    told = Told(core, guided=params(GUIDED[0]))
    until(lambda: told.step() or gate.waiting.is_set())
    threading.Timer(0.3, gate.open.set).start()
    steps = 0
    while not gate.open.is_set():
        told.step()
        steps += 1
    assert steps <= 400, "each of which waits a little"
    assert len(told.all()[0]["guided"]) > 5
