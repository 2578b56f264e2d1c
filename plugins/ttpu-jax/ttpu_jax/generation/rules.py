"""Makes the device's form of the rules that `GenerationOptions` ask for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_core.generation.options import GenerationOptions
from ttpu_jax.ops.token_rules import TokenRules, Words


def token_rules(
    options: GenerationOptions,
    prompt_lengths: Sequence[int],
    limits: Sequence[int],
    stop_ids: frozenset[int],
    vocab: int,
) -> TokenRules:
    """Return the rules of one call.

    Args:
        options: of the call.
        prompt_lengths: tokens of the prompt of each row.
        limits: the most new tokens of each row.
        stop_ids: tokens that end a sequence.
        vocab: columns of the scores.
    """
    fewest = [options.fewest(length) for length in prompt_lengths]
    waits = bool(stop_ids) and any(fewest)
    forced = bool(options.forced_eos_token_id)
    bad = [word for word in options.bad_words_ids if not (len(word) == 1 and word[0] in stop_ids)]
    return TokenRules(
        biases=_words(options.sequence_bias),
        bad_words=_words([(word, -np.inf) for word in bad]),
        never=_marked(options.suppress_tokens, vocab),
        never_first=_marked(options.begin_suppress_tokens, vocab),
        ends=_marked(stop_ids, vocab) if waits else None,
        fewest=jnp.asarray(np.array(fewest, np.int32)) if waits else None,
        forced=_marked(options.forced_eos_token_id, vocab),
        last_step=jnp.asarray(np.array(limits, np.int32) - 1) if forced else None,
        typical=jnp.float32(options.typical_p) if options.do_sample and options.typical_p < 1 else None,
        ngram=options.no_repeat_ngram_size,
        renormalize=options.renormalize_logits,
    )


def _words(words: Sequence[tuple[tuple[int, ...], float]]) -> Words | None:
    """Words in arrays whose sizes are powers of two, so that few are ever compiled."""
    if not words:
        return None
    rows = 1 << (len(words) - 1).bit_length()
    longest = max(len(word) for word, _ in words) - 1
    columns = 0 if longest == 0 else 1 << (longest - 1).bit_length()
    before = np.full((rows, columns), -1, np.int32)
    last, bias = np.full(rows, -1, np.int32), np.zeros(rows, np.float32)
    for row, (word, value) in enumerate(words):
        before[row, columns - len(word) + 1 :] = word[:-1]
        last[row], bias[row] = word[-1], value
    return Words(jnp.asarray(before), jnp.asarray(last), jnp.asarray(bias))


def _marked(tokens: Iterable[int], vocab: int) -> jax.Array | None:
    tokens = list(tokens)
    if not tokens:
        return None
    marks = np.zeros(vocab, np.bool_)
    marks[tokens] = True
    return jnp.asarray(marks)
