"""In: the last position's logits `[batch, vocab]` and what each request asked for. Out: every row's next
token, with log-probabilities where wanted, computed on the device without a host round trip.

Which code is compiled depends on `SamplingFeatures` alone; every number a request sets is an array element,
so that new values never recompile. The order is transformers': repetition penalty, presence and frequency
penalties, temperature, top-k, top-p, min-p.
"""

import dataclasses
import numbers
import secrets
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_core.errors import RequestError
from ttpu_jax.ops.threshold import keep_min_p, keep_top_k, keep_top_p

MIN_TEMPERATURE = 1e-5
"""Below this temperature a request is greedy: its logits, divided by less, would leave float32's range."""

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_INT32_MAX = 2**31 - 1
_SEEDS = 2**32


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request wants its tokens chosen.

    temperature: 0 (or less than MIN_TEMPERATURE) is greedy. top_k: number of tokens, 0 is off. top_p, min_p:
    probabilities; 1 and 0 are off. repetition_penalty: 1 is off (Keskar et al. 2019, arXiv:1909.05858).
    presence_penalty, frequency_penalty: in logits, 0 is off, as OpenAI's API defines them.
    seed: None draws one from the operating system. logprobs: None for none, 0 for the chosen token's, n for
    the n likeliest tokens' as well. Raises RequestError for a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises RequestError, in one sentence, for the first value that is not a number or is out of
        range."""
        _check("temperature", self.temperature, "a finite number, 0 or more (0 is greedy)", low=0)
        _check("top_k", self.top_k, "a whole number, 0 or more (0 is off)", low=0, whole=True)
        _check("top_p", self.top_p, "above 0 and at most 1 (1 is off)", low=0, high=1, above=True)
        _check("min_p", self.min_p, "from 0 to 1 (0 is off)", low=0, high=1)
        _check("repetition_penalty", self.repetition_penalty, "above 0 (1 is off)", low=0, above=True)
        _check("presence_penalty", self.presence_penalty, "from -2 to 2 (0 is off)", low=-2, high=2)
        _check("frequency_penalty", self.frequency_penalty, "from -2 to 2 (0 is off)", low=-2, high=2)
        if self.seed is not None:
            allowed = "None or a whole number from 0 to 2**32 - 1"
            _check("seed", self.seed, allowed, low=0, high=_SEEDS - 1, whole=True)
        if self.logprobs is not None:
            _check("logprobs", self.logprobs, "None or a whole number, 0 or more", low=0, whole=True)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken every time."""
        return self.temperature < MIN_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens seen so far change the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def with_seed(self) -> "SamplingParams":
        """Itself if it has a seed, otherwise a copy with a fresh one from the operating system."""
        return self if self.seed is not None else dataclasses.replace(self, seed=secrets.randbelow(_SEEDS))


@dataclasses.dataclass(frozen=True)
class SamplingFeatures:
    """Which code `sample` compiles; hashable, to be a static argument.

    A feature that is off ignores what `SamplingInputs` says about it, so it must be on if any row needs it.
    One that is on and that a row does not need leaves that row's tokens as they are, bit for bit.
    logprobs: how many top log-probabilities; 0 for the chosen token's alone, -1 for none.
    """

    sample: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    penalties: bool = False
    logprobs: int = -1


def features_of(requests: Sequence[SamplingParams]) -> SamplingFeatures:
    """The least features that serve all of `requests`; a greedy request needs no filter."""
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
    """One value per row, all `[batch]`: float32, but top_k int32 and seed uint32."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array
    seed: jax.Array


def sampling_inputs(requests: Sequence[SamplingParams]) -> SamplingInputs:
    """`requests`, in row order, as device arrays.

    A request without a seed gets a fresh one at each call; `SamplingParams.with_seed` fixes it beforehand.
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
    """What the penalties need to know; only made when `SamplingFeatures.penalties` is on.

    prompt_seen: `[batch, vocab]` bool, the prompt has the token; output_counts: `[batch, vocab]` int32, how
    often it was generated.
    """

    prompt_seen: jax.Array
    output_counts: jax.Array


def empty_counts(batch: int, vocab: int) -> TokenCounts:
    """Counts of `batch` rows that have seen nothing yet."""
    return TokenCounts(jnp.zeros((batch, vocab), jnp.bool_), jnp.zeros((batch, vocab), jnp.int32))


def start_row(counts: TokenCounts, row: jax.Array | int, prompt: jax.Array) -> TokenCounts:
    """`counts` with `row` given to a new request, whose prompt is int32 `[length]`.

    Tokens below 0 or past the vocabulary are ignored: prompts padded with -1 to one length compile once.
    """
    vocab = counts.prompt_seen.shape[-1]
    seen = jnp.zeros((vocab,), jnp.bool_).at[_inside(prompt, vocab)].set(True, mode="drop")
    return TokenCounts(counts.prompt_seen.at[row].set(seen), counts.output_counts.at[row].set(0))


def update(counts: TokenCounts, tokens: jax.Array) -> TokenCounts:
    """`counts` after each row generated its token of `tokens`, int32 `[batch]`; those below 0 are ignored."""
    batch, vocab = counts.output_counts.shape
    added = counts.output_counts.at[jnp.arange(batch), _inside(tokens, vocab)].add(1, mode="drop")
    return TokenCounts(counts.prompt_seen, added)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogitRules:
    """What a row's request says of single tokens; only made when some row's does.

    bias_tokens, bias: int32 and float32 `[batch, n]`, what is added to a token's logit; tokens below 0 are ignored.
    allowed: uint32 `[batch, words]`, one bit per token, the lowest first; a token whose bit is 0 is never chosen.
    """

    bias_tokens: jax.Array
    bias: jax.Array
    allowed: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
    """What `sample` returns; what was not asked for is None.

    token: `[batch]` int32, -1 where the logits are no distribution; logprob: `[batch]` float32, of the token;
    top_tokens, top_logprobs: `[batch, n]` int32 and float32, likeliest first.
    """

    token: jax.Array
    logprob: jax.Array | None = None
    top_tokens: jax.Array | None = None
    top_logprobs: jax.Array | None = None


def sample(
    logits: jax.Array,
    inputs: SamplingInputs,
    counts: TokenCounts | None,
    step: jax.Array,
    features: SamplingFeatures,
    rules: LogitRules | None = None,
) -> Sampled:
    """The next token of every row.

    logits: `[batch, vocab]`, any float type, computed on in float32; step: `[batch]` int32, how many tokens
    the row's request has generated so far. A row's token depends on its own logits, inputs, counts and step.

    Greedy rows take the argmax of the penalised logits, the lowest index among equals. The others draw from
    the filtered distribution by the Gumbel-max trick (arXiv:1411.0030), with noise keyed by (seed, step).
    Log-probabilities are the log-softmax of the raw logits: before rules, penalties, temperature and filters. Rules
    come first: biases before the penalties, forbidden tokens after them.

    A row is no distribution if it holds NaN, or if its largest penalised logit is infinite (an overflow, or
    every token forbidden). Its token is -1 and its log-probability NaN, for the host to raise on.

    Raises ValueError, while tracing, if penalties are on without counts or more log-probabilities are asked
    for than the vocabulary has tokens.
    """
    vocab = logits.shape[-1]
    if features.logprobs > vocab:
        raise ValueError(f"logprobs is {features.logprobs}, but the vocabulary has {vocab} tokens: lower it")
    raw = logits.astype(jnp.float32)
    scores = raw if rules is None else _biased(raw, rules)
    if features.penalties:
        if counts is None:
            raise ValueError("penalties are on, but counts is None: pass empty_counts(batch, vocab)")
        scores = _penalised(scores, inputs, counts)
    if rules is not None:
        scores = jnp.where(_bits(rules.allowed, vocab), scores, -jnp.inf)

    highest, token = _first_highest(scores)
    broken = ~jnp.isfinite(highest)  # NaN is higher than every number
    if features.sample:
        scores = jnp.where(broken[:, None], jnp.float32(0), scores)  # no NaN in what follows
        greedy = inputs.temperature < MIN_TEMPERATURE
        drawn = _filtered(scores, inputs, greedy, features) + _gumbel(inputs.seed, step, vocab)
        token = jnp.where(greedy, token, _first_highest(drawn)[1])
    token = jnp.where(broken, -1, token)
    if features.logprobs < 0:
        return Sampled(token)

    logprobs = jax.nn.log_softmax(raw, axis=-1)
    chosen = jnp.take_along_axis(logprobs, jnp.maximum(token, 0)[:, None], axis=-1)[:, 0]
    chosen = jnp.where(broken, jnp.nan, chosen)
    if features.logprobs == 0:
        return Sampled(token, chosen)
    top_logprobs, top_tokens = jax.lax.top_k(logprobs, features.logprobs)
    return Sampled(token, chosen, top_tokens, top_logprobs)


def _biased(scores: jax.Array, rules: LogitRules) -> jax.Array:
    """Scores `[batch, vocab]` with each row's biases added."""
    rows = jnp.arange(scores.shape[0])[:, None]
    return scores.at[rows, _inside(rules.bias_tokens, scores.shape[1])].add(rules.bias, mode="drop")


def _bits(words: jax.Array, count: int) -> jax.Array:
    """bool `[batch, count]` of uint32 `[batch, words]`, the lowest bit of the first word first."""
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(words.shape[0], -1)[:, :count] != 0


def _penalised(scores: jax.Array, inputs: SamplingInputs, counts: TokenCounts) -> jax.Array:
    """Scores `[batch, vocab]` after the three penalties.

    Repetition as transformers' RepetitionPenaltyLogitsProcessor, over prompt and output; then OpenAI's
    formula, over the output alone: logit - count * frequency_penalty - (count > 0) * presence_penalty.
    """
    generated = counts.output_counts > 0
    repetition = inputs.repetition[:, None]
    repeated = jnp.where(scores < 0, scores * repetition, scores / repetition)
    scores = jnp.where(counts.prompt_seen | generated, repeated, scores)
    frequency = counts.output_counts.astype(jnp.float32) * inputs.frequency[:, None]
    return scores - frequency - jnp.where(generated, inputs.presence[:, None], jnp.float32(0))


def _filtered(
    scores: jax.Array,
    inputs: SamplingInputs,
    greedy: jax.Array,
    features: SamplingFeatures,
) -> jax.Array:
    """Scores `[batch, vocab]` divided by the temperature, and -inf where a filter removes the token."""
    removed = jnp.float32(-jnp.inf)
    scores = scores / jnp.where(greedy, jnp.float32(1), inputs.temperature)[:, None]
    if features.top_k:
        scores = jnp.where(keep_top_k(scores, inputs.top_k), scores, removed)
    if features.top_p:
        scores = jnp.where(keep_top_p(scores, inputs.top_p), scores, removed)
    if features.min_p:
        scores = jnp.where(keep_min_p(scores, inputs.min_p), scores, removed)
    return scores


def _gumbel(seed: jax.Array, step: jax.Array, vocab: int) -> jax.Array:
    """Standard Gumbel noise `[batch, vocab]` that depends on the row's seed and step alone.

    All 32 random bits count, from the rare end: jax.random.gumbel's 23 would never let a token win whose
    probability is much below 2**-23. The generator is named, since jax's default is the user's to change.
    """

    def row(seed: jax.Array, step: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step)
        return jax.random.bits(key, (vocab,), jnp.uint32)

    uniform = (jax.vmap(row)(seed, step).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    uniform = jnp.minimum(uniform, 1 - 2.0**-24)  # rounding may reach 1: log1p(-1) is -inf
    return -jnp.log(-jnp.log1p(-uniform))


def _first_highest(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each row's maximum `[batch]` and its lowest index `[batch]` int32; NaN counts as the maximum.

    One reduction gives both: over a vocabulary that is cut across devices, that is one exchange of a value and an index
    per row, where a maximum and a search for it are several all-reduces.
    """
    index = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)

    def higher(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        (x, i), (y, j) = a, b
        first = (x > y) | (x != x) | ((x == y) & (i < j))
        return jnp.where(first, x, y), jnp.where(first, i, j)

    empty = (jnp.float32(-jnp.inf), jnp.int32(0))
    highest, token = jax.lax.reduce((scores, index), empty, higher, (1,))
    return highest, token


def _inside(tokens: jax.Array, vocab: int) -> jax.Array:
    """Token ids with the negative ones moved past the vocabulary, where a scatter drops them."""
    return jnp.where(tokens < 0, vocab, tokens)


def _check(
    name: str,
    value: object,
    allowed: str,
    *,
    low: float,
    high: float = _FLOAT32_MAX,
    above: bool = False,
    whole: bool = False,
) -> None:
    """Raises RequestError unless `value` is a number in [low, high], or with `above` in (low, high]."""
    kind = numbers.Integral if whole else numbers.Real
    if isinstance(value, bool | np.bool_) or not isinstance(value, kind):
        raise RequestError(f"{name} is {value!r}, of type {type(value).__name__}: it must be {allowed}")
    number: float = value  # type: ignore[assignment]
    if not low <= number <= high or (above and number == low):  # NaN compares false
        raise RequestError(f"{name} is {value!r}: it must be {allowed}")
