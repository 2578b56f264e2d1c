"""Callers of one engine do not get in each other's way, and whatever goes wrong leaves it in order."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
import tiny

from ttpu import LLM, AutoModelForTPU, SamplingParams
from ttpu_core.errors import RequestError
from ttpu_core.generation.sampling_params import GuidedDecoding
from ttpu_serve.api.async_engine import AsyncEngine
from ttpu_serve.api.output_queue import RequestFailedError

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
    with pytest.raises(RequestError, match="engine is closed"):
        made.generate([PROMPT], GREEDY)


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
    return not (stats.running or stats.waiting or any(stats.pages_in_use.values()) or llm.engine.inboxes)


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


def test_steps_that_fail_end_their_own_requests(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """One failure is tried again; the requests of a step that fails twice end, and later ones are served."""
    expected, dispatch, failures = tokens_of(llm), llm.engine.runner.dispatch, [1, 3, 4]

    def failing(step: Any) -> Any:
        calls.append(step)
        if len(calls) in failures:
            raise RuntimeError("the device stumbled")
        return dispatch(step)

    async def ask(engine: AsyncEngine, prompt: list[int]) -> list[int]:
        return [token async for delta in engine.generate(prompt, GREEDY) for token in delta.token_ids]

    async def scenario() -> None:
        engine = AsyncEngine(llm.engine).start()
        try:
            with pytest.raises(RequestFailedError, match="the engine failed at this request or at one beside it"):
                await ask(engine, PROMPT)
            assert await ask(engine, PROMPT) == expected
            assert engine.alive
        finally:
            engine._calls.put(None)  # without closing the core
            llm.engine.close, close = (lambda: None), llm.engine.close
            engine._thread.join()
            llm.engine.close = close

    calls: list[Any] = []
    monkeypatch.setattr(llm.engine.runner, "dispatch", failing)
    asyncio.run(scenario())
    assert len(calls) > 4 and nothing_left(llm)
