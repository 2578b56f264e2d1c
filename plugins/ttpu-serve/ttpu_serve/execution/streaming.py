"""Streams the tokens of several prompts as events of the core, for models that generate through their engine."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from ttpu_core.errors import TTPUError
from ttpu_core.generation.events import FinishReason, StreamEvent, Timings
from ttpu_core.generation.sampling_params import SamplingParams
from ttpu_serve.api.outputs import OutputDelta
from ttpu_serve.execution.inbox import Inbox

if TYPE_CHECKING:
    from ttpu_serve.execution.engine_core import EngineCore

_NUMBERS = itertools.count()


def stream_events(
    engine: EngineCore, prompts: Sequence[list[int]], params: Sequence[SamplingParams], timings: Timings
) -> Iterator[StreamEvent]:
    """Yield the events of all prompts, one per token; `index` is the prompt's position. Adds to `timings`.

    Raises:
        RequestError: the engine cannot serve a prompt or an option; raised at once.
        TTPUError: a request failed in a step.
    """
    call = f"generate {next(_NUMBERS)}"
    names = {f"{call}-{index}": index for index in range(len(prompts))}
    inbox = engine.inbox(names)
    try:
        for name, prompt, own in zip(names, prompts, params, strict=True):
            engine.add(name, prompt, own)
    except BaseException:
        inbox.close()
        raise
    events = _events(inbox, names, sum(map(len, prompts)), [own.logprobs or 0 for own in params], timings)
    weakref.finalize(events, inbox.close).atexit = False  # one that is never begun leaves nothing behind either
    return events


def _events(
    inbox: Inbox, names: Mapping[str, int], prompt_tokens: int, alternatives: Sequence[int], timings: Timings
) -> Iterator[StreamEvent]:
    left = len(names)
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
                yield from _of_delta(delta, index, alternatives[index])
    finally:
        inbox.close()
        now = time.perf_counter()
        timings.prefill_seconds += (first or now) - began
        timings.prefill_tokens += prompt_tokens
        timings.decode_seconds += now - (first or now)
        timings.decode_tokens += max(0, tokens - len(names))


def _of_delta(delta: OutputDelta, index: int, alternatives: int) -> Iterator[StreamEvent]:
    """Yield the events of one delta, one per token; text and finish reason come with the last."""
    last = len(delta.token_ids) - 1
    for place, token in enumerate(delta.token_ids):
        logprob, top = None, None
        if delta.logprobs is not None:
            own = delta.logprobs[place]
            logprob = own[token].logprob
            ranked = sorted((value.rank, other) for other, value in own.items() if value.rank is not None)
            top = {other: own[other].logprob for rank, other in ranked if rank <= alternatives}
        reason = cast("FinishReason | None", delta.finish_reason) if place == last else None
        yield StreamEvent(delta.text if place == last else "", token, logprob, top or None, reason, index)
