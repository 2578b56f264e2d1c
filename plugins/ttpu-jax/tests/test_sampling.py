"""What sampling promises: transformers' filters and penalties, the right distribution, tokens that depend on
their own request alone, and no silent answer from broken logits."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ttpu_core.errors import RequestError
from ttpu_core.generation.token_choice import TokenChoice
from ttpu_jax.ops import sampling
from ttpu_jax.ops.sampling import Sampled, SamplingFeatures
from ttpu_jax.ops.threshold import (
    keep_min_p,
    keep_top_k,
    keep_top_k_by_sort,
    keep_top_p,
    keep_top_p_by_sort,
    ordered_bits,
)

INF = math.inf
jitted = jax.jit(sampling.sample, static_argnames="features")
top_k_mask, top_p_mask, min_p_mask = jax.jit(keep_top_k), jax.jit(keep_top_p), jax.jit(keep_min_p)


def random_logits(batch: int, vocab: int, seed: int = 0, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(batch, vocab)) * spread).astype(np.float32)


def run(
    logits: np.ndarray | jax.Array,
    requests: Sequence[TokenChoice],
    step: int | np.ndarray = 0,
    counts: sampling.TokenCounts | None = None,
    features: SamplingFeatures | None = None,
) -> Sampled:
    steps = jnp.broadcast_to(jnp.asarray(step, jnp.int32), (len(requests),))
    features = features or sampling.features_of(requests)
    return jitted(jnp.asarray(logits), sampling.sampling_inputs(requests), counts, steps, features=features)


def counts_of(prompts: Sequence[Sequence[int]], vocab: int) -> sampling.TokenCounts:
    """Counts of rows that have their prompts, and no token of an output yet."""
    seen = np.zeros((len(prompts), vocab), np.bool_)
    for row, prompt in enumerate(prompts):
        seen[row, list(prompt)] = True
    return sampling.TokenCounts(jnp.asarray(seen), jnp.zeros(seen.shape, jnp.int32))


# Thresholds


def test_ordered_bits_order_floats_as_numbers() -> None:
    values = np.array([-INF, -3e38, -1.0, -1e-30, -0.0, 0.0, 1e-30, 1.0, 3e38, INF], np.float32)
    bits = np.asarray(ordered_bits(jnp.asarray(values))).astype(np.int64)
    assert bits[4] == bits[5]
    assert (np.diff(np.delete(bits, 4)) > 0).all()


@pytest.mark.parametrize("vocab", [1, 2, 100, 5000])
def test_top_k_equals_sorting(vocab: int) -> None:
    for spread, rounded in ((3.0, False), (3.0, True), (1e30, False), (0.0, False)):
        scores = random_logits(9, vocab, spread=spread)
        scores = np.round(scores) if rounded else scores  # many ties, and both zeros
        scores[3, : vocab // 2] = -INF
        scores[4] = -np.abs(scores[4])
        k = np.array([0, 1, 2, 3, 5, 50, vocab, vocab + 1, 2**31 - 1], np.int32)
        kept = top_k_mask(jnp.asarray(scores), jnp.asarray(k))
        np.testing.assert_array_equal(kept, keep_top_k_by_sort(scores, k))


@pytest.mark.parametrize("vocab", [1, 2, 100, 5000])
def test_top_p_equals_sorting(vocab: int) -> None:
    for spread, rounded in ((3.0, False), (3.0, True), (0.01, False), (1e30, False), (0.0, False)):
        scores = random_logits(8, vocab, spread=spread)
        scores = np.round(scores) if rounded else scores
        scores[3, : vocab // 2] = -INF
        p = np.array([1e-45, 0.01, 0.3, 0.5003, 0.9, 0.95, 0.999, 1.0], np.float32)
        kept = top_p_mask(jnp.asarray(scores), jnp.asarray(p))
        np.testing.assert_array_equal(kept, keep_top_p_by_sort(scores, p))


@pytest.mark.parametrize(
    ("p", "kept"),
    [(1e-300, 1), (0.25, 1), (0.5, 1), (0.500001, 5), (0.75, 5), (0.999, 5), (1.0, 6)],
)
def test_top_p_cuts_at_the_exact_mass_and_keeps_ties_together(p: float, kept: int) -> None:
    probabilities = np.array([[0.125, 0.125, 0.5, 0.125, 0.125, 0.0]], np.float32)
    with np.errstate(divide="ignore"):
        scores = np.log(probabilities)
    assert int(top_p_mask(jnp.asarray(scores), jnp.asarray([p], jnp.float32)).sum()) == kept


def test_top_p_sums_do_not_overflow_in_a_flat_vocabulary_of_600_thousand() -> None:
    vocab = 600_000
    scores = np.zeros((1, vocab), np.float32)
    scores[0, : vocab // 2] = -1e-3
    kept = top_p_mask(jnp.asarray(scores), jnp.asarray([0.5], jnp.float32))
    assert int(kept.sum()) == vocab // 2


@pytest.mark.torch
@pytest.mark.parametrize("vocab", [7, 1000])
def test_filters_equal_those_of_transformers(vocab: int) -> None:
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    for seed in range(4):
        scores = random_logits(3, vocab, seed)
        scores[0, : vocab // 3] = -INF
        tied = np.round(scores)
        wide = torch.tensor(scores, dtype=torch.float64)
        one = jnp.ones((3,))
        for k in (1, 3, 50, vocab + 1):
            theirs = process.TopKLogitsWarper(k)(None, torch.tensor(tied)).numpy()
            ours = top_k_mask(jnp.asarray(tied), (one * k).astype(jnp.int32))
            np.testing.assert_array_equal(np.where(ours, tied, -INF), theirs)
        for p in (0.01, 0.2, 0.5, 0.9, 0.99, 1.0):
            theirs = process.TopPLogitsWarper(p)(None, wide).float().numpy()
            ours = top_p_mask(jnp.asarray(scores), one * p)
            np.testing.assert_array_equal(np.where(ours, scores, -INF), theirs)
            # Among ties transformers keeps a part; ours holds that part and no other value.
            wide_tied = torch.tensor(tied, dtype=torch.float64)
            theirs = process.TopPLogitsWarper(p)(None, wide_tied).float().numpy()
            lowest = np.where(np.isfinite(theirs), theirs, INF).min(axis=-1, keepdims=True)
            ours = top_p_mask(jnp.asarray(tied), one * p)
            expected = np.isfinite(tied) & (tied >= lowest)
            np.testing.assert_array_equal(ours & np.isfinite(tied), expected)
        for p in (0.0, 0.02, 0.3, 1.0):
            theirs = process.MinPLogitsWarper(p)(None, torch.tensor(scores)).numpy()
            ours = min_p_mask(jnp.asarray(scores), one * p)
            np.testing.assert_array_equal(np.where(ours, scores, -INF), theirs)


# The whole chain


@pytest.mark.torch
def test_the_chain_of_penalty_temperature_and_filters_equals_that_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    vocab, prompt, output = 400, [3, 5, 5, 399], [7, 5, 7]
    request = TokenChoice(temperature=0.7, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.3, seed=1)
    logits = random_logits(1, vocab)
    theirs = torch.tensor(logits)
    for warper in (
        process.RepetitionPenaltyLogitsProcessor(1.3),
        process.TemperatureLogitsWarper(0.7),
        process.TopKLogitsWarper(40),
        process.TopPLogitsWarper(0.9),
        process.MinPLogitsWarper(0.02),
    ):
        theirs = warper(torch.tensor([prompt + output]), theirs)
    counts = counts_of([prompt], vocab)
    for token in output:
        counts = sampling.update(counts, jnp.asarray([token]))
    inputs, features = sampling.sampling_inputs([request]), sampling.features_of([request])
    penalised = sampling.penalised(jnp.asarray(logits), inputs, counts)
    ours = sampling.filtered(penalised, inputs, jnp.asarray([False]), features)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6)


def test_presence_and_frequency_count_output_tokens_only() -> None:
    logits = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)
    request = TokenChoice(presence_penalty=0.5, frequency_penalty=0.25)
    counts = counts_of([[0, 1]], 4)
    for token in (2, 2, 3, -1, 9):
        counts = sampling.update(counts, jnp.asarray([token]))
    penalised = sampling.penalised(jnp.asarray(logits), sampling.sampling_inputs([request]), counts)
    np.testing.assert_array_equal(penalised, [[1.0, 2.0, 3.0 - 2 * 0.25 - 0.5, 4.0 - 0.25 - 0.5]])


def test_penalties_change_the_greedy_choice() -> None:
    logits = np.array([[1.0, 2.0, 1.9]], np.float32)
    request = TokenChoice(repetition_penalty=1.5)
    counts = counts_of([[1]], 3)
    assert run(logits, [request], counts=counts).token.tolist() == [2]
    with pytest.raises(ValueError, match="counts is None"):
        run(logits, [request])


def test_greedy_takes_the_lowest_index_among_equals_even_beside_sampling_rows() -> None:
    logits = np.array([[0.0, 5.0, 5.0, -1.0]] * 3, np.float32)
    assert run(logits, [TokenChoice()] * 3).token.tolist() == [1, 1, 1]
    requests = [TokenChoice(), TokenChoice(temperature=9.0, seed=3), TokenChoice(temperature=1e-6)]
    for step in range(5):
        tokens = run(logits, requests, step).token.tolist()
        assert (tokens[0], tokens[2]) == (1, 1)


# The distribution


@functools.cache
def chi_square_limit(freedom: int) -> float:
    """The value that a chi-square variable passes once in 1e5 (Wilson and Hilferty's approximation)."""
    return freedom * (1 - 2 / (9 * freedom) + 4.265 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize(
    "request_",
    [
        TokenChoice(temperature=1.0, seed=0),
        TokenChoice(temperature=0.5, seed=0),
        TokenChoice(temperature=2.0, top_k=6, seed=0),
        TokenChoice(temperature=1.0, top_p=0.8, seed=0),
        TokenChoice(temperature=1.0, min_p=0.1, seed=0),
    ],
    ids=["plain", "cold", "top_k", "top_p", "min_p"],
)
def test_frequencies_match_probabilities(request_: TokenChoice) -> None:
    assert_frequencies(request_, "seed")


def test_frequencies_over_the_steps_of_a_request_match_probabilities() -> None:
    assert_frequencies(TokenChoice(temperature=1.0, seed=0), "step")


def assert_frequencies(request_: TokenChoice, vary: str) -> None:
    """Tokens drawn with many seeds, or at many steps, are as frequent as they are probable."""
    draws, vocab = 20_000, 12
    logits = random_logits(1, vocab, seed=5, spread=1.0)
    scaled = logits.astype(np.float64)[0] / request_.temperature
    keep = keep_top_k_by_sort(scaled[None], np.array([request_.top_k]))[0]
    keep &= keep_top_p_by_sort(scaled[None], np.array([request_.top_p]))[0]
    keep &= np.exp(scaled - scaled.max()) >= request_.min_p
    probabilities = np.where(keep, np.exp(scaled), 0) / np.exp(scaled[keep]).sum()

    one = sampling.sampling_inputs([request_])
    inputs = jax.tree.map(lambda value: jnp.broadcast_to(value, (draws,)), one)
    index = jnp.arange(draws)
    if vary == "seed":
        inputs = dataclasses.replace(inputs, seed=index.astype(jnp.uint32))
    steps = index if vary == "step" else jnp.zeros_like(index)
    many = jnp.broadcast_to(jnp.asarray(logits), (draws, vocab))
    sampled = jitted(many, inputs, None, steps, features=sampling.features_of([request_]))
    observed = np.bincount(np.asarray(sampled.token), minlength=vocab)

    assert observed[~keep].sum() == 0
    expected = draws * probabilities[keep]
    chi_square = ((observed[keep] - expected) ** 2 / expected).sum()
    assert chi_square < chi_square_limit(int(keep.sum()) - 1)


def test_gumbel_noise_is_finite_and_reaches_the_rare_end() -> None:
    seeds = jnp.arange(8, dtype=jnp.uint32)
    noise = np.asarray(sampling.gumbel(seeds, jnp.zeros((8,), jnp.int32), 1 << 17))
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - 0.577216) < 5 * 1.2825 / math.sqrt(noise.size)  # Euler's constant, pi / sqrt(6)


# Each request by itself


def mixed_requests() -> list[TokenChoice]:
    return [
        TokenChoice(temperature=1.0, seed=1),
        TokenChoice(temperature=0.8, top_k=20, seed=2),
        TokenChoice(temperature=1.2, top_p=0.9, seed=3),
        TokenChoice(),
        TokenChoice(temperature=1.0, min_p=0.05, seed=4),
        TokenChoice(temperature=1.5, top_k=100, top_p=0.7, min_p=0.01, seed=2**32 - 1),
        TokenChoice(temperature=0.9, repetition_penalty=1.2, presence_penalty=0.3, seed=6),
    ]


def test_a_row_is_the_same_bit_for_bit_alone_and_in_any_batch() -> None:
    requests = mixed_requests()
    logits = random_logits(len(requests), 1500, seed=2)
    counts = sampling.update(counts_of([[]] * len(requests), 1500), jnp.arange(len(requests)))
    for step in (0, 1, 77):
        together = run(logits, requests, step, counts).token.tolist()
        backwards = jax.tree.map(lambda array: array[::-1], counts)
        assert run(logits[::-1], requests[::-1], step, backwards).token.tolist() == together[::-1]
        for row, request in enumerate(requests):
            own = jax.tree.map(lambda array, row=row: array[row : row + 1], counts)
            features = sampling.features_of([request])  # fewer features than the batch compiled
            alone = run(logits[row : row + 1], [request], step, own, features)
            assert alone.token.tolist() == [together[row]]


def test_noise_and_filters_are_bitwise_equal_across_batch_sizes() -> None:
    scores = random_logits(5, 3001)
    seeds, steps = jnp.arange(5, dtype=jnp.uint32), jnp.arange(5)
    p = jnp.asarray([0.1, 0.5, 0.9, 0.99, 0.9999])
    noise = jax.jit(sampling.gumbel, static_argnums=2)
    top_p = jax.jit(keep_top_p)
    for row in range(5):
        one = slice(row, row + 1)
        np.testing.assert_array_equal(noise(seeds[one], steps[one], 3001), noise(seeds, steps, 3001)[one])
        np.testing.assert_array_equal(top_p(scores[one], p[one]), top_p(scores, p)[one])


def test_seeds_and_steps_give_different_tokens_and_the_same_seed_the_same() -> None:
    logits = np.zeros((1, 1000), np.float32)
    request = TokenChoice(temperature=1.0, seed=5)
    by_step = [int(run(logits, [request], step).token[0]) for step in range(8)]
    assert by_step == [int(run(logits, [request], step).token[0]) for step in range(8)]
    by_seed = [int(run(logits, [dataclasses.replace(request, seed=seed)]).token[0]) for seed in range(8)]
    assert len(set(by_step)) >= 6
    assert len(set(by_seed)) >= 6


def test_an_unseeded_request_draws_a_seed_once() -> None:
    request = TokenChoice(temperature=1.0).with_seed()
    assert request.seed is not None
    assert request.with_seed() is request
    assert int(sampling.sampling_inputs([request]).seed[0]) == request.seed


def test_new_values_do_not_recompile() -> None:
    compiled = []

    @functools.partial(jax.jit, static_argnames="features")
    def step_once(
        logits: jax.Array, inputs: sampling.SamplingInputs, steps: jax.Array, features: SamplingFeatures
    ) -> Sampled:
        compiled.append(features)  # a trace's side effect, once for each compilation
        return sampling.sample(logits, inputs, None, steps, features)

    features = sampling.features_of(mixed_requests()[:6])
    logits, steps = jnp.asarray(random_logits(2, 64)), jnp.zeros((2,), jnp.int32)
    for first in mixed_requests()[:6]:
        inputs = sampling.sampling_inputs([first, TokenChoice(temperature=0.3, top_k=7)])
        step_once(logits, inputs, steps, features=features)
    assert compiled == [features]


# What is reported


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = random_logits(2, 50)
    requests = [
        TokenChoice(temperature=0.5, top_k=3, seed=1, logprobs=4),
        TokenChoice(repetition_penalty=2.0),
    ]
    counts = counts_of([[], [1, 2]], 50)
    sampled = run(logits, requests, counts=counts)
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=-1, keepdims=True))
    chosen = np.asarray(sampled.token)[:, None]
    assert sampled.logprob is not None and sampled.top_tokens is not None
    np.testing.assert_allclose(sampled.logprob, np.take_along_axis(expected, chosen, 1)[:, 0], rtol=1e-5)
    np.testing.assert_array_equal(sampled.top_tokens, np.argsort(-expected, axis=-1)[:, :4])
    assert sampled.top_logprobs is not None
    np.testing.assert_allclose(sampled.top_logprobs, -np.sort(-expected, axis=-1)[:, :4], rtol=1e-5)


def test_only_the_logprobs_asked_for_are_returned() -> None:
    logits = random_logits(1, 50)
    assert run(logits, [TokenChoice()]).logprob is None
    chosen_only = run(logits, [TokenChoice(logprobs=0)])
    assert chosen_only.logprob is not None and chosen_only.top_tokens is None
    with pytest.raises(ValueError, match="51, but the vocabulary has 50"):
        run(logits, [TokenChoice(logprobs=51)])


@pytest.mark.parametrize(
    "request_",
    [TokenChoice(), TokenChoice(temperature=1.0, top_p=0.9, top_k=5, seed=0)],
)
def test_rows_that_are_no_distribution_give_minus_one_alone(request_: TokenChoice) -> None:
    logits = random_logits(5, 50)
    requests = [dataclasses.replace(request_, logprobs=0)] * 5
    sound = run(logits, requests).token.tolist()
    logits[1, 7], logits[2, 7], logits[3] = np.nan, INF, -INF
    logits[4, np.arange(50) != sound[4]] = -INF
    sampled = run(logits, requests)
    assert sampled.token.tolist() == [sound[0], -1, -1, -1, sound[4]]
    assert sampled.logprob is not None
    assert np.isnan(sampled.logprob).tolist() == [False, True, True, True, False]


def test_bfloat16_logits_are_computed_on_in_float32() -> None:
    logits = jnp.asarray(random_logits(1, 50), jnp.bfloat16)
    requests = [TokenChoice(temperature=1.0, seed=0, logprobs=0)]
    narrow, wide = run(logits, requests), run(logits.astype(jnp.float32), requests)
    assert narrow.logprob is not None and narrow.logprob.dtype == jnp.float32
    assert (narrow.token, narrow.logprob) == (wide.token, wide.logprob)


# What a request may say


def test_features_are_the_least_that_serve_all_requests() -> None:
    assert sampling.features_of([]) == SamplingFeatures()
    assert sampling.features_of([TokenChoice(top_k=5, top_p=0.5, min_p=0.1)]) == SamplingFeatures()
    assert sampling.features_of(mixed_requests()) == SamplingFeatures(True, True, True, True, True, -1)
    requests = [TokenChoice(temperature=1.0, logprobs=0), TokenChoice(top_k=5, logprobs=3)]
    assert sampling.features_of(requests) == SamplingFeatures(sample=True, logprobs=3)
    assert hash(sampling.features_of(requests)) == hash(SamplingFeatures(sample=True, logprobs=3))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-0.1, math.nan, INF, 1e39, "1", None, True, 10**400, 1j]),
        ("top_k", [-1, 1.0, math.nan, True, "3", None]),
        ("top_p", [0.0, -0.1, 1.01, math.nan, INF, False, "1"]),
        ("min_p", [-0.01, 1.01, math.nan, False]),
        ("repetition_penalty", [0, 0.0, -1.0, INF, math.nan, True]),
        ("presence_penalty", [-2.01, 2.01, math.nan, True, None]),
        ("frequency_penalty", [-2.01, 2.01, -INF, True, None]),
        ("seed", [-1, 2**32, 1.5, True, "7"]),
        ("logprobs", [-1, 2.0, True]),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RequestError, match=f"^{name} is .*must be"):
            TokenChoice(**{name: value})


def test_values_at_the_ends_of_the_ranges_are_accepted() -> None:
    TokenChoice(temperature=0, top_k=0, top_p=1, min_p=1, presence_penalty=-2, frequency_penalty=2, seed=0)
    request = TokenChoice(temperature=2.0, top_k=10**12, seed=2**32 - 1, logprobs=0)
    assert int(sampling.sampling_inputs([request]).top_k[0]) == 2**31 - 1
