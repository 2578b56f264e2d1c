"""Beam search on the device: beams are rows of the batch, whose caches are gathered at each step. The host does the
bookkeeping (`ttpu_core.generation.beams`), so that every step waits for it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_core.errors import RequestError, TTPUError
from ttpu_core.generation.beams import BeamOptions, Beams
from ttpu_core.generation.detokenizer import TextStream
from ttpu_core.generation.events import Timings
from ttpu_core.generation.token_choice import TokenChoice
from ttpu_jax.distributed import shared_seed
from ttpu_jax.generation.call import Call, Reports
from ttpu_jax.generation.programs import Programs
from ttpu_jax.generation.results import Completion
from ttpu_jax.generation.rules import token_rules
from ttpu_jax.generation.steps import Padded, prefilled
from ttpu_jax.ops.sampling import SamplingFeatures, SamplingInputs, features_of, sampling_inputs
from ttpu_jax.ops.token_rules import Memory, TokenRules, best_continuations, final_scores, ruled


@dataclass(frozen=True)
class Found:
    """The beams that were asked for, the best of each prompt first.

    Attributes:
        completions: of the sequences.
        scores: float32 [sequences], the sum of log-probabilities by the length penalty.
        rows: int32 [sequences, new tokens], the running beam that each token continued, then -1.
    """

    completions: list[Completion]
    scores: np.ndarray
    rows: np.ndarray


def search(programs: Programs, call: Call, timings: Timings, reports: Reports) -> Found:
    """Search for the likeliest continuations of prompts.

    Args:
        programs: the model's compiled programs.
        call: prompts and options.
        timings: receives the times of this call.
        reports: receives the scores and logits that were asked for.

    Raises:
        RequestError: a prompt that leaves no room in the context, or stop strings without a tokenizer.
        TTPUError: the model returns logits that are not finite.
    """
    options = call.options
    if options.stop_strings and call.tokenizer is None:
        raise RequestError("stop_strings were given, but the checkpoint has no tokenizer: use stop_token_ids instead.")
    limits = [options.limit(len(prompt), call.context) for prompt in call.prompts]
    beams = Beams(BeamOptions(options.num_beams, options.length_penalty, options.early_stopping), limits)
    compiled_before, began = programs.compile_seconds, time.perf_counter()
    steps = _BeamSteps(programs, call, limits, reports)
    found = steps.first(beams)
    compiled = programs.compile_seconds - compiled_before
    timings.prefill_seconds += time.perf_counter() - began - compiled
    timings.prefill_tokens += sum(map(len, call.prompts))
    timings.compile_seconds += compiled

    compiled_before, began = programs.compile_seconds, time.perf_counter()
    while True:
        ended = _ended(call, beams, found, reports)
        tokens, rows = beams.advance(*found, ended)
        if beams.done:
            break
        found = steps.next(beams, tokens, rows)
        timings.decode_tokens += beams.scores.size
    compiled = programs.compile_seconds - compiled_before
    timings.decode_seconds += time.perf_counter() - began - compiled
    timings.compile_seconds += compiled
    return _found(call, beams, limits)


Continuations = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Sums of log-probabilities, last tokens and running beams of continuations, [prompts, number] each."""


class _BeamSteps:
    """The device's part of the search."""

    def __init__(self, programs: Programs, call: Call, limits: list[int], reports: Reports) -> None:
        options, count = call.options, call.options.num_beams
        greedy = options.sampling().is_greedy
        seed = 0 if greedy else shared_seed(options.seed, programs.runtime.placement.mesh)
        choice = replace(options, seed=seed).sampling()
        choices: list[TokenChoice] = [
            replace(choice, seed=(int(choice.seed or 0) + row) % 2**32) for row in range(len(limits) * count)
        ]
        self._programs, self._call, self._reports = programs, call, reports
        self._features, self._inputs = features_of(choices), sampling_inputs(choices)
        self._prompts = Padded.of(programs, [prompt.token_ids for prompt in call.prompts], max(limits))
        lengths = np.repeat([len(prompt) for prompt in call.prompts], count).tolist()
        vocab = programs.spec.embedding.rows
        self._rules = token_rules(options, lengths, np.repeat(limits, count).tolist(), call.stop_ids, vocab)
        self._heads = np.repeat(call.heads[:: options.num_return_sequences], count, axis=0)
        self._memory = self._prompts.memory(count, vocab if self._features.penalties else None)
        self._number = min(max(2, 1 + len(call.stop_ids)), programs.spec.vocab_size) * count

    def first(self, beams: Beams) -> Continuations:
        """Read the prompts."""
        self._state, logits = prefilled(self._programs, self._prompts, beams.options.num_beams)
        return self._best(beams, logits, None, None)

    def next(self, beams: Beams, tokens: np.ndarray, rows: np.ndarray) -> Continuations:
        """Read the last tokens of the running beams, which continue `rows`, int32 [rows] each."""
        device_tokens, device_rows = jax.device_put((tokens, rows), self._programs.runtime.placement.whole())
        self._state, logits = self._programs.decode_logits(self._state, device_tokens, device_rows)
        return self._best(beams, logits, device_tokens, device_rows)

    def _best(
        self, beams: Beams, logits: jax.Array, tokens: jax.Array | None, rows: jax.Array | None
    ) -> Continuations:
        run, key, call = self._programs.compiled, (self._features, self._number), self._call
        vocab = self._programs.spec.vocab_size
        after = partial(_after_rules, features=self._features)
        given = (logits, self._memory, tokens, rows, self._inputs, self._rules)
        self._memory, before = run("beam rules", after, key, *given)
        if call.calls.processors:
            new = beams.tokens[:, :, : beams.step].reshape(len(self._heads), -1)
            ids = np.concatenate([self._heads, new], axis=1)
            before = call.calls.processed(ids, np.asarray(before), vocab)
        fewest = 1 + max(1, len(call.stop_ids))
        best = partial(_best, features=self._features, number=self._number, fewest=fewest)
        rest = (before, beams.scores, self._memory.step, self._inputs, self._rules)
        scores, *found = run("best beams", best, key, *rest)
        options = call.options
        self._reports.take(
            scores if options.output_scores else None, logits if options.output_logits else None, vocab
        )
        sums, last, continued = map(np.asarray, found)
        if np.isnan(sums).any():
            raise TTPUError(
                "the model's output is not a number (NaN or infinity): the checkpoint is damaged, or it overflows in "
                "this dtype; try dtype='float32'."
            )
        return sums, last, continued


def _after_rules(
    logits: jax.Array,
    memory: Memory,
    tokens: jax.Array | None,
    rows: jax.Array | None,
    inputs: SamplingInputs,
    rules: TokenRules,
    *,
    features: SamplingFeatures,
) -> tuple[Memory, jax.Array]:
    if tokens is not None and rows is not None:
        memory = memory.of_rows(rows).appended(tokens)
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return memory, ruled(logprobs, memory, inputs, features, rules)


def _best(
    scores: jax.Array,
    running: jax.Array,
    step: jax.Array,
    inputs: SamplingInputs,
    rules: TokenRules,
    *,
    features: SamplingFeatures,
    number: int,
    fewest: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    scores = final_scores(scores, inputs, features, rules, fewest)
    return scores, *best_continuations(scores, running, number, inputs, step, features)


def _ended(call: Call, beams: Beams, found: Continuations, reports: Reports) -> np.ndarray:
    """bool [prompts, number]: continuations that a stop token, a stop string or the caller's code ends."""
    _, tokens, continued = found
    ended = np.isin(tokens, list(call.stop_ids))
    if not call.calls.criteria and not call.options.stop_strings:
        return ended
    new = beams.candidates(tokens, continued)
    if call.options.stop_strings:
        texts = [[_text(call, index, ids.tolist()).stopped for ids in each] for index, each in enumerate(new)]
        ended |= np.array(texts)
    if call.calls.criteria:
        heads = np.repeat(call.heads[:: call.options.num_return_sequences], tokens.shape[1], axis=0)
        ids = np.concatenate([heads, new.reshape(len(heads), -1)], axis=1)
        scores = reports.scores if call.options.output_scores else None
        ended |= call.calls.ended(ids, scores).reshape(ended.shape)
    return ended


def _text(call: Call, index: int, ids: list[int]) -> TextStream:
    """The text of new tokens after a prompt, up to a stop string."""
    text = TextStream(call.tokenizer, call.prompts[index].token_ids, call.options.stop_strings)
    for token in ids:
        text.push(token)
    return text


def _found(call: Call, beams: Beams, limits: list[int]) -> Found:
    """The beams that are returned."""
    number = call.options.num_return_sequences
    completions = []
    for index, prompt in enumerate(call.prompts):
        for beam in range(number):
            length = int((beams.finished_rows[index, beam] >= 0).sum())
            ids = beams.finished_tokens[index, beam, :length].tolist()
            done = Completion(len(prompt), ids, finish_reason="length" if length == limits[index] else "stop")
            if ids and ids[-1] in call.stop_ids:
                done.stop_id, done.finish_reason = ids.pop(), "stop"
            if call.tokenizer is not None:
                text = _text(call, index, ids)
                text.finish()
                done.text = text.text
            completions.append(done)
    rows = beams.finished_rows[:, :number].reshape(len(completions), -1)
    longest = int((rows >= 0).sum(axis=1).max())
    return Found(completions, beams.finished_scores[:, :number].reshape(-1), rows[:, :longest])
