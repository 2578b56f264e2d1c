"""How memory is shared out: what steps are left, and what each group of layers is given of the rest."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_cases import OPTIONS, Oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_cases import request
from tiny import llama_checkpoint

from ttpu import LLM, SamplingParams
from ttpu_core.checkpoint import open_config
from ttpu_core.errors import RequestError
from ttpu_core.registry import default_registry
from ttpu_core.sharding.strategy import DEFAULT_STRATEGY
from ttpu_jax.model.modules import Runtime, different_ropes
from ttpu_jax.model.paged import GroupSpec, PagedLayout
from ttpu_jax.ops.sampling import LogitRules, TokenCounts
from ttpu_jax.params.initialize import abstract_parameters
from ttpu_jax.params.padding import pad_for
from ttpu_jax.params.placement import Placement
from ttpu_jax.runner.buckets import buckets_for
from ttpu_jax.runner.build import filled, runner_for
from ttpu_jax.runner.memory import MARGIN, free_bytes, pages_per_group
from ttpu_jax.runner.reserve import STEPS_IN_FLIGHT, fitting_pages, reserved_bytes
from ttpu_jax.runner.sampler import BLOCK_ROWS, FIELDS, Level, SamplerState, column, empty_rules, sample_rows
from ttpu_serve.api.engine_config import NAMES, EngineConfig
from ttpu_serve.scheduling.block_table import PageGroup
from ttpu_serve.scheduling.scheduler import Scheduler, SchedulerConfig

pytestmark = pytest.mark.slow  # together they take long; the lane of the newest jax does without

PAGE, WINDOW, WHOLE = 128, 1024, 1024
ONE_WINDOW, STEP = WINDOW // PAGE + 1, 16


def layout(*spans: tuple[str | None, int]) -> PagedLayout:
    """Groups that keep everything, a window or a chunk."""
    groups = [
        GroupSpec(str(span), size if span == "window" else None, size if span == "chunk" else None, (index,))
        for index, (span, size) in enumerate(spans)
    ]
    return PagedLayout(tuple(groups), tuple(range(len(groups))), False)


def long_context(sequences: int) -> EngineConfig:
    """Sequences of up to 1,024 pages, 16 pages per step."""
    return EngineConfig(
        max_model_len=WHOLE * PAGE, max_num_seqs=sequences, max_num_batched_tokens=STEP * PAGE, page_size=PAGE
    )


HYBRID = layout((None, 0), ("window", WINDOW))


def test_one_sequence_needs_all_of_its_pages_in_full_groups_and_a_window_and_a_step_in_the_others() -> None:
    needed = (WHOLE + 1) + 5 * (ONE_WINDOW + STEP + 1)
    assert pages_per_group(long_context(1), HYBRID, (1, 5), needed) == (WHOLE + 1, ONE_WINDOW + STEP + 1)
    with pytest.raises(RequestError, match=f"set max_model_len to {(WHOLE - 1) * PAGE:,} or less"):
        pages_per_group(long_context(1), HYBRID, (1, 5), needed - 1)


def test_the_memory_that_is_missing_is_said_in_units_that_suit_it_and_by_its_name() -> None:
    few, each = replace(long_context(1), kv_cache_memory=10_737), layout((None, 0))
    with pytest.raises(RequestError, match=r"needs 2\.0 MiB .* but kv_cache_memory is 10\.5 KiB: raise it, set max_m"):
        pages_per_group(few, each, (2048,), 10_737)
    with pytest.raises(RequestError, match=r"needs 2\.0 MiB .* but 0 bytes are free: use more devices"):
        pages_per_group(long_context(1), each, (2048,), -5)


def test_long_sequences_have_most_of_the_memory_where_few_run() -> None:
    full, window = pages_per_group(long_context(17), HYBRID, (1, 5), 20_000)
    assert window - 1 == 17 * ONE_WINDOW + STEP
    assert full == 17 * WHOLE + 1


def test_many_short_sequences_have_windows_for_up_to_half_of_the_memory() -> None:
    full, window = pages_per_group(long_context(256), HYBRID, (1, 5), 20_000)
    assert 9_900 < 5 * window <= 10_000 <= full
    assert full + 5 * window <= 20_000
    assert (window - 1 - STEP) // ONE_WINDOW > 200  # run at once


def test_nothing_is_left_over_where_all_layers_keep_everything() -> None:
    assert pages_per_group(long_context(4), layout((None, 0)), (7,), 7 * 2_000 + 3) == (2_000,)
    assert pages_per_group(long_context(4), layout((None, 0)), (7,), 10**9) == (4 * WHOLE + 1,)


def test_windows_alone_take_what_all_sequences_need_and_no_more() -> None:
    assert pages_per_group(long_context(8), layout(("window", WINDOW)), (1,), 10**9) == (8 * ONE_WINDOW + STEP + 1,)


def test_a_number_of_pages_is_that_of_the_largest_group() -> None:
    config = EngineConfig(
        max_model_len=WHOLE * PAGE, max_num_seqs=2, max_num_batched_tokens=STEP * PAGE, page_size=PAGE, num_pages=500
    )
    assert pages_per_group(config, HYBRID, (), None) == (500, 2 * ONE_WINDOW + STEP + 1)


spans = st.one_of(
    st.just((None, 0)), st.tuples(st.sampled_from(["window", "chunk"]), st.integers(1, 200))
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(spans, st.integers(1, 9)), min_size=1, max_size=3),
    st.integers(1, 300),
    st.integers(1, 20),
    st.integers(0, 100),
    st.integers(1, 40),
    st.booleans(),
    st.integers(0, 30_000),
)
def test_pages_fit_and_a_request_of_the_longest_length_is_accepted(
    groups: list[tuple[tuple[str | None, int], int]],
    length: int,
    sequences: int,
    more: int,
    page: int,
    chunked: bool,
    free: int,
) -> None:
    groups.sort(key=lambda group: group[0][0] is not None)
    found, sizes = layout(*(span for span, _ in groups)), tuple(size for _, size in groups)
    step = sequences + more if chunked else max(sequences + more, length)
    config = EngineConfig(
        max_model_len=length, max_num_seqs=sequences, max_num_batched_tokens=step, page_size=page,
        enable_chunked_prefill=chunked,
    )  # fmt: skip
    try:
        pages = pages_per_group(config, found, sizes, free)
    except RequestError:
        whole = -(-length // page)
        assert sum((whole + 1) * size for size in sizes) > free  # windows need less, never more
        return
    assert sum(count * size for count, size in zip(pages, sizes, strict=True)) <= free
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=sequences, max_num_batched_tokens=step, max_model_len=length, page_size=page,
            enable_chunked_prefill=chunked,
        ),
        [
            PageGroup(str(index), count, group.window, group.chunk)
            for index, (group, count) in enumerate(zip(found.groups, pages, strict=True))
        ],
    )  # fmt: skip
    scheduler.add(request("longest", [1] * length, pooling="last"))


# rows of steps


@pytest.mark.parametrize("draft", [0, 4])
def test_a_mixed_step_has_as_many_rows_as_its_tokens_and_sequences_can_need(draft: int) -> None:
    buckets = buckets_for(256, 2048, draft=draft)
    for tokens in buckets.tokens:
        shape = buckets.step(tokens, min(tokens, 256), tokens)
        assert min(256 * (draft + 1), tokens) <= shape.rows <= 256 * (draft + 1)
    assert buckets.step(16, 2, 15).rows < 256
    others = {shape.rows for shape in buckets.all() if shape.max_queries <= draft + 1}
    assert {shape.rows for shape in buckets.all()} == others  # no sampler more


# samplers


def rows_for_sampling(rows: int, vocab: int = 70) -> tuple[np.ndarray, SamplerState, np.ndarray, LogitRules]:
    """Rows that ask for different things, with token counts and rules."""
    random = np.random.default_rng(rows)
    params = [
        SamplingParams(temperature=float(row % 3), top_k=row % 7, top_p=0.9, seed=row, presence_penalty=0.5)
        for row in range(rows)
    ]
    requests = np.stack([column(each, row) for row, each in enumerate(params)], axis=1)
    requests[FIELDS["step"]] = random.integers(0, 9, rows)
    seen, times = random.random((rows + 1, vocab)) < 0.3, random.integers(0, 3, (rows + 1, vocab), np.int32)
    state = SamplerState(np.zeros(rows + 1, np.int32), TokenCounts(seen, times))  # type: ignore[arg-type]
    tokens, biases, allowed = empty_rules(rows, vocab, 2)
    tokens[:, 0], biases[:, 0] = random.integers(0, vocab, rows), 5
    allowed[::5] &= 0x0F0F0F0F
    logits = random.standard_normal((rows, vocab)).astype(np.float32)
    return logits, state, requests, LogitRules(tokens, biases, allowed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "level"), [(2 * BLOCK_ROWS, Level.DRAW), (2 * BLOCK_ROWS + 5, Level.ALL)], ids=["whole", "part"]
)
def test_rows_that_are_sampled_in_blocks_are_bit_for_bit_those_that_are_sampled_at_once(
    rows: int, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, state, requests, rules = rows_for_sampling(rows)

    def run() -> Any:
        function = jax.jit(partial(sample_rows, level=level, max_logprobs=3))
        return jax.tree.map(np.asarray, function(logits, state, requests, rules if level is Level.ALL else None))

    in_blocks = run()
    monkeypatch.setattr("ttpu_jax.runner.sampler.BLOCK_ROWS", rows)
    jax.tree.map(np.testing.assert_array_equal, in_blocks, run())


def test_a_sampler_takes_no_more_memory_for_more_rows_than_a_block_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def temporaries(rows: int) -> int:
        logits, state, requests, rules = rows_for_sampling(rows, vocab=2000)
        function = partial(sample_rows, level=Level.ALL, max_logprobs=3)
        compiled = jax.jit(function, donate_argnums=1).lower(logits, state, requests, rules).compile()
        memory: Any = compiled.memory_analysis()
        return int(memory.temp_size_in_bytes)

    in_blocks = temporaries(4 * BLOCK_ROWS)
    monkeypatch.setattr("ttpu_jax.runner.sampler.BLOCK_ROWS", 4 * BLOCK_ROWS)
    assert in_blocks < temporaries(4 * BLOCK_ROWS) / 2


# what is reserved, and log-probabilities of prompts, of engines


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_checkpoint(tmp_path_factory.mktemp("memory") / "tiny")


def test_reserved_are_the_largest_temporaries_two_outputs_and_the_state_of_one_device(checkpoint: Path) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("tensor",))
    placement = Placement(mesh, DEFAULT_STRATEGY)
    spec, _ = pad_for(default_registry().architecture(open_config(checkpoint)).spec, placement)
    params = abstract_parameters(spec.parameters, placement, jnp.float32)
    options = {name: value for name, value in OPTIONS.items() if name in NAMES} | {"sampling_level": "all"}
    config, kind = filled(EngineConfig(**options), spec, "cpu"), np.dtype(np.float32)
    runtime = Runtime(placement, ropes=different_ropes(spec.layers))
    runner = runner_for(spec, runtime, params, config, kind)
    runner.num_pages = (9,)
    asked = []

    def temporaries(program: Any) -> int:
        asked.append(program.key)
        return 1_000_000 if program.key[0] == "sample" else 7

    found = reserved_bytes(runner, temporaries)
    assert runner.vocab % 2 == 0
    vocab = runner.vocab // 2  # on each device
    logits, stream, slots = 4 * vocab * 4, 32 * runner.spec.hidden_size * 4, 5
    assert found == 1_000_000 + STEPS_IN_FLIGHT * (logits + stream) + slots * vocab * 5 + slots * 4
    assert [key[0] for key in asked] == ["step", "sample"] and asked[1][1:] == (4, Level.ALL)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 1, "max_num_batched_tokens": 1, "sequence_buckets": (1,), "token_buckets": (1,)},
        {"max_num_seqs": 5, "max_num_batched_tokens": 32, "sequence_buckets": (5,), "speculative": "ngram:4"},
    ],
    ids=["one token at a time", "five times five drafts"],
)
def test_prompt_logprobs_are_the_models_own_for_any_number_of_tokens_per_step(
    checkpoint: Path, options: dict[str, Any]
) -> None:
    prompt = np.random.default_rng(3).integers(0, 255, 24).tolist()
    settings = OPTIONS | options | {"prompt_logprobs": True}
    with LLM(checkpoint, **settings) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
        (answer,) = llm.generate([prompt], params)
    logits = Oracle(checkpoint).logits(prompt)
    expected = np.asarray(jax.nn.log_softmax(logits, axis=-1))[np.arange(23), prompt[1:]]
    first, *others = answer.prompt_logprobs or []
    assert first is None
    found = [(each or {})[token].logprob for each, token in zip(others, prompt[1:], strict=True)]
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_pages_take_the_share_of_the_free_memory_that_was_asked_for(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Chip:
        platform = "tpu"

        def memory_stats(self) -> dict[str, int]:
            return {"bytes_limit": 3000 + MARGIN, "bytes_in_use": 900}

    monkeypatch.setattr("ttpu_jax.runner.memory._host_free", lambda: 40_000)
    chip: Any = Chip()
    assert [free_bytes(chip, 100, share) for share in (None, 0.5)] == [2000, 1000]
    assert [free_bytes(jax.devices()[0], 0, share) for share in (None, 0.5)] == [10_000, 20_000]

    placement = Placement(None, DEFAULT_STRATEGY)
    spec, _ = pad_for(default_registry().architecture(open_config(checkpoint)).spec, placement)
    params = abstract_parameters(spec.parameters, placement, jnp.float32)
    options = {name: value for name, value in OPTIONS.items() if name in NAMES and name != "num_pages"}
    pool: Any = None  # compiles nothing on a CPU
    counts = []
    for share in (0.5, 0.75):
        config = filled(EngineConfig(**options, memory_utilization=share), spec, "cpu")
        runtime = Runtime(placement, ropes=different_ropes(spec.layers))
        counts.append(fitting_pages(runner_for(spec, runtime, params, config, np.dtype(np.float32)), pool, [2000]))
    assert counts == [(10,), (15,)]
