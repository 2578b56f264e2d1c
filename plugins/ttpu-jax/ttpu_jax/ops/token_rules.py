"""Rules of transformers' `generate` for the next token that depend on the tokens so far: n-grams that do not repeat,
words that are never completed, tokens that end too early. All of it runs on the device, and new values never recompile.

The order is transformers' (`GenerationMixin._get_logits_processor`): biases of sequences, repetition penalty, n-grams,
bad words, early ends, the forced end, suppressed tokens; the caller's own processors; temperature and filters;
renormalization."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ttpu_jax.ops.sampling import (
    Sampled,
    SamplingFeatures,
    SamplingInputs,
    TokenCounts,
    filtered,
    first_highest,
    gumbel,
    inside,
    penalised,
    reported,
    update,
)
from ttpu_jax.ops.threshold import keep_top_k


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Words:
    """Sequences of tokens, and what is added to the score of the last token where the others were the last ones.

    before: int32 [words, longest], the tokens before the last, right-aligned; where it is -1, any token or none fits.
    last: int32 [words], -1 for a row that pads. bias: float32 [words]."""

    before: jax.Array
    last: jax.Array
    bias: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenRules:
    """The rules of one call. A part that is None costs nothing; `ngram` and `renormalize` are compiled in.

    biases, bad_words: before the penalties, and after them. never, never_first: bool [vocab], tokens that are never
    chosen, or not as the first. ends: bool [vocab], tokens that are not chosen while a row has fewer new ones than
    `fewest`, int32 [batch]. forced: bool [vocab], what is chosen as the last token, whose number is `last_step`, int32
    [batch]. typical: float32 scalar, the mass of typical tokens that are kept. ngram: the size of n-grams that do not
    repeat, 0 for none. renormalize: scores are log-probabilities in the end."""

    biases: Words | None = None
    bad_words: Words | None = None
    never: jax.Array | None = None
    never_first: jax.Array | None = None
    ends: jax.Array | None = None
    fewest: jax.Array | None = None
    forced: jax.Array | None = None
    last_step: jax.Array | None = None
    typical: jax.Array | None = None
    ngram: int = dataclasses.field(default=0, metadata={"static": True})
    renormalize: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def choose_nothing(self) -> bool:
        """Whether the tokens are the same without these rules."""
        return not self.ngram and not jax.tree.leaves(self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Memory:
    """The tokens so far.

    history: int32 [batch, slots], -1 at padding and at slots that are not used yet. length: int32 scalar, slots in use.
    step: int32 scalar, new tokens. counts: for penalties, else None."""

    history: jax.Array
    length: jax.Array
    step: jax.Array
    counts: TokenCounts | None

    def appended(self, tokens: jax.Array) -> Memory:
        """The memory with one more token of each row; `tokens`: int32 [batch]."""
        history = jax.lax.dynamic_update_slice(self.history, tokens[:, None], (jnp.int32(0), self.length))
        counts = None if self.counts is None else update(self.counts, tokens)
        return Memory(history, self.length + 1, self.step + 1, counts)

    def of_rows(self, rows: jax.Array) -> Memory:
        """The memory of a new batch whose row i was row `rows[i]`; `rows`: int32 [new batch]."""
        counts = jax.tree.map(lambda array: array[rows], self.counts)
        return Memory(self.history[rows], self.length, self.step, counts)

    def latest(self, number: int) -> jax.Array:
        """The last `number` tokens, int32 [batch, number], -1 where there are fewer."""
        slots = self.length - number + jnp.arange(number)
        return jnp.where(slots >= 0, self.history[:, jnp.maximum(slots, 0)], -1)


def ruled(
    scores: jax.Array,
    memory: Memory,
    inputs: SamplingInputs,
    features: SamplingFeatures,
    rules: TokenRules,
) -> jax.Array:
    """Scores after all rules that come before the caller's own processors.

    Args:
        scores: float32 [batch, vocab], logits, or log-probabilities of beams.
        memory: the tokens so far.
        inputs: penalties, [batch] each.
        features: whether there are penalties.
        rules: of the call.

    Returns:
        float32 [batch, vocab].
    """
    lowest = jnp.float32(-jnp.inf)
    if rules.biases is not None:
        scores = _with_words(scores, memory, rules.biases)
    if features.penalties:
        assert memory.counts is not None
        scores = penalised(scores, inputs, memory.counts)
    if rules.ngram:
        scores = jnp.where(_would_repeat(memory, rules.ngram, scores.shape[1]), lowest, scores)
    if rules.bad_words is not None:
        scores = _with_words(scores, memory, rules.bad_words)
    if rules.ends is not None and rules.fewest is not None:
        early = memory.step < rules.fewest
        scores = jnp.where(early[:, None] & rules.ends, lowest, scores)
    if rules.forced is not None and rules.last_step is not None:
        due = memory.step == rules.last_step
        scores = jnp.where(due[:, None], jnp.where(rules.forced, jnp.float32(0), lowest), scores)
    if rules.never is not None:
        scores = jnp.where(rules.never, lowest, scores)
    if rules.never_first is not None:
        scores = jnp.where(rules.never_first & (memory.step == 0), lowest, scores)
    return scores


def final_scores(
    scores: jax.Array, inputs: SamplingInputs, features: SamplingFeatures, rules: TokenRules, fewest: int = 1
) -> jax.Array:
    """Scores after temperature, filters and renormalization.

    Args:
        scores: float32 [batch, vocab].
        inputs: temperature and filters, [batch] each.
        features: whether tokens are drawn, and by which filters.
        rules: of the call.
        fewest: tokens that each filter keeps at least.

    Returns:
        float32 [batch, vocab].
    """
    if features.sample:
        greedy = jnp.zeros(scores.shape[0], jnp.bool_)
        kept = filtered(scores, inputs, greedy, features)
        if fewest > 1:
            likeliest = keep_top_k(scores, jnp.full(scores.shape[0], fewest, jnp.int32))
            kept = jnp.where(likeliest, scores / inputs.temperature[:, None], kept)
        if rules.typical is not None:
            kept = jnp.where(keep_typical(kept, rules.typical, fewest), kept, -jnp.inf)
        scores = kept
    return jax.nn.log_softmax(scores, axis=-1) if rules.renormalize else scores


def chosen(
    raw: jax.Array, scores: jax.Array, inputs: SamplingInputs, step: jax.Array, features: SamplingFeatures
) -> Sampled:
    """The next token of every row by its final scores, drawn with the noise of `ttpu_jax.ops.sampling.sample`.

    Args:
        raw: float32 [batch, vocab], the logits, for log-probabilities.
        scores: float32 [batch, vocab], after rules and filters.
        inputs: seeds, [batch] each.
        step: int32 scalar, the number of new tokens before this one.
        features: whether to draw, and what to report.

    Returns:
        Tokens; -1 for a row whose scores are not a valid distribution: NaN, or every token forbidden.
    """
    highest, token = first_highest(scores)
    broken = ~jnp.isfinite(highest)
    if features.sample:
        scores = jnp.where(broken[:, None], jnp.float32(0), scores)
        token = first_highest(scores + gumbel(inputs.seed, jnp.full(token.shape, step), scores.shape[1]))[1]
    return reported(raw, jnp.where(broken, -1, token), features)


def best_continuations(
    scores: jax.Array,
    running: jax.Array,
    number: int,
    inputs: SamplingInputs,
    step: jax.Array,
    features: SamplingFeatures,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The likeliest continuations of the beams of each prompt, or drawn ones without replacement.

    Args:
        scores: float32 [prompts * beams, vocab], final log-probabilities of the next token.
        running: float32 [prompts, beams], the sums of those of earlier tokens.
        number: continuations of each prompt.
        inputs: seeds, [prompts * beams].
        step: int32 scalar, the number of new tokens before this one.
        features: whether to draw.

    Returns:
        Sums float32, tokens int32 and beams int32, [prompts, number] each, in descending order of the sums, or in the
        order in which they were drawn.
    """
    prompts, beams = running.shape
    vocab = scores.shape[1]
    sums = (scores.reshape(prompts, beams, vocab) + running[:, :, None]).reshape(prompts, -1)
    if features.sample:
        noise = gumbel(inputs.seed, jnp.full(scores.shape[:1], step), vocab).reshape(prompts, -1)
        places = jax.lax.top_k(sums + noise, number)[1]
        values = jnp.take_along_axis(sums, places, axis=1)
    else:
        values, places = jax.lax.top_k(sums, number)
    return values, places % vocab, places // vocab


def keep_typical(scores: jax.Array, mass: jax.Array, fewest: int) -> jax.Array:
    """The locally typical tokens, whose information is nearest to the entropy (arXiv:2202.00666).

    Args:
        scores: float32 [batch, vocab].
        mass: float32 scalar, the probability that they have together.
        fewest: tokens that are kept at least.

    Returns:
        bool [batch, vocab], the complement of what transformers' TypicalLogitsWarper removes. Equally typical tokens
        are kept or removed together.
    """
    logprobs = jax.nn.log_softmax(scores, axis=-1)
    probabilities = jnp.exp(logprobs)
    entropy = -jnp.where(probabilities > 0, logprobs * probabilities, 0).sum(-1, keepdims=True)
    distance = jnp.abs(-logprobs - entropy)
    order = jnp.argsort(distance, axis=-1)
    below = jnp.cumsum(jnp.take_along_axis(probabilities, order, axis=-1), axis=-1) < mass
    last = jnp.maximum(jnp.minimum(below.sum(-1), scores.shape[-1] - 1), fewest - 1)
    farthest = jnp.take_along_axis(distance, jnp.take_along_axis(order, last[:, None], axis=-1), axis=-1)
    return distance <= farthest


def _with_words(scores: jax.Array, memory: Memory, words: Words) -> jax.Array:
    before = words.before[None]
    fits = ((memory.latest(before.shape[2])[:, None] == before) | (before < 0)).all(-1)
    rows = jnp.arange(scores.shape[0])[:, None]
    added = jnp.where(fits, words.bias, jnp.float32(0))
    return scores.at[rows, inside(words.last, scores.shape[1])[None]].add(added, mode="drop")


def _would_repeat(memory: Memory, size: int, vocab: int) -> jax.Array:
    """bool [batch, vocab], tokens that would complete an n-gram of this size that a row already has."""
    history = memory.history
    places = history.shape[1] - size + 1
    if places < 1:  # no row will be long enough for one
        return jnp.zeros((history.shape[0], vocab), jnp.bool_)
    prefix = memory.latest(size - 1)
    fits = jnp.ones((len(history), places), jnp.bool_)
    for index in range(size - 1):
        fits &= history[:, index : index + places] == prefix[:, index : index + 1]
    last = jnp.where(fits, history[:, size - 1 :], -1)
    rows = jnp.arange(history.shape[0])[:, None]
    return jnp.zeros((history.shape[0], vocab), jnp.bool_).at[rows, inside(last, vocab)].set(True, mode="drop")
