"""The engine over a runner in numpy: whatever else is in the batch, however prompts are cut, cached, preempted and
guessed, a request's tokens are those that it gets alone, and nothing is left behind."""

from __future__ import annotations

import gc
import pickle
import weakref
from dataclasses import dataclass, replace
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from numpy_runner import Group, InFlight, Limits, NumpyRunner, ToyModel, log_softmax

from ttpu_core.errors import MappingError, RequestError
from ttpu_core.generation.events import Timings
from ttpu_core.generation.sampling_params import SamplingParams
from ttpu_serve.api.build_engine import scheduler_for
from ttpu_serve.api.engine_config import EngineConfig
from ttpu_serve.api.outputs import OutputDelta
from ttpu_serve.execution.engine_core import EngineCore
from ttpu_serve.execution.speculation import Speculation
from ttpu_serve.runner import AdapterWeights, LowRankUpdate, ModelRunner, RunnerStep
from ttpu_serve.speculative.draft_model import DraftModelProposer
from ttpu_serve.speculative.ngram import NgramProposer

KINDS = {
    "full": (Group(),),
    "window": (Group("window", window=6),),
    "hybrid": (Group(), Group("window", window=5)),
    "chunks": (Group(), Group("chunk", chunk=8)),
}
LENGTH, VOCAB = 48, 32
BAD_WORDS: list[tuple[tuple[int, ...], ...]] = [
    (),
    (),
    tuple((token,) for token in range(0, VOCAB, 2)),
    tuple((one, other) for one in range(VOCAB) for other in range(VOCAB) if one % 3 == other % 3),
    (*((one, other, last) for one in range(8) for other in range(8) for last in range(0, VOCAB, 3)), (5,), (7, 7)),
]
"""Which a random output often comes close to."""
MANY = hypothesis.settings(deadline=None, derandomize=True, database=None, max_examples=150)


def engine_over(runner: ModelRunner, proposer: Any = None, **config: Any) -> EngineCore:
    """An engine whose runner is made ready."""
    settings = EngineConfig(**config)
    runner.allocate()
    runner.compile()
    speculation = Speculation(proposer, runner.limits.draft_tokens)
    return EngineCore(
        runner,
        scheduler_for(runner, settings),
        None,
        model_name="toy",
        speculation=speculation,
        overlap=settings.overlap,
    )


def nothing_left(core: EngineCore) -> bool:
    scheduler = core.scheduler
    return not (
        core.has_work or core._outputs or core._children or core._special or core._following or core._in_flight
        or any(scheduler.pages_in_use) or scheduler.running or scheduler.waiting or scheduler._running.in_flight
    )  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """One request of a mix, the step before which it comes, and the step before which it is aborted."""

    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: int
    abort: int | None
    priority: int
    salt: str | None
    adapter: str | None


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    stem = draw(st.sampled_from([(1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 7, 8, 9), (9, 9, 9), ()]))
    prompt = stem + tuple(draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)))
    drawn = draw(st.booleans())
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.7, 1.5])) if drawn else 0.0,
        top_k=draw(st.sampled_from([0, 3])) if drawn else 0,
        top_p=draw(st.sampled_from([1.0, 0.8])) if drawn else 1.0,
        seed=draw(st.integers(0, 99)),
        max_tokens=draw(st.integers(1, 14)),
        logprobs=draw(st.sampled_from([None, 2])),
        prompt_logprobs=draw(st.sampled_from([None, None, 1])),
        bad_words=draw(st.sampled_from(BAD_WORDS)),
        ignore_eos=True,
        detokenize=False,
    )
    return Asked(
        prompt,
        params,
        arrival=draw(st.integers(0, 12)),
        abort=draw(st.sampled_from([None, None, None, 3, 9])),
        priority=draw(st.integers(-1, 1)),
        salt=draw(st.sampled_from([None, None, "a"])),
        adapter=draw(st.sampled_from([None, None, "poet"])),
    )


def adapter_weights(groups: int) -> AdapterWeights:
    random = np.random.default_rng(5)
    a, b = random.normal(size=(2, 8)), random.normal(size=(8, 2))
    return AdapterWeights("poet", {f"{index}.value": LowRankUpdate(a, b) for index in range(groups)})


@MANY
@hypothesis.given(
    mix=st.lists(requests(), min_size=1, max_size=9),
    kind=st.sampled_from(sorted(KINDS)),
    page_size=st.sampled_from([2, 4, 5]),
    spare=st.integers(0, 30),
    seqs=st.integers(1, 5),
    budget=st.sampled_from([5, 7, 16]),
    prefills=st.sampled_from([None, 1]),
    caching=st.booleans(),
    chunked=st.booleans(),
    overlap=st.booleans(),
    method=st.sampled_from(["none", "ngram", "same model", "other model"]),
    sleeps_at=st.sampled_from([None, None, 5]),
)
def test_a_requests_tokens_are_those_that_it_gets_alone(
    mix: list[Asked],
    kind: str,
    page_size: int,
    spare: int,
    seqs: int,
    budget: int,
    prefills: int | None,
    caching: bool,
    chunked: bool,
    overlap: bool,
    method: str,
    sleeps_at: int | None,
) -> None:
    groups = KINDS[kind]
    model = ToyModel(groups, VOCAB)
    limits = Limits(
        max_model_len=LENGTH,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget if chunked else LENGTH,
        max_prefills=prefills,
        draft_tokens=0 if method == "none" else 3,
        page_size=page_size,
        vocab_size=VOCAB,
        logit_columns=VOCAB,
    )
    pages = [1 + -(-LENGTH // page_size) + spare] * len(groups)
    runner = NumpyRunner(model, limits, pages, adapters=1)
    weights = adapter_weights(len(groups))
    assert runner.adapters is not None
    runner.adapters.load("poet", runner.adapters.check(weights), ())
    core = engine_over(
        runner,
        proposer_of(method, model, limits, pages),
        enable_prefix_caching=caching,
        enable_chunked_prefill=chunked,
        overlap=overlap,
    )
    deltas = run(core, mix, sleeps_at)
    for number, asked in enumerate(mix):
        if number not in deltas:
            continue
        own = weights.updates if asked.adapter else None
        expected = model.alone(asked.prompt, asked.params, asked.params.max_tokens or 0, own)
        assert [token for delta in deltas[number] for token in delta.token_ids] == expected
        if asked.params.logprobs is not None:
            told = [each for delta in deltas[number] for each in delta.logprobs or ()]
            assert [next(iter(each)) for each in told] == expected
        if asked.params.prompt_logprobs is not None:
            told_of_prompt = deltas[number][0].prompt_logprobs
            assert told_of_prompt is not None and len(told_of_prompt) == len(asked.prompt)
    assert nothing_left(core)


def proposer_of(method: str, model: ToyModel, limits: Limits, pages: list[int]) -> Any:
    if method == "none":
        return None
    if method == "ngram":
        return NgramProposer(1, 3)
    drafter = ToyModel(model.groups, VOCAB, seed=0 if method == "same model" else 1)
    runner = NumpyRunner(drafter, replace(limits, draft_tokens=0), pages)
    runner.allocate()
    return DraftModelProposer(runner, VOCAB)


def run(core: EngineCore, mix: list[Asked], sleeps_at: int | None) -> dict[int, list[OutputDelta]]:
    """Serve a mix; the deltas of the requests that were not aborted."""
    deltas: dict[int, list[OutputDelta]] = {}
    aborted: set[int] = set()
    for step in range(5000):
        for number, asked in enumerate(mix):
            if asked.arrival == step:
                core.add(
                    str(number),
                    asked.prompt,
                    asked.params,
                    priority=asked.priority,
                    adapter=asked.adapter,
                    cache_salt=asked.salt,
                )
            if asked.abort is not None and asked.arrival + asked.abort == step:
                core.abort(str(number))
                aborted.add(number)
        if step == sleeps_at:
            core.sleep()
            assert core.asleep and not core.runner.memory_stats().weight_bytes
            core.wake_up()
        for delta in core.step():
            assert delta.error is None, delta.error
            deltas.setdefault(int(delta.request_id), []).append(delta)
        if step > 25 and not core.has_work:
            return {number: told for number, told in deltas.items() if number not in aborted}
    raise AssertionError(f"not done: {core.stats()}")


class TwoHosts(NumpyRunner):
    """A runner of two processes: each is told of a step by the same bytes, and they must agree."""

    def __init__(self, groups: tuple[Group, ...]) -> None:
        super().__init__(ToyModel(groups, VOCAB))
        self.other = NumpyRunner(ToyModel(groups, VOCAB))
        self.steps = 0

    def allocate(self, *arguments: Any, **options: Any) -> None:
        super().allocate(*arguments, **options)
        self.other.allocate(*arguments, **options)

    def dispatch(self, step: RunnerStep) -> InFlight:
        told = pickle.dumps(step)
        here, there = super().dispatch(pickle.loads(told)), self.other.dispatch(pickle.loads(told))
        np.testing.assert_array_equal(here.read().token, there.read().token)
        self.steps += 1
        return here


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_says_all_that_another_host_needs(kind: str) -> None:
    runner = TwoHosts(KINDS[kind])
    core = engine_over(runner, enable_prefix_caching=False)
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=9, logit_bias={3: 1.0}, detokenize=False)
    mix = [Asked((1, 2, 3, number), params, number, None, 0, None, None) for number in range(6)]
    assert len(run(core, mix, None)) == 6 and runner.steps > 9
    assert nothing_left(core)


def test_prompt_logprobs_are_the_models_own_however_the_prompt_is_cut() -> None:
    model, prompt = ToyModel(vocab_size=VOCAB), list(range(1, 30))
    core = engine_over(NumpyRunner(model, Limits(max_num_batched_tokens=5, max_num_seqs=2)))
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    (deltas,) = run(core, [Asked(tuple(prompt), params, 0, None, 0, None, None)], None).values()
    from numpy_runner import PlainCache

    caches = [PlainCache() for _ in model.groups]
    values = [log_softmax(model.logits(model.forward(token, at, caches))) for at, token in enumerate(prompt)]
    first, *others = deltas[0].prompt_logprobs or []
    assert first is None
    found = [(each or {})[token].logprob for each, token in zip(others, prompt[1:], strict=True)]
    np.testing.assert_allclose(found, [value[token] for value, token in zip(values, prompt[1:], strict=False)])


def test_rules_of_a_request_are_kept_by_the_runner() -> None:
    core = engine_over(NumpyRunner(ToyModel(vocab_size=VOCAB)))
    params = SamplingParams(temperature=0.0, max_tokens=6, allowed_token_ids=(3, 5), logit_bias={5: 100.0})
    (deltas,) = run(core, [Asked((1, 2), params, 0, None, 0, None, None)], None).values()
    assert [token for delta in deltas for token in delta.token_ids] == [5] * 6


def test_what_a_runner_was_not_built_for_is_refused() -> None:
    core = engine_over(NumpyRunner(ToyModel(vocab_size=VOCAB), Limits(sampling_level="draw", prompt_logprobs=False)))
    for params, said in [
        (SamplingParams(logprobs=1), "sampling level 'all'"),
        (SamplingParams(presence_penalty=1.0), "penalties were asked for"),
        (SamplingParams(prompt_logprobs=1), "prompt_logprobs was asked for"),
        (SamplingParams(logprobs=LOGPROBS_TOO_MANY), "at most 5"),
    ]:
        with pytest.raises(RequestError, match=said):
            core.add("one", [1, 2], params)
    with pytest.raises(RequestError, match="max_adapters"):
        core.load_adapter("poet", "./poet")


LOGPROBS_TOO_MANY = 6


def test_weights_are_replaced_between_two_steps_and_checked_before() -> None:
    model, other = ToyModel(vocab_size=VOCAB), ToyModel(vocab_size=VOCAB, seed=3)
    core = engine_over(NumpyRunner(model))
    params = SamplingParams(temperature=0.0, max_tokens=6, detokenize=False)
    with pytest.raises(MappingError, match="no such tensor"):
        core.update_weights({"nothing": np.zeros(1)})
    core.update_weights(other.weights)
    (event, *events) = core.stream([[1, 2, 3]], [params], Timings())
    assert [event.token_id, *(each.token_id for each in events)] == other.alone([1, 2, 3], params, 6)
    assert events[-1].finish_reason == "length"


def test_an_engine_of_a_model_that_is_not_described_counts_no_flops() -> None:
    core = engine_over(NumpyRunner(ToyModel(vocab_size=VOCAB)))
    core.add("one", [1, 2], SamplingParams(max_tokens=2))
    while core.has_work:
        core.step()
    stats = core.stats()
    assert (stats.model_flops, stats.peak_flops, stats.output_tokens) == (0.0, None, 2)
    assert (stats.programs, stats.recompiles) == (0, 0)


def test_an_engine_that_nobody_holds_is_gone_at_once() -> None:
    """With its pages, for which the next engine may need the room: nothing in it holds itself."""
    gc.collect()
    gc.disable()
    try:
        core = engine_over(NumpyRunner(ToyModel()))
        core.add("one", [1, 2, 3], SamplingParams(max_tokens=2))
        while core.has_work:
            core.step()
        gone = weakref.ref(core)
        del core
        assert gone() is None
    finally:
        gc.enable()
