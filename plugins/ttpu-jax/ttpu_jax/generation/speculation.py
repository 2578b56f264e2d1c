"""Speculation in `generate` for one prompt: a few tokens are guessed, from the text so far or by an assistant model,
and the model checks all of them in one pass.

Each checked token is chosen as it would be without guesses, and by the same noise where it is drawn: so the tokens are
the same with and without speculation (docs/decisions/0016)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_core.generation.options import GenerationOptions
from ttpu_jax.generation.programs import Programs
from ttpu_jax.generation.steps import Chosen, Padded, at_once, prefilled
from ttpu_jax.ops.sampling import Sampled, SamplingFeatures, SamplingInputs
from ttpu_jax.ops.token_rules import Memory, TokenRules, chosen, final_scores, ruled


class Guesser(Protocol):
    """Guesses what follows."""

    number: int
    """Tokens that are guessed at once."""

    def guess(self, ids: Sequence[int], prompt: int) -> Sequence[int]:
        """Return at most `number` tokens that may follow `ids`, of which the first `prompt` are the prompt."""
        ...


class PromptLookup:
    """Guesses what followed the last tokens where they occurred before, the latest time.

    Args:
        number: tokens that are guessed at once.
        longest: tokens of the longest end of the text that is looked for.
    """

    def __init__(self, number: int, longest: int) -> None:
        self.number, self._longest = number, longest

    def guess(self, ids: Sequence[int], prompt: int) -> Sequence[int]:
        """Return at most `number` tokens that may follow `ids`."""
        array = np.asarray(ids)
        for size in range(min(self._longest, len(array) - 1), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(array[:-1], size)
            places = np.flatnonzero((windows == array[-size:]).all(axis=1))
            if len(places):
                after: list[int] = array[places[-1] + size :][: self.number].tolist()
                return after
        return ()


class Assistant:
    """Guesses by a smaller model of the same vocabulary, which draws with the noise of the model that checks.

    Args:
        programs: of the smaller model.
        prompt: ids of the prompt.
        steps: the most tokens that follow it.
        number: tokens that are guessed at once.
        inputs: the sampling parameters of the one row.
        features: the sampling features that it uses.
    """

    def __init__(
        self,
        programs: Programs,
        prompt: Sequence[int],
        steps: int,
        number: int,
        inputs: SamplingInputs,
        features: SamplingFeatures,
    ) -> None:
        self.number = number
        self._programs, self._inputs = programs, inputs
        self._features = replace(features, penalties=False, logprobs=-1)
        self._prompts = Padded.of(programs, [prompt], steps + number + 2, rewound=number + 2)
        self._state: Any = None

    def guess(self, ids: Sequence[int], prompt: int) -> Sequence[int]:
        """Return at most `number` tokens that may follow `ids`, of which the first `prompt` are the prompt."""
        programs = self._programs
        if self._state is None:
            self._state, _ = prefilled(programs, self._prompts, 1)
        # The last two tokens are read again: after a guess that was right to the end, neither has been read.
        start = int(self._prompts.starts[0])
        state = programs.rewound(self._state, start + len(ids) - 2)
        last = np.array([ids[-2:]], np.int32)
        state, logits = programs.block_logits(state, last)
        logits, guesses, step = logits[:, -1], [], len(ids) - prompt
        for _ in range(self.number):
            function = partial(_guess, features=self._features)
            token = programs.compiled("guess", function, (self._features,), logits, self._inputs, np.int32(step))
            guesses.append(token)
            step += 1
            if len(guesses) < self.number:
                state, logits = programs.decode_logits(state, token)
        self._state = state
        return [int(token[0]) for token in jax.device_get(guesses)]


class SpeculativeSteps:
    """Steps that choose several tokens at once where guesses are right.

    Args:
        programs: the model's compiled programs.
        prompt: ids of the prompt.
        steps: the most tokens that follow it.
        guesser: guesses tokens.
        inputs: the sampling parameters of the one row.
        features: the sampling features that it uses.
        rules: of the call.
        scores: report scores.
        logits: report logits.
    """

    ahead = False

    def __init__(
        self,
        programs: Programs,
        prompt: Sequence[int],
        steps: int,
        guesser: Guesser,
        inputs: SamplingInputs,
        features: SamplingFeatures,
        rules: TokenRules,
        *,
        scores: bool = False,
        logits: bool = False,
    ) -> None:
        self._programs, self._ids, self._prompt = programs, list(prompt), len(prompt)
        self._guesser, self._inputs, self._features, self._rules = guesser, inputs, features, rules
        self._scores, self._logits = scores, logits
        number = guesser.number
        self._prompts = Padded.of(programs, [prompt], steps + number + 1, rewound=number + 1)
        self._memory = self._prompts.memory(1, programs.spec.embedding.rows if features.penalties else None)
        self._state: Any = None
        self._ready: list[Chosen] = []

    def first(self, ids: np.ndarray) -> Chosen:
        """Read the prompt, and choose its first token; ids [1, length] are not read."""
        self._state, logits = prefilled(self._programs, self._prompts, 1)
        given = (logits, self._memory, None, self._inputs, self._rules)
        function = partial(at_once, features=self._features)
        self._memory, sampled, scores = self._programs.compiled("ruled choice", function, (self._features,), *given)
        return self._kept(Chosen(sampled, scores if self._scores else None, logits if self._logits else None))

    def next(self, ids: np.ndarray) -> Chosen:
        """Choose one more token, or take one that has been checked; ids [1, length] are not read."""
        if not self._ready:
            self._ready = self._checked()
        return self._kept(self._ready.pop(0))

    def _kept(self, one: Chosen) -> Chosen:
        self._ids.append(int(np.asarray(one.sampled.token)[0]))
        return one

    def _checked(self) -> list[Chosen]:
        """The next tokens: as many guesses as were right, and one more."""
        number, read = self._guesser.number, len(self._ids) - 1
        block = np.zeros((1, number + 1), np.int32)  # what is not guessed is 0, which is a guess as well
        guesses = self._guesser.guess(self._ids, self._prompt)
        block[0, 0], block[0, 1 : 1 + len(guesses)] = self._ids[-1], guesses
        self._state, logits = self._programs.block_logits(self._state, block)
        function = partial(_checked, features=self._features)
        given = (logits, self._memory, block, self._inputs, self._rules)
        self._memory, sampled, scores, right = self._programs.compiled("check", function, (self._features,), *given)
        count = int(right) + 1
        start = int(self._prompts.starts[0])
        self._state = self._programs.rewound(self._state, start + read + count)
        found = jax.device_get(sampled)
        return [
            Chosen(
                jax.tree.map(lambda array, place=place: array[place], found),
                scores[place] if self._scores else None,
                logits[:, place] if self._logits else None,
            )
            for place in range(count)
        ]


def guesser_of(
    programs: Programs,
    assistant: Any,
    options: GenerationOptions,
    prompt: Sequence[int],
    steps: int,
    inputs: SamplingInputs,
    features: SamplingFeatures,
) -> Guesser | None:
    """Return what guesses in a call, or None.

    Args:
        programs: of the model that checks.
        assistant: the caller's assistant model, or None.
        options: of the call.
        prompt: ids of the only prompt.
        steps: the most tokens that follow it.
        inputs: the sampling parameters of the one row.
        features: the sampling features that it uses.

    Raises:
        RequestError: an assistant of another kind or vocabulary, or two ways to guess.
        UnsupportedError: a model whose tokens cannot be taken back.
    """
    number = options.prompt_lookup_num_tokens
    if assistant is None and number is None:
        return None
    if assistant is not None and number is not None:
        raise RequestError("assistant_model and prompt_lookup_num_tokens both guess tokens: pass one of them.")
    for each in (programs, *(() if assistant is None else (_programs_of(assistant),))):
        reason = each.keeps_tokens
        if reason is not None:
            raise UnsupportedError(
                f"guesses were to be checked, but {reason}: leave out assistant_model and prompt_lookup_num_tokens."
            )
    if number is not None:
        return PromptLookup(number, options.max_matching_ngram_size)
    theirs = _programs_of(assistant)
    if theirs.spec.vocab_size != programs.spec.vocab_size:
        raise RequestError(
            f"the assistant model has {theirs.spec.vocab_size:,} tokens, but this model {programs.spec.vocab_size:,}: "
            "pass one with the same tokenizer."
        )
    return Assistant(theirs, prompt, steps, options.num_assistant_tokens, inputs, features)


def _programs_of(assistant: Any) -> Programs:
    programs = getattr(assistant, "programs", None)
    if not isinstance(programs, Programs):
        raise RequestError(
            f"assistant_model is a {type(assistant).__name__}, but a model of this backend is needed: open it with "
            "AutoModelForTPU.from_pretrained."
        )
    return programs


def _guess(logits: jax.Array, inputs: SamplingInputs, step: jax.Array, *, features: SamplingFeatures) -> jax.Array:
    raw = logits.astype(jnp.float32)
    scores = final_scores(raw, inputs, features, TokenRules())
    return jnp.maximum(chosen(raw, scores, inputs, step, features).token, 0)


def _checked(
    logits: jax.Array,
    memory: Memory,
    block: jax.Array,
    inputs: SamplingInputs,
    rules: TokenRules,
    *,
    features: SamplingFeatures,
) -> tuple[Memory, Sampled, jax.Array, jax.Array]:
    """The memory with what turned out right, the choices and final scores at each place of a block, [places, 1, …], and
    how many guesses were right."""

    def place(memory: Memory, given: tuple[jax.Array, jax.Array]) -> tuple[Memory, tuple[Sampled, jax.Array]]:
        raw, token = given
        memory, raw = memory.appended(token), raw.astype(jnp.float32)
        scores = final_scores(ruled(raw, memory, inputs, features, rules), inputs, features, rules)
        return memory, (chosen(raw, scores, inputs, memory.step, features), scores)

    _, (sampled, scores) = jax.lax.scan(place, memory, (logits.swapaxes(0, 1), block.T))
    right = jnp.cumprod(sampled.token[:-1, 0] == block[0, 1:]).sum(dtype=jnp.int32)
    memory = jax.lax.fori_loop(0, right + 1, lambda i, before: before.appended(block[:, i]), memory)
    return memory, sampled, scores, right
