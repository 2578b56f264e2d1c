"""`generate` and `stream` of a model by its engine. In: prompts and transformers' options; out: the same events and
completions as the loop without an engine gives."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from ttpu_core.errors import TTPUError
from ttpu_core.generation.events import FinishReason, StreamEvent, Timings
from ttpu_core.generation.sampling_params import SamplingParams
from ttpu_jax.generation.options import GenerationOptions
from ttpu_jax.generation.results import Completion
from ttpu_serve.api.outputs import Logprob, OutputDelta
from ttpu_serve.execution.engine_core import EngineCore
from ttpu_serve.execution.inbox import Inbox

_NUMBERS = itertools.count()


def run(
    engine: EngineCore,
    prompts: list[list[int]],
    options: GenerationOptions,
    *,
    stop_ids: frozenset[int],
    context: int,
    timings: Timings,
) -> Iterator[tuple[StreamEvent, Completion]]:
    """As `ttpu_jax.generation.loop.run`: events of all prompts as their tokens come.

    Raises:
        RequestError: at once, for a prompt or an option that the engine cannot serve.
        TTPUError: at its step, where a request fails.
    """
    call = f"generate {next(_NUMBERS)}"
    requests = [_params(options, index, prompt, stop_ids, min(context, engine.max_model_len)) for index, prompt in
                enumerate(prompts)]  # fmt: skip
    names = {f"{call}-{index}": index for index in range(len(prompts))}
    inbox = engine.inbox(names)
    try:
        for name, prompt, params in zip(names, prompts, requests, strict=True):
            engine.add(name, prompt, params)
    except BaseException:
        inbox.close()
        raise
    events = _events(engine, inbox, names, prompts, options, stop_ids, timings)
    weakref.finalize(events, inbox.close).atexit = False  # one that is never begun leaves nothing behind either
    return events


def _events(
    engine: EngineCore,
    inbox: Inbox,
    names: Mapping[str, int],
    prompts: list[list[int]],
    options: GenerationOptions,
    stop_ids: frozenset[int],
    timings: Timings,
) -> Iterator[tuple[StreamEvent, Completion]]:
    completions = [_completion(prompt, options, engine) for prompt in prompts]
    left = len(prompts)
    began, first = time.perf_counter(), 0.0
    tokens = 0
    try:
        while left:
            for delta in inbox.take():
                index = names[delta.request_id]
                if delta.error is not None:
                    raise TTPUError(delta.error)
                first = first or time.perf_counter()
                tokens += len(delta.token_ids)
                left -= delta.finish_reason is not None
                yield from _advance(completions[index], index, delta, stop_ids, options.logprobs or 0)
    finally:
        inbox.close()
        now = time.perf_counter()
        timings.prefill_seconds += (first or now) - began
        timings.prefill_tokens += sum(map(len, prompts))
        timings.decode_seconds += now - (first or now)
        timings.decode_tokens += max(0, tokens - len(prompts))


def _advance(
    done: Completion, index: int, delta: OutputDelta, stop_ids: frozenset[int], alternatives: int
) -> Iterator[tuple[StreamEvent, Completion]]:
    """Events of one delta, one per token; text and end come with the last."""
    last = len(delta.token_ids) - 1
    done.text = None if done.text is None else done.text + delta.text
    for place, token in enumerate(delta.token_ids):
        logprob, top = None, None
        if delta.logprobs is not None:
            own: dict[int, Logprob] = delta.logprobs[place]
            logprob = own[token].logprob
            ranked = sorted((value.rank, other) for other, value in own.items() if value.rank is not None)
            top = {other: own[other].logprob for rank, other in ranked if rank <= alternatives}
        reason = delta.finish_reason if place == last else None
        if reason == "stop" and token in stop_ids:
            done.stop_id = token
        else:
            done.token_ids.append(token)
            if done.logprobs is not None and logprob is not None:
                done.logprobs.append(logprob)
            if done.top_logprobs is not None and top is not None:
                done.top_logprobs.append(top)
        if reason is not None:
            done.finish_reason = cast(FinishReason, reason)
        text = delta.text if place == last else ""
        yield StreamEvent(text, token, logprob, top or None, cast("FinishReason | None", reason), index), done


def _completion(prompt: list[int], options: GenerationOptions, engine: EngineCore) -> Completion:
    done = Completion(len(prompt), logprobs=None if options.logprobs is None else [])
    done.top_logprobs = [] if options.logprobs else None
    done.text = "" if engine.tokenizer is not None else None
    return done


def _params(
    options: GenerationOptions, index: int, prompt: list[int], stop_ids: frozenset[int], context: int
) -> SamplingParams:
    """One prompt's request, with the refusals of the loop without an engine."""
    limit = options.limit(len(prompt), context)
    own = options.sampling()
    values: dict[str, Any] = {name: getattr(own, name) for name in type(own).__dataclass_fields__}
    params = SamplingParams(
        **values,
        max_tokens=limit,
        stop=options.stop_strings,
        stop_token_ids=tuple(sorted(stop_ids)),
        ignore_eos=True,  # `stop_ids` are all that end it
    )
    return replace(params, seed=(int(own.seed or 0) + index) % 2**32)
