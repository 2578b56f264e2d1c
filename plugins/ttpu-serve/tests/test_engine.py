"""The engine as a whole: a request's tokens are its own, whatever else is served, and nothing is left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ttpu import LLM, AutoModelForTPU, SamplingParams
from ttpu_core.errors import RequestError, TTPUError
from ttpu_jax.runner.compilation import RecompileError
from ttpu_serve.adapters.files import read_adapter
from ttpu_serve.execution.engine_core import EngineCore

NEW = 12
SMALL: dict[str, Any] = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "sequence_buckets": (4,),
    "token_buckets": (16,),
    "page_size": 4,
    "strict_compile": True,
    "progress": None,
}
FEW_PAGES = 26  # less than four of the requests below: they preempt each other


def _requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 40 tokens, some with a common beginning; greedy and drawn."""
    random = np.random.default_rng(7)
    common = random.integers(0, 255, 22).tolist()
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    drawn = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, seed=11, max_tokens=NEW, ignore_eos=True)
    prompts = [random.integers(0, 255, length).tolist() for length in (1, 5, 16, 31, 40)]
    prompts += [common + random.integers(0, 255, length).tolist() for length in (0, 3, 12)]
    prompts.append([7, 8, 9] * 8)  # one that repeats itself, for n-grams
    return [(prompt, greedy) for prompt in prompts] + [
        (prompts[1], drawn),
        (prompts[4], replace(drawn, seed=3, min_p=0.05, top_k=0)),
        (prompts[5], replace(drawn, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2)),
    ]


REQUESTS = _requests()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama whose head counts eight devices can share."""
    folder = tmp_path_factory.mktemp("engine") / "llama"
    return tiny.llama_checkpoint(folder, chat=True, num_attention_heads=8, num_key_value_heads=4, head_dim=8)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    """The model without an engine."""
    return AutoModelForTPU.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def alone(model: Any) -> list[list[int]]:
    """What each request gets from the loop that has no scheduler, batch or pages."""
    return [_alone(model, prompt, params) for prompt, params in REQUESTS]


def _alone(model: Any, prompt: list[int], params: SamplingParams) -> list[int]:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    values = {name: getattr(params, name) for name in names}
    sampled = {**values, "seed": params.seed} if params.temperature else {}
    output = model.generate([prompt], max_new_tokens=NEW, ignore_eos=True, return_dict_in_generate=True, **sampled)
    tokens: list[int] = output.completions[0].token_ids
    return tokens


@pytest.fixture(scope="module")
def llms(model: Any, checkpoint: Path) -> Iterator[dict[str, LLM]]:
    """Engines that go about it differently."""
    eight = AutoModelForTPU.from_pretrained(checkpoint, parallelism_strategy="tensor=8")
    made = {
        "one device": LLM(model, **SMALL, num_pages=FEW_PAGES),
        "speculating": LLM(model, **SMALL, num_pages=40, speculative="ngram:3"),
        "eight devices": LLM(eight, **SMALL, num_pages=FEW_PAGES),
    }
    yield made
    for llm in made.values():
        llm.close()


@pytest.fixture(scope="module")
def engines(llms: dict[str, LLM]) -> dict[str, EngineCore]:
    return {name: llm.engine for name, llm in llms.items()}


def test_steps_whose_tokens_go_round_a_ring_answer_as_whole_ones(checkpoint: Path) -> None:
    """Steps of sixteen tokens, in which some prompts are read while others are answered."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=1)
    told: list[Any] = []
    for stream in ("whole", "rings"):
        settings = {**SMALL, "parallelism_strategy": "tensor=8", "residual_stream": stream, "num_pages": 60}
        with LLM(str(checkpoint), **settings) as llm:
            steps = [one for one in llm.engine.runner.programs() if one.key[0] == "step"]
            texts = {one.key[1].tokens: str(jax.make_jaxpr(one.function)(*one.arguments)) for one in steps}
            in_ring = [tokens for tokens, text in texts.items() if "ppermute" in text]
            assert in_ring == [16] * (stream == "rings")
            told.append(llm.generate([prompt for prompt, _ in REQUESTS[:6]], params))
    for whole, ring in zip(*told, strict=True):
        assert whole.outputs[0].token_ids == ring.outputs[0].token_ids
        for one, other in zip(whole.prompt_logprobs[1:], ring.prompt_logprobs[1:], strict=True):
            assert {token: value.logprob for token, value in one.items()} == pytest.approx(
                {token: value.logprob for token, value in other.items()}, abs=1e-4
            )


Arrival = tuple[int, int, int | None, int]
"""Number of the request, steps until it comes, steps until its caller leaves (None: never), priority."""
ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, len(REQUESTS) - 1),
        st.integers(0, 6),
        st.one_of(st.none(), st.none(), st.integers(0, 9)),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=9,
)


def serve(engine: EngineCore, arrivals: list[Arrival]) -> dict[int, list[int]]:
    """The tokens of every arrival that stayed to the end."""
    events: dict[int, list[Any]] = {}
    at = 0
    for number, (request, delay, patience, priority) in enumerate(arrivals):
        at += delay
        events.setdefault(at, []).append(("add", number, request, priority))
        if patience is not None:
            events.setdefault(at + patience, []).append(("abort", number, 0, 0))
    tokens: dict[int, list[int]] = {number: [] for number in range(len(arrivals))}
    done: set[int] = set()
    left: set[int] = set()
    for step in range(10_000):
        for kind, number, request, priority in events.pop(step, ()):
            if kind == "abort":
                engine.abort(str(number))
                left.add(number)
            else:
                prompt, params = REQUESTS[request]
                engine.add(str(number), prompt, params, priority=priority)
        for delta in engine.step():
            number = int(delta.request_id)
            assert number not in left, "something was said of a request that was aborted"
            tokens[number] += delta.token_ids
            if delta.finish_reason is not None:
                assert delta.finish_reason == "length", delta
                done.add(number)
        if not events and not engine.has_work:
            break
    assert done | left == set(range(len(arrivals)))
    return {number: tokens[number] for number in done}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one device", "speculating", "eight devices"])
def test_a_requests_tokens_do_not_depend_on_what_else_is_served(
    engines: dict[str, EngineCore], alone: list[list[int]], name: str
) -> None:
    """In any company, order and hurry: chunked, prefix-cached, preempted, speculated, drawn or greedy."""
    engine = engines[name]

    @settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(ARRIVALS)
    def holds(arrivals: list[Arrival]) -> None:
        for number, tokens in serve(engine, arrivals).items():
            assert tokens == alone[arrivals[number][0]], arrivals
        assert not any(engine.stats().pages_in_use.values())
        assert (engine.stats().waiting, engine.stats().running) == (0, 0)

    holds()
    everything = [(number, 0, None, 0) for number in range(len(REQUESTS))]
    assert serve(engine, everything) == dict(enumerate(alone))


@pytest.mark.slow
def test_the_engines_did_what_they_are_for(engines: dict[str, EngineCore], alone: list[list[int]]) -> None:
    """The mixes above meet preemption, cached prefixes and accepted drafts, or they would prove nothing."""
    everything = [(number, 0, None, 0) for number in range(len(REQUESTS))]
    for engine in engines.values():
        assert serve(engine, everything * 2) == dict(enumerate(alone * 2))
    assert engines["one device"].stats().preemptions > 0
    assert engines["one device"].stats().prefix_hits > 0
    assert engines["speculating"].stats().accepted > 0
    assert all(engine.stats().recompiles == 0 for engine in engines.values())


@pytest.mark.slow
def test_threads_call_one_engine_in_turn(engines: dict[str, EngineCore], alone: list[list[int]]) -> None:
    """Each thread is told its own requests' tokens, whoever ran the step."""
    engine = engines["one device"]
    told: dict[int, list[list[int]]] = {}

    def ask(number: int) -> None:
        prompt, params = REQUESTS[number]
        for turn in range(3):
            name, tokens, finished = f"thread {number}, {turn}", [], False
            with engine.inbox([name]) as inbox:
                engine.add(name, prompt, params)
                while not finished:
                    for delta in inbox.take():
                        tokens += delta.token_ids
                        finished |= delta.finish_reason is not None
            told.setdefault(number, []).append(tokens)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(REQUESTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert told == {number: [tokens] * 3 for number, tokens in enumerate(alone)}


@pytest.mark.slow
@pytest.mark.parametrize("thread", ["the same", "another"])
def test_an_inbox_that_is_dropped_within_a_step_waits_for_nobody(
    engines: dict[str, EngineCore], alone: list[list[int]], thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A garbage collector closes streams wherever it runs, also in a thread that the step waits for."""
    engine = engines["one device"]
    dropped, kept = engine.inbox(["dropped"]), engine.inbox(["kept"])
    engine.add("dropped", *REQUESTS[3])
    engine.add("kept", *REQUESTS[4])
    dispatch = engine._dispatch

    def dropping(scheduled: Any) -> None:
        if thread == "the same":
            dropped.close()
        else:
            other = threading.Thread(target=dropped.close)
            other.start()
            other.join(60)
            assert not other.is_alive()
        dispatch(scheduled)

    monkeypatch.setattr(engine, "_dispatch", dropping)
    tokens: list[int] = []
    with kept:
        while len(tokens) < NEW:
            tokens += [token for delta in kept.take() for token in delta.token_ids]
    assert tokens == alone[4]
    while engine.has_work:
        assert not engine.step()
    assert not engine.turns.inboxes and not any(engine.stats().pages_in_use.values())


@pytest.mark.slow
def test_a_step_that_fails_ends_the_calls_whose_requests_it_had(
    llms: dict[str, LLM], alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = llms["one device"]
    engine = llm.engine
    dispatch = engine._steps_for.dispatch

    def failing(scheduled: Any, *rest: Any, **options: Any) -> Any:
        if any(request.params.seed == 666 for request in scheduled.requests):
            raise ValueError("that seed")
        return dispatch(scheduled, *rest, **options)

    monkeypatch.setattr(engine._steps_for, "dispatch", failing)
    bad = SamplingParams(temperature=0.9, seed=666, max_tokens=4)
    with pytest.raises(ValueError, match="that seed"):  # as it was raised, where nobody else is served
        llm.generate([[1, 2, 3]], bad)
    engine.add("of another thread", [4, 5, 6], REQUESTS[0][1])
    with engine.inbox(["of another thread"]), pytest.raises(TTPUError, match=r"\(ValueError\): try again"):
        llm.generate([[1, 2, 3]], bad)
    while engine.has_work:
        engine.step()
    assert llm.generate([REQUESTS[4][0]], REQUESTS[4][1])[0].outputs[0].token_ids == alone[4]


def test_a_program_that_is_missing_while_serving_is_an_error_in_strict_mode(model: Any) -> None:
    """And counted, and compiled, where it is not."""
    for strict in (True, False):
        few = {"sampling_level": "greedy", "prompt_logprobs": False, "num_pages": 40}
        with LLM(model, **{**SMALL, **few, "strict_compile": strict}) as llm:
            pool = llm.engine.runner.pool
            pool._compiled.clear()
            params = SamplingParams(temperature=0.0, max_tokens=2)
            if strict:
                with pytest.raises(RecompileError, match="was not compiled ahead"):
                    llm.generate([[1, 2, 3]], params)
            else:
                assert len(llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids) == 2
                assert pool.recompiles > 0


@pytest.mark.slow
def test_generate_of_a_model_uses_the_engine_where_paged_attention_is_enabled(
    checkpoint: Path, model: Any, engines: dict[str, EngineCore]
) -> None:
    """Same call, same answers: text, arrays, streams, log-probabilities, stop strings."""
    options = {name: value for name, value in SMALL.items() if name != "progress"}
    paged = AutoModelForTPU.from_pretrained(
        checkpoint, task="inference", enable_paged_attention=True, num_pages=60, sampling_level="greedy", **options
    )
    greedy = {"max_new_tokens": 8}
    assert np.array_equal(paged.generate([REQUESTS[2][0]], **greedy), model.generate([REQUESTS[2][0]], **greedy))
    with pytest.raises(RequestError, match="sampling_level"):
        paged.generate("Hello", do_sample=True, max_new_tokens=2)
    paged.engine.close()
    paged.engine = engines["one device"]  # which serves everything
    prompts = [prompt for prompt, _ in REQUESTS[:3]]
    arguments = {"max_new_tokens": 8, "logprobs": 2, "return_dict_in_generate": True}
    ours, theirs = paged.generate(prompts, **arguments), model.generate(prompts, **arguments)
    assert np.array_equal(ours.sequences, theirs.sequences)
    for one, other in zip(ours.completions, theirs.completions, strict=True):
        assert np.allclose(one.logprobs, other.logprobs, atol=1e-4)
        assert [list(top) for top in one.top_logprobs] == [list(top) for top in other.top_logprobs]
    sampled = {"max_new_tokens": 8, "do_sample": True, "temperature": 0.8, "seed": 5}
    assert paged.generate("Hello", **sampled) == model.generate("Hello", **sampled)
    several = {**sampled, "num_return_sequences": 2, "min_new_tokens": 6, "eos_token_id": ours.completions[0].token_ids}
    assert np.array_equal(paged.generate([[1, 2, 3]], **several), model.generate([[1, 2, 3]], **several))
    with pytest.raises(RequestError, match="no_repeat_ngram_size, which the serving engine"):
        paged.generate("Hello", no_repeat_ngram_size=2)
    with pytest.raises(RequestError, match="stopping_criteria, which the serving engine"):
        paged.generate("Hello", stopping_criteria=lambda ids, scores: False)
    assert [e.token_id for e in paged.stream("Hi", max_new_tokens=6)] == [
        e.token_id for e in model.stream("Hi", max_new_tokens=6)
    ]
    assert paged.timings.decode_tokens == 5
    with pytest.raises(RequestError, match="shorten the prompt"):
        paged.generate([list(range(64))])
    assert not any(paged.engine.stats().pages_in_use.values())


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (None, {}, "model is None, but a checkpoint's directory"),
        (5, {}, "model is 5, but"),
        ("here", {"tensor_parallel_size": "2"}, "tensor_parallel_size is '2', but a whole number"),
        ("here", {"tensor_parallel_size": 0}, "tensor_parallel_size is 0, but a whole number"),
        ("here", {"gpu_memory_utilization": "x"}, "memory_utilization is 'x', but a share"),
    ],
)
def test_an_engine_says_what_it_is_made_of(checkpoint: Path, model: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        LLM(checkpoint if model == "here" else model, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda llm: llm.generate(5), "prompts is 5, but a text"),
        (lambda llm: llm.generate([None]), "a prompt is None, but a text"),
        (lambda llm: llm.generate(["abc", 5]), "a prompt is 5, but a text"),
        (lambda llm: llm.generate([{"prompt_token_ids": "abc"}]), "prompt_token_ids is 'abc', but a list"),
        (lambda llm: llm.generate("a", {"max_tokens": 3}), "sampling_params holds .* but SamplingParams are needed"),
        (lambda llm: llm.generate("a", lora_request="x"), "lora_request holds 'x', but a LoRARequest is needed"),
        (lambda llm: llm.beam_search("a", 5), "params is 5, but BeamSearchParams are needed"),
        (lambda llm: read_adapter(None), "the adapter None was asked for, but an adapter's directory"),
        (lambda llm: llm.update_weights(5), "were to be updated from 5, but a directory"),
    ],
)
def test_calls_with_other_types_are_refused_in_one_sentence(llms: dict[str, LLM], call: Any, said: str) -> None:
    llm = llms["one device"]
    with pytest.raises(RequestError, match=said):
        call(llm)
    assert not llm.engine.has_work


def test_engine_settings_are_refused_without_the_engine(checkpoint: Path) -> None:
    """A misspelt or misplaced name is never dropped."""
    with pytest.raises(RequestError, match=r"max_num_seqs.*enable_paged_attention=True"):
        AutoModelForTPU.from_pretrained(checkpoint, max_num_seqs=4)
    with pytest.raises(RequestError, match="max_seqs"):
        AutoModelForTPU.from_pretrained(checkpoint, enable_paged_attention=True, max_seqs=4)
    with pytest.raises(RequestError, match="task='train'"):
        AutoModelForTPU.from_pretrained(checkpoint, task="train")
    with pytest.raises(RequestError, match=r"max_num_sequences .*did you mean max_num_seqs"):
        LLM(checkpoint, max_num_sequences=3, progress=None)
    with pytest.raises(RequestError, match=r"swap_space.*leave it out"):
        LLM(checkpoint, swap_space=4, progress=None)
    for share in (0, 1.1, True):
        with pytest.raises(RequestError, match=r"memory_utilization is .* a share above 0, up to 1"):
            LLM(checkpoint, gpu_memory_utilization=share, progress=None)
    with pytest.raises(RequestError, match=r"memory_utilization was given with kv_cache_memory"):
        LLM(checkpoint, gpu_memory_utilization=0.5, kv_cache_memory=2**20, progress=None)
    with pytest.raises(RequestError, match="an engine was given enable_paged_attention"):
        LLM(checkpoint, enable_paged_attention=True, progress=None)


def test_how_to_load_is_refused_for_a_loaded_model(model: Any) -> None:
    with pytest.raises(RequestError, match="a loaded model was given with backend, mesh, but these say how to load"):
        LLM(model, backend="jax", mesh="tensor=2", progress=None)


@pytest.mark.slow
def test_a_proposer_that_wants_it_is_shown_the_stream_of_each_newest_token(
    engines: dict[str, EngineCore], model: Any, alone: list[list[int]]
) -> None:
    """What heads on the model's own stream (EAGLE, multi-token prediction) draft from, also after accepted drafts."""
    engine = engines["speculating"]
    seen = 0

    class Watching:
        wants_hidden = True

        def observe(self, requests: list[Any], hidden: np.ndarray) -> None:
            nonlocal seen
            logits = np.asarray(model.module.logits(hidden[None]))[0]
            for request, row in zip(requests, logits, strict=True):
                if request.params.is_greedy and not request.params.has_penalties:
                    assert int(row.argmax()) == request.output[-1]
                    seen += 1

        def __getattr__(self, name: str) -> Any:
            return getattr(proposer, name)

    speculation = engine.speculation
    proposer, speculation.proposer = speculation.proposer, Watching()
    try:
        everything = [(number, 0, None, 0) for number in range(len(REQUESTS))]
        assert serve(engine, everything) == dict(enumerate(alone))
    finally:
        speculation.proposer = proposer
    assert seen > len(REQUESTS)
