"""Ragged batches over scattered pages, and what attention over them must give: written with loops in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec
from ml_dtypes import bfloat16

from ttpu_core.spec import AttentionSpec, axes
from ttpu_jax.ops.paged_attention import NULL_PAGE, PagedKV, RaggedBatch, empty_pages, write
from ttpu_jax.ops.paged_attention.layout import Placement as Devices
from ttpu_jax.ops.paged_attention.reference import reference
from ttpu_jax.params.placement import Placement


@dataclass(frozen=True)
class Ragged:
    """One step: for each sequence its new tokens and its tokens with those."""

    counts: Sequence[int]
    lengths: Sequence[int]
    batch: RaggedBatch
    num_pages: int

    @property
    def tokens(self) -> int:
        return len(self.batch.positions)

    @property
    def real(self) -> int:
        return sum(self.counts)


def ragged(
    counts: Sequence[int],
    lengths: Sequence[int],
    *,
    page_size: int = 4,
    pages: int = 16,
    sequences: int | None = None,
    tokens: int | None = None,
    window: int | None = None,
    max_queries: int | None = None,
    max_prefills: int | None = None,
    seed: int = 0,
) -> Ragged:
    """A batch in which each sequence has that many new tokens and that many in all. Pages that lie wholly behind
    `window` for the oldest new token are given back."""
    rows, here = sequences or len(counts), len(counts)
    total = tokens or sum(counts)
    starts = np.full(rows + 1, sum(counts), np.int32)
    starts[:here] = np.cumsum([0, *counts])[:-1]
    kv_lens = np.zeros(rows, np.int32)
    kv_lens[:here] = lengths
    needed = [-(-length // page_size) for length in lengths]
    free = iter(np.random.default_rng(seed).permutation(sum(needed)) + 1)
    table = np.full((rows, pages), NULL_PAGE, np.int32)
    positions, owners, slots = np.full(total, -1, np.int32), np.zeros(total, np.int32), np.zeros(total, np.int32)
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        first = 0 if window is None else max(0, length - count - window + 1) // page_size
        for page in range(needed[row]):
            table[row, page] = next(free) if page >= first else NULL_PAGE
        for i in range(count):
            token, position = starts[row] + i, length - count + i
            positions[token], owners[token] = position, row
            slots[token] = table[row, position // page_size] * page_size + position % page_size
    batch = RaggedBatch(
        query_starts=starts,
        kv_lens=kv_lens,
        num_sequences=np.array([here], np.int32),
        positions=positions,
        lengths=np.maximum(positions + 1, 0),
        rows=owners,
        tables=(table,),
        slots=(slots,),
        states=np.zeros(rows, np.int32),
        max_queries=max_queries or max(counts),
        max_prefills=max_prefills or max(1, sum(count > 1 for count in counts)),
        page_size=page_size,
    )
    batch = jax.device_put(batch)  # jnp.asarray would compile a program for each shape, while tests are collected
    return Ragged(tuple(counts), tuple(lengths), batch, sum(needed) + 1)


def whole(case: Ragged) -> Ragged:
    """The batch that would have written every token that `case` can still see, in one step."""
    table = np.asarray(case.batch.tables[0])
    size = case.batch.page_size
    positions, owners, slots = [], [], []
    for row, length in enumerate(case.lengths):
        for position in range(length):
            positions.append(position)
            owners.append(row)
            slots.append(table[row, position // size] * size + position % size)
    starts = np.full(len(table) + 1, sum(case.lengths), np.int32)
    starts[: len(case.lengths)] = np.cumsum([0, *case.lengths])[:-1]
    batch = RaggedBatch(
        query_starts=jnp.asarray(starts),
        kv_lens=case.batch.kv_lens,
        num_sequences=case.batch.num_sequences,
        positions=jnp.asarray(positions, jnp.int32),
        lengths=jnp.asarray(positions, jnp.int32) + 1,
        rows=jnp.asarray(owners, jnp.int32),
        tables=case.batch.tables,
        slots=(jnp.asarray(slots, jnp.int32),),
        states=case.batch.states,
        max_queries=max(case.lengths),
        max_prefills=len(case.lengths),
        page_size=size,
    )
    return Ragged(case.lengths, case.lengths, batch, case.num_pages)


def oracle(
    counts: Sequence[int],
    lengths: Sequence[int],
    query: Any,
    keys: Any,
    values: Any,
    spec: AttentionSpec,
    sinks: Any = None,
) -> np.ndarray:
    """What sequences of that many new tokens, and tokens in all, mix: [new tokens, kv_heads, q_per_kv, value_dim] of
    query [tokens, kv_heads, q_per_kv, dim], with or without padding, and of the keys and values of all tokens of all
    sequences, [tokens, kv_heads, dim]."""
    query, keys, values = (np.asarray(x, np.float64) for x in (query[: sum(counts)], keys, values))
    mixed = np.zeros((*query.shape[:3], spec.value_dim))
    token, before = 0, 0
    slopes = spec.alibi.slopes(spec.num_heads) if spec.alibi else ()
    for count, length in zip(counts, lengths, strict=True):
        for position in range(length - count, length):
            first = 0
            if spec.window is not None:
                first = max(first, position - spec.window + 1)
            if spec.chunk is not None:
                first = max(first, position // spec.chunk * spec.chunk)
            seen = slice(before + first, before + position + 1)
            for head in range(spec.num_kv_heads):
                for member in range(spec.q_per_kv):
                    slope = 0.0 if spec.alibi is None else slopes[head * spec.q_per_kv + member]
                    scores = keys[seen, head] @ query[token, head, member] * spec.softmax_scale
                    scores = scores + alibi_bias(spec, slope, np.arange(first, position + 1))
                    if spec.logit_softcap is not None:
                        scores = np.tanh(scores / spec.logit_softcap) * spec.logit_softcap
                    weights = np.exp(scores - scores.max())
                    total = weights.sum()
                    if sinks is not None:
                        total += np.exp(float(sinks[head, member]) - scores.max())
                    mixed[token, head, member] = weights @ values[seen, head, : spec.value_dim] / total
            token += 1
        before += length
    return mixed


def alibi_bias(spec: AttentionSpec, slope: float, positions: np.ndarray) -> np.ndarray:
    """What ALiBi adds to the scaled scores of keys at these positions. Falcon multiplies in bfloat16, before the scale.
    """
    if spec.alibi is None:
        return np.zeros(len(positions))
    kind = bfloat16 if spec.alibi.bfloat16 else np.float64
    bias = (np.asarray(slope).astype(kind) * positions.astype(kind)).astype(np.float64)
    return bias * spec.softmax_scale if spec.alibi.scaled else bias


@dataclass(frozen=True)
class TpuPlacement(Placement):
    """Pages as on a TPU, on this machine's devices."""

    @property
    def platform(self) -> str:
        return "tpu"


def rounded_numbers(
    case: Ragged, spec: AttentionSpec
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Queries of the batch, keys and values of all tokens, sinks: numbers that bfloat16 has too."""
    rng = np.random.default_rng(0)
    heads, total = spec.num_kv_heads, sum(case.lengths)

    def normal(*shape: int) -> np.ndarray:
        return np.asarray(jnp.asarray(rng.standard_normal(shape, np.float32)).astype(jnp.bfloat16), np.float32)

    query = normal(case.tokens, heads, spec.q_per_kv, spec.head_dim)
    keys, values = normal(total, heads, spec.head_dim), normal(total, heads, spec.value_dim)
    return query, keys, values, normal(heads, spec.q_per_kv) + 2


def tpu_pages(
    case: Ragged,
    spec: AttentionSpec,
    keys: Any,
    values: Any,
    dtype: Any,
    placement: Devices | None = None,
    *,
    in_key: bool = False,
) -> PagedKV:
    """Pages as on a TPU, into which `write` has put all tokens. `in_key`: values are the first features of keys."""
    size = case.batch.page_size
    kv = empty_pages(spec, case.num_pages, size, placement or TpuPlacement(), dtype, value_in_key=in_key)
    if not case.lengths:
        return kv
    given = jnp.bfloat16 if dtype == jnp.int8 else dtype
    values = None if in_key else jnp.asarray(values, given)
    return jax.jit(write)(kv, jnp.asarray(keys, given), values, whole(case).batch)


def poisoned(kv: PagedKV, case: Ragged) -> PagedKV:
    """`kv` with NaN in what nobody owns, and behind each sequence's end, where a page's last owner left it. Integers
    have NaN as their scales."""
    pages, table = np.array(kv.pages, np.float32), np.asarray(case.batch.tables[0])
    size = case.batch.page_size
    if kv.scales is not None:
        scales, heads = np.array(kv.scales), kv.pages.shape[2]  # a head has 32 of keys, then of values, then others
        tiles = scales.reshape(*scales.shape[:2], heads, -1, 32)
        by_token = tiles.transpose(0, 1, 4, 2, 3).reshape(len(scales), size, heads, -1)
        by_token[NULL_PAGE], by_token[..., 1 if kv.value_in_key else 2 :] = np.nan, np.nan
        for row, length in enumerate(case.lengths):
            by_token[table[row, (length - 1) // size], (length - 1) % size + 1 :] = np.nan
        turned = by_token.reshape(*scales.shape[:2], 32, heads, -1).transpose(0, 1, 3, 4, 2).reshape(scales.shape)
        return replace(kv, scales=jnp.asarray(turned))
    pages[NULL_PAGE] = np.nan
    for row, length in enumerate(case.lengths):
        page, after = table[row, (length - 1) // size], (length - 1) % size + 1
        pages[(page, slice(after, None)) if kv.combined else (page, ..., slice(after, None), slice(None))] = np.nan
    return replace(kv, pages=jnp.asarray(pages, kv.pages.dtype))


LATENTS = AttentionSpec(num_heads=4, num_kv_heads=1, head_dim=320, v_head_dim=256, scale=0.1)
"""One key for all heads, whose first features are the value."""
_ONE = AttentionSpec(num_heads=4, num_kv_heads=1, head_dim=64)
_WINDOW = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=128, window=35, sinks=True)
_THREE = AttentionSpec(num_heads=6, num_kv_heads=3, head_dim=128, v_head_dim=96)
_WIDE = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=256, v_head_dim=192, chunk=64)
_FOUR = AttentionSpec(num_heads=4, num_kv_heads=4, head_dim=80, logit_softcap=3.0, scale=0.2)
IN_SPLIT_PAGES = {
    "one head": (_ONE, "float8_e4m3fn"),
    "one head, window and sinks": (_WINDOW, "float8_e4m3fn"),
    "three heads": (_THREE, "float8_e4m3fn"),
    "latents": (LATENTS, "float8_e4m3fn"),
    "int8, one head": (_ONE, "int8"),
    "int8, one head, window and sinks": (_WINDOW, "int8"),
    "int8, three heads": (_THREE, "int8"),
    "int8, latents": (LATENTS, "int8"),
    "int8, two heads of 256, chunks": (_WIDE, "int8"),
    "int8, four heads, softcap": (_FOUR, "int8"),
}
"""Layers whose pages are split in that dtype where they have a multiple of 32 tokens."""
Kernel = Callable[..., jax.Array]
"""`attend` of a kernel for pages without scales, or for split ones, run in the interpreter."""


def kernel_and_reference(
    kernel: Kernel, spec: AttentionSpec, case: Ragged, dtype: Any = jnp.float32, kind: str = ""
) -> tuple[np.ndarray, np.ndarray]:
    """The kernel's result and the reference's over pages in `dtype`; the kernel's have NaN in what nobody owns."""
    query, keys, values, sinks = rounded_numbers(case, spec)
    computed = jnp.bfloat16 if jnp.dtype(dtype).itemsize == 1 else dtype
    sink, x = jnp.asarray(sinks) if spec.sinks else None, jnp.asarray(query, computed)
    kv = tpu_pages(case, spec, keys, values, dtype, in_key=spec == LATENTS)
    run = jax.jit(lambda x, kv, batch: kernel(x, kv, batch, spec, kind, sinks=sink, interpret=True))
    found = run(x, poisoned(kv, case), case.batch)
    plain = jax.jit(lambda x, kv, batch: reference(x, kv, batch, spec, sinks=sink, platform="gpu"))
    wanted = plain(x, kv, case.batch)
    assert found.dtype == wanted.dtype == x.dtype
    return np.asarray(found, np.float32), np.asarray(wanted, np.float32)


def assert_split_pages_are_read(
    kernel: Kernel, name: str, counts: Sequence[int], lengths: Sequence[int], kind: str = "", page_size: int = 32
) -> None:
    """The kernel's result is the reference's over pages of 8 bits, which are split."""
    spec, dtype = IN_SPLIT_PAGES[name]
    case = ragged(
        counts, lengths, page_size=page_size, pages=-(-max(lengths) // page_size), sequences=len(counts) + 2,
        tokens=sum(counts) + 2, window=spec.window, max_queries=max(counts),
    )  # fmt: skip
    found, wanted = kernel_and_reference(kernel, spec, case, jnp.dtype(dtype), kind)
    assert np.abs(found[: case.real] - wanted[: case.real]).max() <= 2**-6 * np.abs(wanted[: case.real]).max()


def assert_as_near_as_bfloat16(kernel: Kernel, spec: AttentionSpec, case: Ragged) -> None:
    """In bfloat16 the kernel is about as far from the exact result as the reference is."""
    query, keys, values, sinks = rounded_numbers(case, spec)
    values = keys[..., : spec.value_dim] if spec == LATENTS else values
    exact = oracle(case.counts, case.lengths, query, keys, values, spec, sinks if spec.sinks else None)
    both = kernel_and_reference(kernel, spec, case, jnp.bfloat16)
    found, wanted = (np.abs(each[: case.real] - exact).max() for each in both)
    assert found <= 1.5 * wanted + 2**-9 * np.abs(exact).max()


def assert_two_devices_share_heads(kernel: Kernel, spec: AttentionSpec, case: Ragged) -> PagedKV:
    """Two devices, with half of the KV heads each, give the exact result. Returns their pages."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",), axis_types=(AxisType.Auto,))
    placement = TpuPlacement(mesh)
    query, keys, values, _ = rounded_numbers(case, spec)
    kv = tpu_pages(case, spec, keys, values, jnp.float32, placement)
    heads = placement.mesh_axes(axes.KV_HEADS, spec.num_kv_heads)
    of_heads = PartitionSpec(None, heads)
    run = jax.shard_map(
        lambda query, kv, batch: kernel(query, kv, batch, spec, "", interpret=True),
        mesh=mesh,
        in_specs=(of_heads, replace(kv, pages=PartitionSpec(None, None, heads)), PartitionSpec()),
        out_specs=of_heads,
        check_vma=False,
    )
    found = np.asarray(jax.jit(run)(jnp.asarray(query), kv, case.batch))
    exact = oracle(case.counts, case.lengths, query, keys, values, spec)
    assert np.abs(found[: case.real] - exact).max() <= 1e-5
    return kv
