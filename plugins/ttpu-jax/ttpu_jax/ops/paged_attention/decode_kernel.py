"""Attention of steps in which each sequence has one query or a few, to pages on one TPU, as a Pallas kernel. It reads
the pages that a sequence's queries see once, and no others: two blocks of pages are in VMEM, one of which is copied,
those of the next sequence too, while the other is computed."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ttpu_core.spec import AttentionSpec
from ttpu_core.spec.arithmetic import attention_flops
from ttpu_jax.ops.attention.blocks import TWO_CORES
from ttpu_jax.ops.attention.blockwise import Running, Weights, masked, scored
from ttpu_jax.ops.paged_attention.batch import PagedKV, RaggedBatch
from ttpu_jax.ops.paged_attention.copies import PageCopies
from ttpu_jax.ops.paged_attention.digits import WITHOUT_INTEGERS, Rows
from ttpu_jax.ops.paged_attention.kernel import LANES
from ttpu_jax.ops.paged_attention.layout import page_size_of, parts_of, widened
from ttpu_jax.ops.paged_attention.page_rows import BlockKeys, Reader, computed_dtype, read_by_kernels
from ttpu_jax.ops.paged_attention.pieces import Pieces, pieces_of, placed, singles_of

BLOCK_BYTES, BLOCK_TOKENS = 2**21, 1024
"""The most of the pages that are computed together, of all sequences; as much is copied meanwhile."""
TOGETHER = 4
"""Products that begin together, of a head of a sequence each: the results of one come long after it began."""
MOST_ROWS, MOST_SCORES = 256, 2**18
"""Of queries of sequences that are computed together, and of numbers in their scores: of more, products take long
enough by themselves, and VMEM would not hold what they give."""
MOST_DIGITS = 2**17
"""The most scores of one head whose shares become digits."""
FLOAT8_CYCLES = 3
"""That the kernel takes for 1,024 numbers of float8 pages, most of them to convert these: 3.4 on v5e, 2.9 on v6e, by
libtpu 0.0.42. As many transcendental operations are stated for each number. In the kernel for prompts products take
longer."""
QUERY_BYTES = 2**21
"""Of the queries of the sequences in one step of the grid."""
SUBLANES = 8
FEW = 4
"""Blocks of this part of a whole one are computed where a sequence ends."""


def attend(
    query: jax.Array,
    kv: PagedKV,
    batch: RaggedBatch,
    spec: AttentionSpec,
    kind: str,
    *,
    sinks: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention of one device's queries. The result is [tokens, kv_heads, q_per_kv, value_dim] in the query's dtype,
    with zeros for padding.

    Args:
        query: [tokens, kv_heads, q_per_kv, head_dim].
        kv: pages that `unserved_pages` accepts.
        batch: a step that `unserved_step` accepts.
        spec: the layer's attention.
        kind: the device kind.
        sinks: [kv_heads, q_per_kv] logits of attention sinks, or None.
        interpret: run the kernel in the interpreter.
    """
    tokens, heads, group, _ = query.shape
    pieces = pieces_of(spec, batch, kv.group)
    queries = widened_queries(query, kv, spec)
    most, sequences = batch.max_queries, len(pieces.lengths)
    run = partial(_attend, kv=kv, pieces=pieces, spec=spec, kind=kind, sinks=sinks, group=group, interpret=interpret)
    if most == 1:  # token i is the only one of piece i
        return run(queries)[..., : spec.value_dim].astype(query.dtype)
    place = jnp.minimum(pieces.starts[:-1, None] + jnp.arange(most), tokens - 1)
    rows = queries[place].swapaxes(1, 2).reshape(sequences, heads, most * group, -1)
    mixed = run(rows).reshape(sequences, heads, most, group, -1).swapaxes(1, 2)
    owner = jnp.clip(batch.rows, 0, sequences - 1)
    mixed = mixed[owner, jnp.clip(jnp.arange(tokens) - pieces.starts[owner], 0, most - 1)]
    real = (batch.positions >= 0)[:, None, None, None]
    return jnp.where(real, mixed[..., : spec.value_dim], 0).astype(query.dtype)


def attend_singles(
    query: jax.Array,
    kv: PagedKV,
    pieces: Pieces,
    spec: AttentionSpec,
    kind: str,
    *,
    sinks: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention of one device's queries of those pieces that have one, in any step. The result is [tokens, kv_heads,
    q_per_kv, value_dim] in the query's dtype, with zeros for the tokens of other pieces.

    Args:
        query: [tokens, kv_heads, q_per_kv, head_dim].
        kv: pages that `unserved_pages` accepts.
        pieces: of the batch.
        spec: the layer's attention.
        kind: the device kind.
        sinks: [kv_heads, q_per_kv] logits of attention sinks, or None.
        interpret: run the kernel in the interpreter.
    """
    tokens, heads, group, dim = query.shape
    singles, token = singles_of(pieces, tokens)
    # Head by head, as prompts' queries are read: a TPU would copy all of them to gather tokens.
    flat, first = query.transpose(1, 2, 0, 3).reshape(-1, dim), jnp.arange(heads * group)[:, None] * tokens
    rows = flat[first + jnp.minimum(token, tokens - 1)].reshape(heads, group, -1, dim).transpose(2, 0, 1, 3)
    found = _attend(
        widened_queries(rows, kv, spec), kv=kv, pieces=singles, spec=spec, kind=kind, sinks=sinks, group=group,
        interpret=interpret,
    )  # fmt: skip
    return placed(found[..., : spec.value_dim].astype(query.dtype), token, tokens)


def widened_queries(query: jax.Array, kv: PagedKV, spec: AttentionSpec) -> jax.Array:
    """query [..., head_dim] as it is multiplied: in the dtype of keys and as wide, [..., width]."""
    width = kv.pages.shape[-1] * parts_of(kv, max(query.shape[-1], spec.value_dim))
    return widened(query.astype(computed_dtype(kv.pages)), width)


def _attend(
    queries: jax.Array,
    *,
    kv: PagedKV,
    pieces: Pieces,
    spec: AttentionSpec,
    kind: str,
    sinks: jax.Array | None,
    group: int,
    interpret: bool,
) -> jax.Array:
    """queries [pieces, kv_heads, rows, width], where rows are `group` for each query of a piece; the result has their
    shape."""
    count, heads, rows, width = queries.shape
    sources, reader = read_by_kernels(kv, width, width, integers=kind not in WITHOUT_INTEGERS)
    steps = 2 if kind in TWO_CORES and count > 1 else 1
    steps = max(steps, -(-queries.nbytes // QUERY_BYTES))
    each = -(-count // steps)
    together = min(each, max(1, TOGETHER // heads), max(1, MOST_ROWS // rows))
    together = -(-each // -(-each // together))  # as many in each turn, or one fewer
    block = page_block(kv, pieces.table.shape[1], together, rows)
    each = -(-each // together) * together
    steps = -(-count // each)
    x = jnp.pad(queries, ((0, steps * each - count), (0, 0), (0, 0), (0, 0)))
    if not interpret:  # XLA would copy small pools to VMEM
        sources = tuple(pltpu.with_memory_space_constraint(source, pltpu.HBM) for source in sources)
    logits = jnp.full((heads, rows, 1), -jnp.inf, jnp.float32)
    if sinks is not None:
        logits = jnp.tile(sinks.astype(jnp.float32), (1, rows // group))[..., None]
    counts = jnp.diff(pieces.starts)
    of_queries = pl.BlockSpec((each, heads, rows, width), lambda step, *_: (step, 0, 0, 0))
    mixed: jax.Array = pl.pallas_call(
        partial(_kernel, reader, spec=spec, page_size=page_size_of(kv), group=group, kept_by_pages=len(sources)),
        out_shape=jax.ShapeDtypeStruct(x.shape, queries.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(steps,),
            in_specs=[
                of_queries,
                pl.BlockSpec(logits.shape, lambda step, *_: (0, 0, 0)),
                *[pl.BlockSpec(memory_space=pltpu.HBM) for _ in sources],
            ],
            out_specs=of_queries,
            scratch_shapes=[
                *[pltpu.VMEM((2 * together, block, *source.shape[1:]), source.dtype) for source in sources],
                pltpu.SemaphoreType.DMA((2 * together,)),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), disable_bounds_checks=True),
        cost_estimate=cost_of_singles(queries, kv, pieces, spec),
        interpret=interpret,
        name="paged_decode_attention",
    )(pieces.number, pieces.lengths, counts, pieces.table, x, logits, *sources)
    return mixed[:count]


def page_block(kv: PagedKV, pages: int, together: int, rows: int) -> int:
    """Pages of one block of a table of `pages` columns, where so many sequences are computed together, with `rows` of
    queries for each KV head."""
    page_bytes = kv.pages.nbytes // len(kv.pages) * together
    most = BLOCK_TOKENS if kv.scales is None else min(BLOCK_TOKENS, MOST_DIGITS // rows)
    return max(1, min(pages, BLOCK_BYTES // page_bytes, most // page_size_of(kv)))


def cost_of_singles(queries: jax.Array, kv: PagedKV, pieces: Pieces, spec: AttentionSpec) -> pl.CostEstimate:
    """What a kernel for queries [pieces, kv_heads, rows, width] has to do where each piece has as many tokens as its
    row of the table has room for, or all of them as many as there are pages. Lengths are not known while a program is
    compiled."""
    _, heads, rows, _ = queries.shape
    pages = min(pieces.table.size, len(kv.pages))
    pairs = pages * page_size_of(kv)
    page_bytes = sum(kept.nbytes // len(kept) for kept in jax.tree.leaves(kv))
    converted = FLOAT8_CYCLES * pages * kv.pages.nbytes // len(kv.pages) if kv.pages.dtype == jnp.float8_e4m3fn else 0
    return pl.CostEstimate(
        flops=int(attention_flops(heads * rows, spec, pairs)),
        bytes_accessed=pages * page_bytes + 2 * queries.nbytes,
        transcendentals=heads * rows * pairs + converted,
    )


def _kernel(
    reader: Reader,
    number: Any,
    lengths: Any,
    counts: Any,
    table: Any,
    queries: Any,
    sinks: Any,
    *others: Any,
    spec: AttentionSpec,
    page_size: int,
    group: int,
    kept_by_pages: int,
) -> None:
    """One step's sequences, some at a time. queries [pieces, kv_heads, rows, width], sinks [kv_heads, rows, 1]; then
    the sources in HBM, out of the shape of queries, two buffers of each source for each sequence, a semaphore for each
    buffer, and which of the two is next."""
    sources, (out, *others) = others[:kept_by_pages], others[kept_by_pages:]  # type: ignore[assignment]
    buffers, (ready, slots) = others[:kept_by_pages], others[kept_by_pages:]
    each, heads, rows, width = queries.shape
    together, page_block = buffers[0].shape[0] // 2, buffers[0].shape[1]
    keys = page_block * page_size
    copies = PageCopies(sources, buffers, ready, table)
    begin = pl.program_id(0) * each
    end = jnp.minimum(begin + each, number[0])

    def lengths_of(first: Any) -> list[tuple[Any, Any]]:
        """The numbers of the sequences from `first` on that are computed together, and their tokens."""
        wanted = [first + place for place in range(together)]
        found = [jnp.minimum(index, lengths.shape[0] - 1) for index in wanted]
        return [(index, jnp.where(one < end, lengths[index], 0)) for one, index in zip(wanted, found, strict=True)]

    def start_copies(first: Any, block: Any, slot: Any) -> None:
        for place, (index, length) in enumerate(lengths_of(first)):
            copies.start(index, block, pl.cdiv(length, page_size), slot * together + place)

    @pl.when(begin < end)
    def copy_first() -> None:
        slots[0] = 0
        start_copies(begin, 0, 0)

    out[...] = jnp.zeros(out.shape, out.dtype)

    def several(turn: Any, _: None) -> None:
        first = begin + turn * together
        sequences = lengths_of(first)
        longest = sequences[0][1]
        for _index, length in sequences[1:]:
            longest = jnp.maximum(longest, length)
        blocks = pl.cdiv(longest, keys)

        def block(number_of_block: Any, carry: Any) -> Any:
            slot, later = slots[0], number_of_block + 1 < blocks
            then = jnp.where(later, first, first + together)

            @pl.when(then < end)
            def copy_next() -> None:
                start_copies(then, jnp.where(later, number_of_block + 1, 0), 1 - slot)

            for place, (_index, length) in enumerate(sequences):
                copies.wait(number_of_block, pl.cdiv(length, page_size), slot * together + place)
            slots[0] = 1 - slot
            left, few = number_of_block * keys, max(1, page_block // FEW)
            sizes = [partial(attended, slot, left, n) for n in (few, page_block)]
            return jax.lax.cond(longest - left <= few * page_size, *sizes, carry)

        def attended(slot: Any, before: Any, n: int, carry: Any) -> Any:
            shape = (rows if rows > group else 1, n * page_size)
            lane = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
            readers = []
            for place, (index, length) in enumerate(sequences):
                last = left = length - before
                if rows > group:  # rows of a query see fewer keys than those of the last one
                    query = jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0) // group
                    last = left - (counts[index] - 1 - query)
                hidden = lane >= last
                if spec.window is not None:
                    hidden = hidden | (lane < last - spec.window)
                read = reader([buffer.at[slot * together + place, pl.ds(0, n)] for buffer in buffers], left)
                readers += [(place, head, read, hidden) for head in range(heads)]
            most = max(1, MOST_SCORES // (max(rows, SUBLANES) * n * page_size))
            states: list[Running] = []
            for beginning in range(0, len(readers), most):
                # Products begin in this order: those of all heads before the first one's next step.
                some, before = readers[beginning : beginning + most], carry[beginning : beginning + most]
                blocks = [read(head) for _, head, read, _ in some]
                scores = [
                    _scored(queries[first - begin + place, head], block, hidden, spec)
                    for (place, head, _, hidden), block in zip(some, blocks, strict=True)
                ]
                weights = [state.weighed(found) for state, found in zip(before, scores, strict=True)]
                states += map(_mixed, before, weights, blocks)
            return tuple(states)

        start = [Running.start(sinks[head], width) for _ in sequences for head in range(heads)]
        for number, state in enumerate(jax.lax.fori_loop(0, blocks, block, tuple(start))):
            place, head = divmod(number, heads)
            out[first - begin + place, head] = state.result().astype(out.dtype)

    jax.lax.fori_loop(0, pl.cdiv(jnp.maximum(end - begin, 0), together), several, None)


def _scored(query: jax.Array, block: BlockKeys, hidden: jax.Array, spec: AttentionSpec) -> jax.Array:
    """The scores of a block of keys, `scored`; int8 is multiplied as it is."""
    if block.key.dtype != jnp.int8 or block.scales is None:  # which int8 has
        return scored(query, block.key, hidden, spec, scale=None if block.scales is None else block.scales[0])
    products = Rows(query.astype(jnp.float32), 2).by_features(_parts(block.key))
    return masked(products, hidden, spec, block.scales[0])


def _mixed(state: Running, weights: Weights, block: BlockKeys) -> Running:
    """The state after a block of values; int8 is multiplied as it is."""
    if block.value.dtype != jnp.int8 or block.scales is None:
        return state.mixed_with(weights, block.value, scale=None if block.scales is None else block.scales[1])
    scale = block.scales[1]
    # Many small shares may matter beside a large one, so that they have three digits.
    shares = Rows(weights.shares * scale, 3, weights.most * scale.max(1, keepdims=True))
    return state.after(weights, shares.by_rows(_parts(block.value)))


def _parts(x: jax.Array) -> list[jax.Array]:
    """x [keys, width] in parts of 128 features."""
    return [x[:, first : first + LANES] for first in range(0, x.shape[1], LANES)]
