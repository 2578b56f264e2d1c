"""Callers of one engine do not get in each other's way, and whatever goes wrong leaves it in order."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
import tiny

from ttpu import LLM, AutoModelForTPU, BeamSearchParams, SamplingParams
from ttpu_core.errors import RequestError, TTPUError
from ttpu_core.generation.sampling_params import GuidedDecoding
from ttpu_jax.runner.runner import InFlight
from ttpu_serve.api.async_engine import AsyncEngine
from ttpu_serve.api.collector import PromptsFailedError
from ttpu_serve.api.output_queue import EngineDeadError, RequestFailedError
from ttpu_serve.execution.errors import QueueFullError
from ttpu_serve.execution.sequence_output import SequenceOutput
from ttpu_serve.execution.speculation import MOST_FAILURES, Speculation
from ttpu_serve.speculative.ngram import NgramProposer

pytestmark = pytest.mark.usefixtures("collector_starts_anew")

PROMPT, OTHER = [5, 6, 7], [50, 60, 70, 80]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    checkpoint = tiny.llama_checkpoint(tmp_path_factory.mktemp("core") / "llama")
    made = LLM(
        AutoModelForTPU.from_pretrained(checkpoint),
        max_model_len=48,
        max_num_seqs=2,
        max_num_batched_tokens=10,
        sequence_buckets=(2,),
        token_buckets=(10,),
        page_size=4,
        num_pages=30,
        strict_compile=True,
        progress=None,
    )
    yield made
    made.close()
    for asked in (
        lambda: made.generate([PROMPT], GREEDY),
        made.sleep,
        made.wake_up,
        lambda: made.update_weights({}),
        lambda: made.load_adapter("poet", "poet"),
    ):
        with pytest.raises(RequestError, match="it is closed: open another one"):
            asked()


@pytest.fixture
def model(llm: LLM) -> Iterator[Any]:
    """The model whose `generate` and `stream` use this engine."""
    found = llm.engine.model
    found.engine = llm.engine
    yield found
    found.engine = None


def tokens_of(llm: LLM, prompt: list[int] = PROMPT) -> list[int]:
    return llm.generate([prompt], GREEDY)[0].outputs[0].token_ids


def nothing_left(llm: LLM) -> bool:
    gc.collect()
    stats = llm.engine.stats()
    return not (stats.running or stats.waiting or any(stats.pages_in_use.values()) or llm.engine.turns.inboxes)


def test_an_id_that_is_used_again_does_not_get_the_tokens_of_the_request_before(llm: LLM) -> None:
    engine, expected = llm.engine, tokens_of(llm)
    engine.add("a", OTHER, GREEDY)
    for _ in range(4):
        engine.step()
    engine.abort("a")  # a step is under way
    engine.add("a", PROMPT, GREEDY)
    got: list[int] = []
    while engine.has_work:
        for delta in engine.step():
            got += delta.token_ids
    assert got == expected
    engine.add("a", OTHER, GREEDY)
    engine.step()
    engine.sleep()  # keeps what was under way for the next step
    engine.abort("a")
    engine.wake_up()
    assert not engine.has_work
    assert nothing_left(llm)


def test_two_streams_of_one_engine_take_turns(llm: LLM, model: Any) -> None:
    alone = tokens_of(llm), tokens_of(llm, OTHER)
    streams = (model.stream([p], max_new_tokens=8, ignore_eos=True, do_sample=False) for p in (PROMPT, OTHER))
    pairs = list(zip(*streams, strict=True))
    assert tuple([event.token_id for event in events] for events in zip(*pairs, strict=True)) == alone
    assert nothing_left(llm)


def test_a_stream_that_is_dropped_leaves_nothing_behind(llm: LLM, model: Any) -> None:
    never_begun = model.stream([PROMPT], max_new_tokens=8)
    begun = model.stream([PROMPT], max_new_tokens=8)
    next(begun)
    del never_begun, begun
    assert nothing_left(llm)


def test_waiting_for_a_sleeping_engine_is_refused(llm: LLM, model: Any) -> None:
    expected = tokens_of(llm)
    llm.sleep()
    with pytest.raises(RequestError, match=r"asleep: call wake_up\(\) first"):
        llm.generate([PROMPT], GREEDY)
    with pytest.raises(RequestError, match="asleep"):
        model.generate([PROMPT], max_new_tokens=4)
    llm.wake_up()
    assert tokens_of(llm) == expected
    assert nothing_left(llm)


def test_an_error_of_one_step_leaves_the_engine_in_order(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens_of(llm)

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "dispatch", broken)
        with pytest.raises(OSError, match="gone"):
            llm.generate([PROMPT], GREEDY)
    assert nothing_left(llm)
    assert tokens_of(llm) == expected
    assert llm.engine.scheduler._running.in_flight == 0


def test_what_goes_wrong_in_one_answer_is_no_other_requests_affair(llm: LLM) -> None:
    engine, expected = llm.engine, tokens_of(llm)
    engine.add("good", PROMPT, GREEDY)
    engine.add("bad", OTHER, GREEDY)
    answer = next(each for each in engine._outputs.values() if each.request_id == "bad")
    answer.take = None  # type: ignore[assignment,method-assign]
    got: list[int] = []
    errors: list[str | None] = []
    while engine.has_work:
        for delta in engine.step():
            got += delta.token_ids if delta.request_id == "good" else []
            errors += [delta.error] if delta.request_id == "bad" else []
    assert got == expected
    assert errors and "error of the engine" in str(errors[-1])
    assert nothing_left(llm)


def test_prompts_may_be_what_vllm_takes(llm: LLM) -> None:
    expected = tokens_of(llm)
    forms: list[Any] = [PROMPT, np.array(PROMPT), {"prompt_token_ids": PROMPT}, [{"prompt": "\5\6\7"}]]
    for form in forms:
        assert llm.generate(form, GREEDY)[0].outputs[0].token_ids == expected
    for bad in ([1.5], [True], [259], [-1], {"text": "x"}, []):
        with pytest.raises(RequestError):
            llm.generate([bad], GREEDY)  # type: ignore[list-item]
    assert nothing_left(llm)


@pytest.mark.parametrize(
    "wrong",
    [
        {"guided": "x"},
        {"guided": {"xml": "x"}},
        {"structured_outputs": "x"},
        {"structured_outputs": {"structural_tag": "x"}},
        {"structured_outputs": {"regex": "a"}, "guided": {"regex": "b"}},
        {"stop": 5},
        {"stop_token_ids": 3},
        {"logit_bias": [1]},
        {"skip_special_tokens": None},
        {"ignore_eos": "false"},
        {"n": 0},
        {"allowed_token_ids": ()},
        {"min_tokens": 9, "max_tokens": 8},
        {"logit_bias": {3: 101}},
    ],
)
def test_a_value_of_the_wrong_kind_is_one_sentence(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_prompt_logprobs_are_those_of_the_whole_prompt_however_it_is_read(llm: LLM) -> None:
    long = [(7 * i) % 250 for i in range(23)]  # three steps of ten tokens
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1, n=2, seed=3)
    llm.generate([long], GREEDY)  # its pages are in the cache, which must not matter
    together = llm.generate([long, [9], long[:11]], params)
    assert together[1].prompt_logprobs == [None]
    model = llm.engine.model
    assert model is not None
    logits = np.asarray(model(np.array([long])).logits, np.float64)[0]
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    found = together[0].prompt_logprobs
    assert found is not None and found[0] is None and len(found) == len(long)
    for place, entry in enumerate(found[1:], 1):
        assert entry is not None
        assert entry[long[place]].logprob == pytest.approx(logprobs[place - 1, long[place]], abs=1e-4)
    assert nothing_left(llm)


def test_embeddings_compile_nothing_while_serving(llm: LLM) -> None:
    llm.embed([[1, 2, 3]], pooling="mean")
    compiled: list[str] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for pooling in ("last", "mean"):
            llm.embed([list(range(length)) for length in (1, 2, 5, 9, 13, 22)], pooling=pooling)  # type: ignore[arg-type]
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled


def run_to_end(llm: LLM, names: list[str]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {name: [] for name in names}
    while llm.engine.has_work:
        for delta in llm.engine.step():
            found[delta.request_id].append(delta)
    return found


def test_an_error_of_one_requests_guide_ends_that_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens_of(llm)
    llm.engine.add("good", PROMPT, GREEDY)
    llm.engine.add("bad", OTHER, SamplingParams(max_tokens=8, guided=GuidedDecoding(regex="[0-9]{9}")))

    def masks(*_: Any) -> None:
        raise ValueError("a mistake")

    monkeypatch.setattr("ttpu_serve.guided.guides.GuideState.masks", masks)
    found = run_to_end(llm, ["good", "bad"])
    assert [token for delta in found["good"] for token in delta.token_ids] == expected
    assert found["bad"][-1].error is not None and "ValueError: a mistake" in found["bad"][-1].error
    assert nothing_left(llm)


def test_a_call_keeps_the_outputs_of_prompts_beside_one_that_fails(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens_of(llm)
    (embedding,) = llm.embed([PROMPT], pooling="mean")

    def masks(*_: Any) -> None:
        raise ValueError("a mistake")

    monkeypatch.setattr("ttpu_serve.guided.guides.GuideState.masks", masks)
    bad = SamplingParams(max_tokens=8, guided=GuidedDecoding(regex="[0-9]{9}"))
    with pytest.raises(PromptsFailedError, match=r"^3 prompts .* but prompts\[1\] failed .*mistake") as failed:
        llm.generate([PROMPT, OTHER, PROMPT], [GREEDY, bad, GREEDY])
    assert failed.value.failed == [1] and "a mistake" in failed.value.reason
    assert [output.outputs[0].token_ids for output in failed.value.outputs] == [expected, [], expected]
    assert [output.outputs[0].finish_reason for output in failed.value.outputs] == ["length", "error", "length"]
    assert [output.outputs[0].error for output in failed.value.outputs] == [None, failed.value.reason, None]
    failed.value.add_note("a note")
    for copied in (copy.copy(failed.value), pickle.loads(pickle.dumps(failed.value))):
        assert (str(copied), copied.failed, copied.reason) == (str(failed.value), [1], failed.value.reason)
        assert copied.outputs == failed.value.outputs and copied.__notes__ == ["a note"]
    with pytest.raises(PromptsFailedError, match=r"^this request met an error of the engine"):
        llm.generate(OTHER, bad)
    failing(monkeypatch, InFlight, "read_hidden", {2})
    with pytest.raises(PromptsFailedError) as failed:
        llm.embed([PROMPT, [*range(20)]], pooling="mean")  # whose second step fails
    assert failed.value.failed == [1] and failed.value.outputs[1] is None
    np.testing.assert_allclose(failed.value.outputs[0].embedding, embedding.embedding, atol=1e-5)
    assert nothing_left(llm)


def test_a_beam_that_fails_ends_its_search_with_the_reason(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, SequenceOutput, "logprobs_of", {2})
    with pytest.raises(TTPUError, match=r"^this request met an error of the engine"):
        llm.beam_search(PROMPT, BeamSearchParams(beam_width=2, max_tokens=3))
    assert nothing_left(llm)


def test_a_prompt_that_is_refused_is_named_in_the_errors_note(llm: LLM) -> None:
    with pytest.raises(RequestError, match="at most 48") as refused:
        llm.generate([PROMPT, [*range(60)]], GREEDY)
    assert refused.value.__notes__ == ["This is about prompts[1] of 2 prompts."]
    assert nothing_left(llm)


def test_the_note_has_the_callers_words_for_a_prompt(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    long, add, search = [*range(60)], llm.engine.add, BeamSearchParams(beam_width=3, max_tokens=3)
    for first, second, note in (
        ([PROMPT, PROMPT], [OTHER, long], "This is about text_2[1] of 2 texts."),
        (long, [PROMPT, OTHER], "This is about text_1."),
    ):
        with pytest.raises(RequestError, match="at most 48") as refused:
            llm.score(first, second, pooling="mean")
        assert refused.value.__notes__ == [note]

    def refuse(name: str, ids: list[int], *given: Any, **more: Any) -> None:
        if ids[: len(OTHER)] == OTHER and len(ids) > len(OTHER):
            raise RequestError("this is refused: pass another.")
        add(name, ids, *given, **more)

    monkeypatch.setattr(llm.engine, "add", refuse)
    with pytest.raises(RequestError, match="this is refused") as refused:
        llm.beam_search([PROMPT, OTHER], search)
    assert refused.value.__notes__ == ["This is about prompts[1] of 2 prompts."]
    with pytest.raises(RequestError, match="a prompt") as refused:
        llm.beam_search([PROMPT, {}], search)
    assert refused.value.__notes__ == ["This is about prompts[1] of 2 prompts."]
    assert nothing_left(llm)


def test_a_full_queue_is_not_about_a_prompt(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise QueueFullError("2 requests wait: try again later.")

    monkeypatch.setattr(llm.engine, "add", full)
    with pytest.raises(QueueFullError) as refused:
        llm.generate([PROMPT, OTHER], GREEDY)
    assert not hasattr(refused.value, "__notes__")
    assert nothing_left(llm)


def test_a_request_that_is_taken_back_is_not_counted(llm: LLM) -> None:
    before = llm.engine.stats()
    llm.engine.add("kept", PROMPT, GREEDY)
    llm.engine.add("taken back", OTHER, replace(GREEDY, n=2))
    llm.engine.take_back("taken back")
    run_to_end(llm, ["kept"])
    after = llm.engine.stats()
    assert (after.requests, after.prompt_tokens) == (before.requests + 1, before.prompt_tokens + len(PROMPT))
    assert nothing_left(llm)


@contextmanager
def served(llm: LLM) -> Iterator[AsyncEngine]:
    """The engine in a thread, as a server has it, which leaves the core open."""
    core, close = llm.engine, llm.engine.close
    core.close = lambda: None  # type: ignore[method-assign]
    engine = AsyncEngine(core).start()
    try:
        yield engine
    finally:
        engine._calls.put(None)
        engine._thread.join(20)
        core.close = close  # type: ignore[method-assign]
        assert not engine._thread.is_alive()


async def told(engine: AsyncEngine, prompt: list[int], params: SamplingParams = GREEDY) -> Any:
    """A request's tokens, or the error that ended it; one that waits for ever is a failure."""
    tokens: list[int] = []
    try:
        async with asyncio.timeout(30):
            async for delta in engine.generate(prompt, params):
                tokens += delta.token_ids
    except RequestFailedError as error:
        return str(error)
    return tokens


def failing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, calls: Any) -> list[int]:
    """Let some calls of a method raise, by their numbers from 1; returns the numbers of all calls."""
    original, seen = getattr(owner, name), list[int]()

    def method(*arguments: Any, **options: Any) -> Any:
        seen.append(len(seen) + 1)
        if seen[-1] in calls:
            raise ValueError("an injected mistake")
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, method)
    return seen


LONG = [*range(60, 76)]  # more than a step's tokens, and several pages
BESIDE = "the engine failed at this request or at one beside it"
OWN = "this request met an error of the engine (ValueError: an injected mistake)"
PLACES: dict[str, Any] = {
    "dispatch": lambda core: (core.runner, "dispatch"),
    "read": lambda core: (InFlight, "read"),
    "schedule": lambda core: (core.scheduler, "schedule"),
    "update": lambda core: (core.scheduler, "update"),
    "finish": lambda core: (core.scheduler, "finish"),
    "close": lambda core: (core, "_close"),
    "delta": lambda core: (SequenceOutput, "delta"),
    "propose": lambda core: (core.speculation, "propose"),
}


@pytest.mark.parametrize("place", ["dispatch", "read", "schedule", "propose", "finish", "close"])
@pytest.mark.parametrize("call", [1, 2, 4])
def test_a_step_that_fails_once_changes_no_answer(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, place: str, call: int
) -> None:
    """What it should have written is written when it is tried again, and nothing else is found as a cached prefix."""
    asked = [(LONG, GREEDY), ([9], replace(GREEDY, repetition_penalty=1.4))]
    expected = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt, params in asked]
    llm.engine.reset_prefix_cache()
    calls = failing(monkeypatch, *PLACES[place](llm.engine), {call})

    async def scenario() -> None:
        with served(llm) as engine:
            for _ in range(2):  # nor a later one
                assert await asyncio.gather(*(told(engine, prompt, params) for prompt, params in asked)) == expected
            assert engine.alive

    asyncio.run(scenario())
    monkeypatch.undo()
    assert call in calls and nothing_left(llm)
    assert llm.engine.scheduler._running.in_flight == 0


@pytest.mark.parametrize(
    ("place", "calls", "why"),
    [
        ("dispatch", {3, 4}, BESIDE),
        ("schedule", {3, 4}, BESIDE),
        ("propose", {3, 4}, BESIDE),
        ("update", {2}, BESIDE),
        ("delta", range(1, 9), OWN),
    ],
)
def test_requests_of_an_error_that_lasts_end_and_the_engine_goes_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, place: str, calls: Any, why: str
) -> None:
    expected = tokens_of(llm)

    async def scenario() -> None:
        with served(llm) as engine:
            with monkeypatch.context() as patched:
                failing(patched, *PLACES[place](llm.engine), calls)
                assert why in await told(engine, OTHER)
            assert await told(engine, PROMPT) == expected and engine.alive

    asyncio.run(scenario())
    assert nothing_left(llm)


def test_an_engine_whose_steps_always_fail_is_dead(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, llm.engine.scheduler, "schedule", range(1, 99))

    async def scenario() -> None:
        with served(llm) as engine, pytest.raises(EngineDeadError, match="an injected mistake"):
            await told(engine, PROMPT)

    asyncio.run(scenario())
    monkeypatch.undo()
    assert llm.engine.step()[-1].finish_reason == "error" and nothing_left(llm)


@pytest.mark.parametrize("place", ["read_hidden", "prompt_logprobs"])
def test_what_fails_for_a_prompts_states_ends_its_request_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    expected = tokens_of(llm)
    owner: Any = InFlight if place == "read_hidden" else llm.engine.runner
    calls = failing(monkeypatch, owner, place, range(1, 99))
    llm.engine.add("good", PROMPT, GREEDY)
    if place == "read_hidden":
        llm.engine.add("bad", OTHER, SamplingParams(max_tokens=1), pooling="mean")
    else:
        llm.engine.add("bad", OTHER, replace(GREEDY, prompt_logprobs=1))
    found = run_to_end(llm, ["good", "bad"])
    assert calls and OWN in str(found["bad"][-1].error)
    assert [token for delta in found["good"] for token in delta.token_ids] == expected
    monkeypatch.undo()
    assert nothing_left(llm)


def test_a_proposer_that_fails_costs_drafts_and_no_answer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens_of(llm)
    speculation = Speculation(NgramProposer(), 2)
    monkeypatch.setattr(llm.engine, "speculation", speculation)
    calls = failing(monkeypatch, speculation.proposer, "propose", range(1, 99))
    failing(monkeypatch, speculation.proposer, "on_finish", range(1, 99))
    assert tokens_of(llm) == expected and len(calls) == MOST_FAILURES + 1, "and is asked no more"
