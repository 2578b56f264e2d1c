"""Sampling on the device: the next token of every row from the last position's logits `[batch, vocab]` and the
requests' parameters, with log-probabilities if requested, without a host round trip.

Only `SamplingFeatures` determines the compiled code. Every number that a request sets is an array element, so that
new values never recompile. The order is transformers': repetition penalty, presence and frequency penalties,
temperature, top-k, top-p, min-p."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_core.generation.token_choice import MIN_TEMPERATURE, TokenChoice
from ttpu_jax.ops.parts import Part, part
from ttpu_jax.ops.threshold import keep_min_p, keep_top_k, keep_top_p

_INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class SamplingFeatures:
    """Which code `sample` compiles. Hashable, for use as a static argument.

    A feature that is off ignores its values in `SamplingInputs`, so it must be on if any row needs it. A feature
    that is on does not change rows that do not need it, bit for bit. `logprobs` is the number of top
    log-probabilities: 0 for the chosen token only, -1 for none."""

    sample: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    penalties: bool = False
    logprobs: int = -1


def features_of(requests: Sequence[TokenChoice]) -> SamplingFeatures:
    """The smallest set of features that serves all `requests`. A greedy request needs no filter."""
    sampled = [request for request in requests if not request.is_greedy]
    return SamplingFeatures(
        sample=bool(sampled),
        top_k=any(request.top_k > 0 for request in sampled),
        top_p=any(request.top_p < 1 for request in sampled),
        min_p=any(request.min_p > 0 for request in sampled),
        penalties=any(request.has_penalties for request in requests),
        logprobs=max((-1 if r.logprobs is None else r.logprobs for r in requests), default=-1),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingInputs:
    """One value per row. All arrays are [batch]: top_k is int32, seed is uint32, the others are float32."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array
    seed: jax.Array


def sampling_inputs(requests: Sequence[TokenChoice]) -> SamplingInputs:
    """`requests`, in row order, as device arrays.

    A request without a seed gets a fresh one at each call; `TokenChoice.with_seed` fixes it beforehand.
    """
    seeded = [request.with_seed() for request in requests]

    def floats(name: str) -> jax.Array:
        return jnp.asarray(np.array([getattr(r, name) for r in seeded], np.float32))

    return SamplingInputs(
        temperature=jnp.asarray(np.array([0 if r.is_greedy else r.temperature for r in seeded], np.float32)),
        top_k=jnp.asarray(np.array([min(r.top_k, _INT32_MAX) for r in seeded], np.int32)),
        top_p=floats("top_p"),
        min_p=floats("min_p"),
        repetition=floats("repetition_penalty"),
        presence=floats("presence_penalty"),
        frequency=floats("frequency_penalty"),
        seed=jnp.asarray(np.array([r.seed for r in seeded], np.uint32)),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenCounts:
    """Token statistics for the penalties, needed only if `SamplingFeatures.penalties` is on.

    prompt_seen: [batch, vocab] bool, whether the prompt contains the token. output_counts: [batch, vocab] int32, how
    often the token was generated."""

    prompt_seen: jax.Array
    output_counts: jax.Array


def update(counts: TokenCounts, tokens: jax.Array) -> TokenCounts:
    """`counts` after each row generated its token of `tokens`: int32 [batch]. Tokens below 0 are ignored."""
    batch, vocab = counts.output_counts.shape
    added = counts.output_counts.at[jnp.arange(batch), inside(tokens, vocab)].add(1, mode="drop")
    return TokenCounts(counts.prompt_seen, added)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogitRules:
    """Rules for single tokens, needed only if some row has any.

    bias_tokens: int32 [batch, n], tokens below 0 are ignored. bias: float32 [batch, n], added to the tokens' logits.
    allowed: uint32 [batch, words], one bit per token, the lowest first; a token whose bit is 0 is never chosen."""

    bias_tokens: jax.Array
    bias: jax.Array
    allowed: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
    """The result of `sample`. Values that were not requested are None.

    token: [batch] int32, -1 if the logits are not a valid distribution. logprob: [batch] float32, of the token.
    top_tokens and top_logprobs: [batch, n] int32 and float32, likeliest first."""

    token: jax.Array
    logprob: jax.Array | None = None
    top_tokens: jax.Array | None = None
    top_logprobs: jax.Array | None = None


@part(Part.SAMPLING)
def sample(
    logits: jax.Array,
    inputs: SamplingInputs,
    counts: TokenCounts | None,
    step: jax.Array,
    features: SamplingFeatures,
    rules: LogitRules | None = None,
) -> Sampled:
    """The next token of every row. A row's token depends only on its own logits, inputs, counts and step.

    Greedy rows take the argmax of the penalised logits, the lowest index among equals. Other rows draw from the
    filtered distribution by the Gumbel-max trick (arXiv:1411.0030), with noise keyed by (seed, step).
    Log-probabilities are the log-softmax of the raw logits: before rules, penalties, temperature and filters. Biases
    are added before the penalties; forbidden tokens are removed after them.

    A row is not a valid distribution if it holds NaN, or if its largest penalised logit is infinite (an overflow, or
    every token forbidden). Its token is -1 and its log-probability NaN, so that the host can raise an error.

    Args:
        logits: [batch, vocab], any float dtype; computed in float32.
        inputs: the requests' numbers.
        counts: the tokens so far, for penalties.
        step: [batch] int32, the number of tokens that the row's request has generated so far.
        features: which code to compile.
        rules: biases and forbidden tokens.

    Raises:
        ValueError: (while tracing) penalties are on without counts, or more log-probabilities are requested than the
            vocabulary has tokens.
    """
    vocab = logits.shape[-1]
    if features.logprobs > vocab:
        raise ValueError(f"logprobs is {features.logprobs}, but the vocabulary has {vocab} tokens: lower it")
    raw = logits.astype(jnp.float32)
    scores = raw if rules is None else _biased(raw, rules)
    if features.penalties:
        if counts is None:
            raise ValueError("penalties are on, but counts is None: pass TokenCounts of the rows' tokens")
        scores = penalised(scores, inputs, counts)
    if rules is not None:
        scores = jnp.where(_bits(rules.allowed, vocab), scores, -jnp.inf)

    highest, token = first_highest(scores)
    broken = ~jnp.isfinite(highest)  # NaN counts as the highest value
    if features.sample:
        scores = jnp.where(broken[:, None], jnp.float32(0), scores)  # no NaN in what follows
        greedy = inputs.temperature < MIN_TEMPERATURE
        drawn = filtered(scores, inputs, greedy, features) + gumbel(inputs.seed, step, vocab)
        token = jnp.where(greedy, token, first_highest(drawn)[1])
    return reported(raw, jnp.where(broken, -1, token), features)


def reported(raw: jax.Array, token: jax.Array, features: SamplingFeatures) -> Sampled:
    """The chosen tokens with the log-probabilities that were requested.

    Args:
        raw: float32 [batch, vocab], the logits.
        token: int32 [batch], -1 for a row that is not a valid distribution.
        features: `logprobs` says how many.
    """
    if features.logprobs < 0:
        return Sampled(token)
    logprobs = jax.nn.log_softmax(raw, axis=-1)
    chosen = jnp.take_along_axis(logprobs, jnp.maximum(token, 0)[:, None], axis=-1)[:, 0]
    chosen = jnp.where(token < 0, jnp.nan, chosen)
    if features.logprobs == 0:
        return Sampled(token, chosen)
    top_logprobs, top_tokens = jax.lax.top_k(logprobs, features.logprobs)
    return Sampled(token, chosen, top_tokens, top_logprobs)


def _biased(scores: jax.Array, rules: LogitRules) -> jax.Array:
    """Scores `[batch, vocab]` with each row's biases added."""
    rows = jnp.arange(scores.shape[0])[:, None]
    return scores.at[rows, inside(rules.bias_tokens, scores.shape[1])].add(rules.bias, mode="drop")


def _bits(words: jax.Array, count: int) -> jax.Array:
    """bool `[batch, count]` from uint32 `[batch, words]`, the lowest bit of the first word first."""
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(words.shape[0], -1)[:, :count] != 0


def penalised(scores: jax.Array, inputs: SamplingInputs, counts: TokenCounts) -> jax.Array:
    """`scores`, float32 [batch, vocab], after the three penalties; the result has the same shape.

    Repetition follows transformers' RepetitionPenaltyLogitsProcessor, over prompt and output. The others follow
    OpenAI's formula, over the output only: logit - count * frequency_penalty - (count > 0) * presence_penalty."""
    generated = counts.output_counts > 0
    repetition = inputs.repetition[:, None]
    repeated = jnp.where(scores < 0, scores * repetition, scores / repetition)
    scores = jnp.where(counts.prompt_seen | generated, repeated, scores)
    frequency = counts.output_counts.astype(jnp.float32) * inputs.frequency[:, None]
    return scores - frequency - jnp.where(generated, inputs.presence[:, None], jnp.float32(0))


def filtered(
    scores: jax.Array,
    inputs: SamplingInputs,
    greedy: jax.Array,
    features: SamplingFeatures,
) -> jax.Array:
    """`scores`, float32 [batch, vocab], divided by the temperature, and -inf for tokens that a filter removes, in the
    same shape. Rows where `greedy`, bool [batch], is true have the temperature 1."""
    removed = jnp.float32(-jnp.inf)
    scores = scores / jnp.where(greedy, jnp.float32(1), inputs.temperature)[:, None]
    if features.top_k:
        scores = jnp.where(keep_top_k(scores, inputs.top_k), scores, removed)
    if features.top_p:
        scores = jnp.where(keep_top_p(scores, inputs.top_p), scores, removed)
    if features.min_p:
        scores = jnp.where(keep_min_p(scores, inputs.min_p), scores, removed)
    return scores


def gumbel(seed: jax.Array, step: jax.Array, vocab: int) -> jax.Array:
    """Standard Gumbel noise [batch, vocab] that depends only on a row's seed, uint32 [batch], and step, int32 [batch].

    All 32 random bits count towards the rare end: with jax.random.gumbel's 23 bits, a token whose probability is
    much below 2**-23 could never win. The generator is named, since users may change jax's default."""

    def row(seed: jax.Array, step: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step)
        return jax.random.bits(key, (vocab,), jnp.uint32)

    uniform = (jax.vmap(row)(seed, step).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    uniform = jnp.minimum(uniform, 1 - 2.0**-24)  # rounding may reach 1: log1p(-1) is -inf
    return -jnp.log(-jnp.log1p(-uniform))


def first_highest(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each row's maximum [batch] of scores [batch, vocab], and its lowest index, int32 [batch]. NaN counts as the
    maximum.

    One reduction gives both: over a vocabulary that is sharded across devices, it exchanges one value and one index
    per row, where a maximum and a search for it take several all-reduces."""
    index = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)

    def higher(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        (x, i), (y, j) = a, b
        first = (x > y) | (x != x) | ((x == y) & (i < j))
        return jnp.where(first, x, y), jnp.where(first, i, j)

    empty = (jnp.float32(-jnp.inf), jnp.int32(0))
    highest, token = jax.lax.reduce((scores, index), empty, higher, (1,))
    return highest, token


def inside(tokens: jax.Array, vocab: int) -> jax.Array:
    """`tokens`, of any shape, with negative ones beyond the vocabulary, where a scatter drops them; the result has
    the same shape."""
    return jnp.where(tokens < 0, vocab, tokens)
