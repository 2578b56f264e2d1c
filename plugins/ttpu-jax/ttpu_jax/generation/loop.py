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
from ttpu_jax.generation.call import Call, Reports
from ttpu_jax.generation.programs import Programs
from ttpu_jax.generation.results import Completion
from ttpu_jax.generation.rules import token_rules
from ttpu_jax.generation.speculation import SpeculativeSteps, guesser_of
from ttpu_jax.generation.steps import Chosen, Padded, PlainSteps, RuledSteps, Steps
from ttpu_jax.ops.sampling import Sampled, features_of, sampling_inputs


@dataclass
class _Row:
    """One sequence while it grows."""

    completion: Completion
    text: TextStream | None
    limit: int
    done: bool = False


def run(
    programs: Programs, call: Call, timings: Timings, reports: Reports | None = None
) -> Iterator[tuple[StreamEvent, Completion]]:
    """Generate for a batch of prompts. Each event comes with the completion that it belongs to.

    Args:
        programs: the model's compiled programs.
        call: prompts and options.
        timings: receives the times of this call.
        reports: receives the scores and logits that were asked for.

    Raises:
        RequestError: at the call, for a prompt that leaves no room in the context.
        TTPUError: during iteration, where the model returns logits that are not finite.
    """
    if call.guesses:
        _refuse_guesses(call)
    rows = [_row(prompt, call.options, call.tokenizer, call.context) for prompt in call.sequences]
    return _events(programs, call, rows, timings, reports or Reports())


def _events(
    programs: Programs, call: Call, rows: list[_Row], timings: Timings, reports: Reports
) -> Iterator[tuple[StreamEvent, Completion]]:
    steps = max(row.limit for row in rows)
    ids, watched = call.heads, bool(call.calls.processors or call.calls.criteria)
    compiled_before = programs.compile_seconds
    began = time.perf_counter()
    taken = _steps(programs, call, rows)
    upcoming = taken.first(ids)
    jax.block_until_ready(upcoming.sampled.token)
    compiled = programs.compile_seconds - compiled_before
    timings.prefill_seconds += time.perf_counter() - began - compiled
    timings.prefill_tokens += sum(map(len, call.prompts))
    timings.compile_seconds += compiled

    def following() -> Chosen:
        before = programs.compile_seconds
        found = taken.next(ids)
        timings.compile_seconds += programs.compile_seconds - before
        return found

    began, compiled_before = time.perf_counter(), timings.compile_seconds
    decoded = 0
    try:
        for step in range(steps):
            current = upcoming
            if step + 1 < steps and taken.ahead:  # dispatched before the host looks at the current token
                upcoming = following()
            host = _to_host(current.sampled)
            reports.take(current.scores, current.logits, programs.spec.vocab_size)
            active = [index for index, row in enumerate(rows) if not row.done]
            decoded += len(active) if step else 0
            ended = np.zeros(len(rows), np.bool_)
            if watched:
                new = [call.pad if row.done else int(host["token"][index]) for index, row in enumerate(rows)]
                ids = np.concatenate([ids, np.array(new, np.int64)[:, None]], axis=1)
                ended = call.calls.ended(ids, reports.scores if call.options.output_scores else None)
            for index in active:
                yield from _advance(rows[index], index, host, call.stop_ids, ended=bool(ended[index]))
            if all(row.done for row in rows):
                break
            if step + 1 < steps and not taken.ahead:
                upcoming = following()
    finally:
        timings.decode_seconds += time.perf_counter() - began - (timings.compile_seconds - compiled_before)
        timings.decode_tokens += decoded


def _steps(programs: Programs, call: Call, rows: Sequence[_Row]) -> Steps:
    options, times = call.options, call.options.num_return_sequences
    # Greedy calls draw nothing, so they have no seed to share with other processes.
    greedy = options.sampling().is_greedy
    seed = 0 if greedy else shared_seed(options.seed, programs.runtime.placement.mesh)
    choices = [_row_seed(replace(options, seed=seed).sampling(), index) for index in range(len(rows))]
    features, inputs = features_of(choices), sampling_inputs(choices)
    prompts = Padded.of(programs, [prompt.token_ids for prompt in call.prompts], max(row.limit for row in rows))
    vocab, limits = programs.spec.embedding.rows, [row.limit for row in rows]
    rules = token_rules(options, [len(prompt) for prompt in call.sequences], limits, call.stop_ids, vocab)
    reports = options.output_scores or options.output_logits
    if call.guesses:
        first, most = call.prompts[0].token_ids, max(limits)
        guesser = guesser_of(programs, call.assistant, options, first, most, inputs, features)
        assert guesser is not None
        return SpeculativeSteps(
            programs, first, most, guesser, inputs, features, rules,
            scores=options.output_scores, logits=options.output_logits,
        )  # fmt: skip
    if rules.choose_nothing and times == 1 and not reports and not call.calls.processors:
        return PlainSteps(programs, prompts, inputs, features)
    return RuledSteps(
        programs, prompts, times, inputs, features, rules, call.calls,
        scores=options.output_scores, logits=options.output_logits,
    )  # fmt: skip


def _refuse_guesses(call: Call) -> None:
    """Refuse speculation for several rows, or around the caller's processors."""
    name = "prompt_lookup_num_tokens" if call.assistant is None else "assistant_model"
    if len(call.sequences) > 1:
        raise RequestError(
            f"{name} was given for {len(call.sequences)} sequences, but guesses are checked for one: give one prompt."
        )
    if call.calls.processors:
        raise RequestError(f"{name} was given with logits_processor, which runs token by token: leave one of them out.")


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
    row: _Row, index: int, host: dict[str, np.ndarray], stop_ids: frozenset[int], *, ended: bool
) -> Iterator[tuple[StreamEvent, Completion]]:
    """Give one sequence its new token; `ended`: the caller's code ends it with this one."""
    done, token = row.completion, int(host["token"][index])
    if token < 0:
        raise TTPUError(
            "the model's output is not a number (NaN or infinity): the checkpoint is damaged, it overflows in this "
            "dtype (try dtype='float32'), or the call forbids every token."
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
    elif ended:
        reason = "stop"
        text += row.text.finish() if row.text else ""
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
