"""Our kernel for served steps in which sequences have many queries, in the interpreter, against the plain version over
the same pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_cases import (
    IN_SPLIT_PAGES,
    LATENTS,
    Ragged,
    assert_as_near_as_bfloat16,
    assert_split_pages_are_read,
    assert_two_devices_share_heads,
    kernel_and_reference,
    ragged,
    rounded_numbers,
    tpu_pages,
)

from ttpu_core.config import ModelConfig
from ttpu_core.registry import default_registry
from ttpu_core.spec import AttentionSpec
from ttpu_jax.ops.paged_attention import prompt_kernel
from ttpu_jax.ops.paged_attention.query_blocks import QueryBlocks
from ttpu_jax.runner.planned import served_kernels

PAGE = 16
GQA = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64)
WIDE = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=256)


def step(counts: list[int], lengths: list[int], window: int | None = None, tokens: int | None = None) -> Ragged:
    """A step with room for two more sequences, and for 11 more tokens."""
    return ragged(
        counts, lengths, page_size=PAGE, pages=10, sequences=len(lengths) + 2, tokens=tokens or sum(counts) + 11,
        window=window, max_queries=max(counts, default=16),
    )  # fmt: skip


PROMPTS = [1, 40, 1, 1, 37, 16, 1, 2], [9, 40, 61, PAGE, 150, 16, 5 * PAGE, 33]
"""Prompts that begin and end in the middle of blocks, whole or with tokens in the cache; and single queries."""
ALIGNED = [32, 16, 16], [32, 80, 16]
"""Prompts that end where blocks end."""
CASES = {
    "groups of query heads": (GQA, step(*PROMPTS)),
    "three heads of 256": (AttentionSpec(num_heads=6, num_kv_heads=3, head_dim=256), step(*PROMPTS)),
    "heads of 512, narrower values": (AttentionSpec(2, 1, 512, v_head_dim=320), step(*PROMPTS)),
    "window": (replace(WIDE, window=35), step(*PROMPTS, window=35)),
    "window of one page": (replace(GQA, window=PAGE), step(*PROMPTS, window=PAGE)),
    "chunk": (replace(GQA, chunk=2 * PAGE), step(*PROMPTS)),
    "sinks": (replace(GQA, sinks=True), step(*PROMPTS)),
    "sinks, softcap, scale and a window": (
        replace(WIDE, sinks=True, logit_softcap=3.0, scale=0.3, window=5),
        step(*PROMPTS, window=5),
    ),
    "latents": (LATENTS, step(*PROMPTS)),
    "whole blocks": (GQA, step(*ALIGNED, tokens=64)),
    "one prompt": (WIDE, step([100], [100])),
    "single queries alone": (GQA, step([1, 1, 1], [9, 61, 30])),
    "no sequence": (GQA, step([], [])),
}


def both(spec: AttentionSpec, case: Ragged, dtype: Any = jnp.float32, kind: str = "") -> tuple[np.ndarray, np.ndarray]:
    """The kernel's result and the reference's."""
    return kernel_and_reference(prompt_kernel.attend, spec, case, dtype, kind)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 32 queries, 16 of which are computed together, and of four pages, or two where no more are there."""
    monkeypatch.setattr(prompt_kernel, "BLOCK_ROWS", 32)
    monkeypatch.setattr(prompt_kernel, "INTERLEAVED", 16)
    monkeypatch.setattr(prompt_kernel, "BLOCK_KEYS", 4 * PAGE)
    monkeypatch.setattr(prompt_kernel, "WINDOW_KEYS", 2 * PAGE)


@pytest.mark.parametrize(("spec", "case"), CASES.values(), ids=CASES)
def test_the_kernel_equals_the_reference(spec: AttentionSpec, case: Ragged) -> None:
    found, wanted = both(spec, case)
    assert np.abs(found[: case.real] - wanted[: case.real]).max(initial=0) <= 1e-5
    assert not found[case.real :].any(), "padding tokens have zeros"


def test_heads_that_do_not_fit_one_block_are_computed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_kernel, "BLOCK_ROWS", 48)
    spec, case = replace(GQA, num_heads=8, sinks=True), step(*PROMPTS)
    found, wanted = both(spec, case)
    assert np.abs(found[: case.real] - wanted[: case.real]).max() <= 1e-5


@pytest.mark.parametrize("name", ["groups of query heads", "latents"])
def test_what_is_not_finite_stays_with_its_sequence(name: str) -> None:
    """An infinite value of a prompt, and of a sequence of one query, whose block others share."""
    spec, case = CASES[name]
    query, keys, values, _ = rounded_numbers(case, spec)
    kv = tpu_pages(case, spec, keys, values, jnp.float32, in_key=spec == LATENTS)
    table, pages = np.asarray(case.batch.tables[0]), np.array(kv.pages)
    for row in (1, 2):
        pages[table[row, 0], 0] = np.inf
    run = jax.jit(lambda x, kv, batch: prompt_kernel.attend(x, kv, batch, spec, "", interpret=True))
    clean, found = (
        np.asarray(run(jnp.asarray(query), each, case.batch)) for each in (kv, replace(kv, pages=jnp.asarray(pages)))
    )
    starts = np.asarray(case.batch.query_starts)
    for row in range(len(case.counts)):
        own = slice(starts[row], starts[row + 1])
        if row in (1, 2):
            assert not (np.abs(found[own]) < 1e30).all()
        else:
            np.testing.assert_array_equal(found[own], clean[own])


@pytest.mark.parametrize("name", ["window", "chunk", "one prompt", "single queries alone"])
def test_two_cores_take_turns(name: str) -> None:
    """Each begins with copies of its own."""
    spec, case = CASES[name]
    found, wanted = both(spec, case, kind="TPU v4")
    assert np.abs(found[: case.real] - wanted[: case.real]).max() <= 1e-5


def test_each_core_has_every_second_block() -> None:
    blocks = QueryBlocks.of("TPU v5", 100, 16)
    assert blocks.grid == (2, 4) and blocks.padding == 28
    assert [blocks.number(core, turn) for core in range(2) for turn in range(4)] == [0, 2, 4, 6, 1, 3, 5, 7]
    assert QueryBlocks.of("TPU v5", 16, 16).grid == QueryBlocks.of("TPU v5 lite", 16, 16).grid == (1, 1)


@pytest.mark.parametrize("name", ["three heads of 256", "sinks", "latents"])
def test_in_bfloat16_it_is_as_near_as_bfloat16_is(name: str) -> None:
    """Keys and values are then halves of one register."""
    assert_as_near_as_bfloat16(prompt_kernel.attend, *CASES[name])


@pytest.mark.parametrize("name", ["groups of query heads", "three heads of 256"])
def test_pages_of_8_bits_are_read_as_they_are(name: str) -> None:
    """Four rows of keys and values are then one register."""
    spec, case = CASES[name]
    found, wanted = both(spec, case, jnp.float8_e4m3fn)
    assert np.abs(found[: case.real] - wanted[: case.real]).max() <= 2**-6 * np.abs(wanted[: case.real]).max()


@pytest.mark.parametrize("name", IN_SPLIT_PAGES)
def test_split_pages_have_each_heads_tokens_together(name: str) -> None:
    assert_split_pages_are_read(prompt_kernel.attend, name, [1, 40, 37, 1, 16, 2], [9, 40, 150, 61, 16, 33])


def test_devices_share_wide_heads() -> None:
    assert_two_devices_share_heads(prompt_kernel.attend, AttentionSpec(4, 2, 256), step(*PROMPTS))


@pytest.mark.parametrize(
    ("kind", "heads", "group", "width", "sizes"),
    [
        ("TPU v5 lite", 1, 2, 256, (8, 256)),
        ("TPU v5 lite", 1, 16, 640, (8, 32)),
        ("TPU v5 lite", 8, 2, 256, (4, 128)),
        ("TPU v4", 8, 2, 256, (2, 64)),
        ("TPU v4", 1, 32, 640, (4, 16)),
    ],
)
def test_blocks_fit_the_memory_of_a_core(
    kind: str, heads: int, group: int, width: int, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    spec = AttentionSpec(heads * group, heads, width)
    case = ragged([64], [64], page_size=128, pages=64)
    kv = tpu_pages(case, spec, *rounded_numbers(case, spec)[1:3], jnp.bfloat16, in_key=width == 640)
    *found, taken = prompt_kernel._block_sizes(kv, spec, 64, (heads, group, width), width, 2048, kind)
    assert tuple(found) == sizes and taken <= (13 if kind == "TPU v4" else 26) * 2**20


def test_a_window_has_smaller_blocks_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    case = ragged([64], [64], page_size=128, pages=64)
    kv = tpu_pages(case, WIDE, *rounded_numbers(case, WIDE)[1:3], jnp.bfloat16)
    for window, pages in ((128, 4), (1023, 4), (1024, 8), (None, 8)):
        spec = replace(WIDE, window=window)
        assert prompt_kernel._block_sizes(kv, spec, 64, (1, 2, 256), 256, 2048, "")[0] == pages


def test_a_plan_names_what_serves_latents_in_each_kind_of_pages() -> None:
    """The same kernels in all of them, as they do other layers."""
    config = {
        "model_type": "deepseek_v2", "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 32,
        "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "vocab_size": 128,
    }  # fmt: skip
    spec = default_registry().architecture(ModelConfig.from_dict(config)).spec
    (words,) = served_kernels(spec).values()
    assert words == "paged_decode_attention for decode steps, paged_prompt_attention for others: the default on a TPU"
