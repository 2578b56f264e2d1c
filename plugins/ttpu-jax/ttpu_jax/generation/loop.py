"""The generation loop. It takes prompts and options, and yields events token by token, each with its completion. While
the device runs one step, the host detokenizes the tokens of the step before and checks for the end of sequences."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from ttpu_core.errors import RequestError, TTPUError
from ttpu_core.generation.detokenizer import TextStream
from ttpu_core.generation.events import FinishReason, StreamEvent, Timings
from ttpu_core.generation.options import GenerationOptions
from ttpu_core.generation.prompt import Prompt
from ttpu_core.generation.token_choice import TokenChoice
from ttpu_jax.distributed import shared_seed
from ttpu_jax.generation.programs import Programs, cache_bucket, prompts_seen
from ttpu_jax.generation.prompts import left_pad
from ttpu_jax.generation.results import Completion
from ttpu_jax.ops.sampling import Sampled, features_of, sampling_inputs


@dataclass
class _Row:
    """One sequence while it grows."""

    completion: Completion
    text: TextStream | None
    limit: int
    done: bool = False


def run(
    programs: Programs,
    prompts: Sequence[Prompt],
    options: GenerationOptions,
    *,
    stop_ids: frozenset[int],
    tokenizer: Any,
    context: int,
    timings: Timings,
) -> Iterator[tuple[StreamEvent, Completion]]:
    """Generate for a batch of prompts. Each event comes with the completion that it belongs to.

    Args:
        programs: the model's compiled programs.
        prompts: tokens of each prompt.
        options: of the call.
        stop_ids: tokens that end a sequence and are not part of it.
        tokenizer: decodes tokens to text; None for no text.
        context: the most tokens that a sequence may have.
        timings: receives the times of this call.

    Raises:
        RequestError: at the call, for a prompt that leaves no room in the context.
        TTPUError: during iteration, where the model returns logits that are not finite.
    """
    rows = [_row(prompt, options, tokenizer, context) for prompt in prompts]
    return _events(programs, prompts, rows, options, stop_ids, timings)


def _events(
    programs: Programs,
    prompts: Sequence[Prompt],
    rows: list[_Row],
    options: GenerationOptions,
    stop_ids: frozenset[int],
    timings: Timings,
) -> Iterator[tuple[StreamEvent, Completion]]:
    steps = max(row.limit for row in rows)
    # Greedy calls draw nothing, so they have no seed to share with other processes.
    greedy = options.sampling().is_greedy
    seed = 0 if greedy else shared_seed(options.seed, programs.runtime.placement.mesh)
    options = replace(options, seed=seed)
    sampling = [_row_seed(options.sampling(), index) for index in range(len(rows))]
    features, inputs = features_of(sampling), sampling_inputs(sampling)
    ids = [prompt.token_ids for prompt in prompts]
    seen = prompts_seen(ids, programs.spec.embedding.rows) if features.penalties else None

    width = programs.prompt_width(max(map(len, prompts)))
    tokens, starts = left_pad(ids, width)
    slots = cache_bucket(width + steps)
    compiled_before = programs.compile_seconds
    began = time.perf_counter()
    state = programs.start(starts, width, slots, seen)
    chunk = min(width, programs.prefill_chunk or width)
    for at in range(0, width, chunk):
        part = tokens[:, at : at + chunk]
        state, sampled = programs.prefill(state, part, inputs, features, fresh=at == 0)
    jax.block_until_ready(sampled.token)
    compiled = programs.compile_seconds - compiled_before
    timings.prefill_seconds += time.perf_counter() - began - compiled
    timings.prefill_tokens += sum(map(len, prompts))
    timings.compile_seconds += compiled

    began, compiled_before = time.perf_counter(), programs.compile_seconds
    decoded = 0
    try:
        for step in range(steps):
            current = sampled
            if step + 1 < steps:  # dispatched before the host looks at the current token
                state, sampled = programs.decode(state, inputs, features)
            host = _to_host(current)
            active = [index for index, row in enumerate(rows) if not row.done]
            decoded += len(active) if step else 0
            for index in active:
                yield from _advance(rows[index], index, host, stop_ids)
            if all(row.done for row in rows):
                break
    finally:
        compiled = programs.compile_seconds - compiled_before
        timings.decode_seconds += time.perf_counter() - began - compiled
        timings.compile_seconds += compiled
        timings.decode_tokens += decoded


def _row(prompt: Prompt, options: GenerationOptions, tokenizer: Any, context: int) -> _Row:
    limit = options.limit(len(prompt), context)
    if options.stop_strings and tokenizer is None:
        raise RequestError("stop_strings were given, but the checkpoint has no tokenizer: use stop_token_ids instead.")
    text = None if tokenizer is None else TextStream(tokenizer, prompt.token_ids, options.stop_strings)
    completion = Completion(len(prompt), logprobs=None if options.logprobs is None else [])
    completion.top_logprobs = [] if options.logprobs else None
    return _Row(completion, text, limit)


def _row_seed(params: TokenChoice, index: int) -> TokenChoice:
    """Prompts of one call draw differently, though they share a seed; the first one draws as if it were alone."""
    return replace(params, seed=(int(params.seed or 0) + index) % 2**32)


def _advance(
    row: _Row, index: int, host: dict[str, np.ndarray], stop_ids: frozenset[int]
) -> Iterator[tuple[StreamEvent, Completion]]:
    """Give one sequence its new token."""
    done, token = row.completion, int(host["token"][index])
    if token < 0:
        raise TTPUError(
            "the model's output is not a number (NaN or infinity): the checkpoint is damaged, or it overflows in "
            "this dtype; try dtype='float32'."
        )
    logprob = float(host["logprob"][index]) if "logprob" in host else None
    top = None
    if "top_tokens" in host:
        top = dict(zip(host["top_tokens"][index].tolist(), host["top_logprobs"][index].tolist(), strict=True))
    if token in stop_ids:
        row.done, done.finish_reason, done.stop_id = True, "stop", token
        text = row.text.finish() if row.text else ""
        done.text = row.text.text if row.text else None
        yield StreamEvent(text, token, logprob, top, "stop", index), done
        return
    done.token_ids.append(token)
    if done.logprobs is not None and logprob is not None:
        done.logprobs.append(logprob)
    if done.top_logprobs is not None and top is not None:
        done.top_logprobs.append(top)
    text = row.text.push(token) if row.text else ""
    reason: FinishReason | None = None
    if row.text is not None and row.text.stopped:
        reason = "stop"
    elif len(done.token_ids) >= row.limit:
        reason = "length"
        text += row.text.finish() if row.text else ""
    if reason is not None:
        row.done, done.finish_reason = True, reason
    done.text = row.text.text if row.text else None
    yield StreamEvent(text, token, logprob, top, reason, index), done


def _to_host(sampled: Sampled) -> dict[str, np.ndarray]:
    """The arrays that were asked for, by name."""
    names = ("token", "logprob", "top_tokens", "top_logprobs")
    present = {name: getattr(sampled, name) for name in names if getattr(sampled, name) is not None}
    return {name: np.asarray(value) for name, value in present.items()}
