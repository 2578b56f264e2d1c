"""Attention over int8 pages on one TPU, as two Pallas kernels: one for sequences with a single query, one for blocks of
queries. Both read the pages that a sequence has, and the scales of their tokens, once.

Pages are paired (`layout`): four neighbouring rows of 128 numbers are the keys and values of two heads for one token,
and the scales of a page lie in the same order. Four int8 rows are one row of 32-bit registers, so that the rows of a
pair of heads are loaded without being separated. With a single query per sequence they never are: the queries of both
heads are multiplied by all rows, and a mask keeps the scores of each head's own keys. Moved by one column, their
probabilities meet the values. For blocks of queries, which would multiply four times as much, keys and values are
separated and converted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ttpu_core.spec import AttentionSpec
from ttpu_jax.ops.attention.reference import MASKED
from ttpu_jax.ops.paged_attention.batch import PagedKV, RaggedBatch
from ttpu_jax.ops.paged_attention.copies import PageCopies
from ttpu_jax.ops.paged_attention.decode_kernel import cost_of_singles
from ttpu_jax.ops.paged_attention.digits import Rows
from ttpu_jax.ops.paged_attention.int8_blocks import LANES, PAIR, SUBLANES, Int8Blocks, int8_blocks
from ttpu_jax.ops.paged_attention.page_rows import BlockKeys
from ttpu_jax.ops.paged_attention.pieces import Pieces, pieces_of, placed, singles_of
from ttpu_jax.ops.paged_attention.prompt_kernel import attend_blocks
from ttpu_jax.ops.paged_attention.query_blocks import QueryBlocks

FEW = 4  # blocks of this part of a whole one are computed for short sequences


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
    """Attention of one device's queries. The result is [tokens, kv_heads, q_per_kv, value_dim] in the query's dtype.

    Args:
        query: [tokens, kv_heads, q_per_kv, head_dim].
        kv: paired pages.
        batch: the flat batch.
        spec: the layer's attention.
        kind: the device kind that selects block sizes.
        sinks: [kv_heads, q_per_kv] logits of attention sinks, or None.
        interpret: run the kernels in the interpreter.
    """
    assert kv.scales is not None
    tokens, _, group, dim = query.shape
    page_rows = batch.page_size * PAIR // LANES
    pairs = kv.scales.shape[1] // page_rows
    halves = kv.pages.shape[2] // (PAIR * pairs)
    pieces = pieces_of(spec, batch, kv.group)
    blocks = int8_blocks(
        kind,
        group=group,
        pairs=pairs,
        halves=halves,
        page_size=batch.page_size,
        pages=pieces.table.shape[1],
        tokens=tokens,
        sequences=len(pieces.lengths),
    )
    queries = jnp.pad(query, ((0, 0), (0, 0), (0, 0), (0, halves * LANES - dim)))
    logits = jnp.full((2 * pairs, group), -jnp.inf, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    run = partial(_attend_single, kv=kv, spec=spec, blocks=blocks, sinks=logits, interpret=interpret)
    if batch.max_queries == 1 and tokens == len(pieces.lengths):  # token i is the only one of piece i
        return run(queries, pieces)[..., : spec.value_dim]  # padding has zeros already
    singles, token = singles_of(pieces, tokens)
    mixed = placed(run(queries[jnp.minimum(token, tokens - 1)], singles), token, tokens)
    if batch.max_queries > 1:
        mixed += attend_blocks(
            queries, (kv.pages, kv.scales), partial(_read, pairs=pairs, dtype=queries.dtype), pieces, spec,
            QueryBlocks.of(kind, tokens, blocks.block_queries), batch.page_size, blocks.block_pages,
            value_features=halves * LANES, sinks=logits, interpret=interpret, name="int8_paged_prompt_attention",
        )  # fmt: skip
    return mixed[..., : spec.value_dim]


def _attend_single(
    queries: jax.Array,
    pieces: Pieces,
    *,
    kv: PagedKV,
    spec: AttentionSpec,
    blocks: Int8Blocks,
    sinks: jax.Array,
    interpret: bool,
) -> jax.Array:
    """Attention of pieces with one query each, queries [pieces, kv_heads, q_per_kv, width]; the result has their
    shape, with zeros for absent pieces."""
    assert kv.scales is not None
    rows, heads, group, width = queries.shape
    pairs, page_size = heads // 2, kv.pages.shape[1]
    block = blocks.single_queries
    more = -2 * group % SUBLANES
    x = queries.reshape(rows, pairs, 2 * group, width)
    x = jnp.pad(x, ((0, -rows % block), (0, 0), (0, more), (0, 0)))
    logits = jnp.pad(sinks.reshape(pairs, 2 * group, 1), ((0, 0), (0, more), (0, 0)), constant_values=-jnp.inf)
    of_queries = pl.BlockSpec((block, *x.shape[1:]), lambda i, *_: (i, 0, 0, 0))
    mixed: jax.Array = pl.pallas_call(
        partial(_single, group=group, digits=blocks.digits, spec=spec, page_size=page_size),
        out_shape=jax.ShapeDtypeStruct(x.shape, queries.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(len(x) // block,),
            in_specs=[
                of_queries,
                pl.BlockSpec(logits.shape, lambda i, *_: (0, 0, 0)),
                pl.BlockSpec(memory_space=pltpu.HBM),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=of_queries,
            scratch_shapes=[
                pltpu.VMEM((2, blocks.single_pages, *kv.pages.shape[1:]), jnp.int8),
                pltpu.VMEM((2, blocks.single_pages, *kv.scales.shape[1:]), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=cost_of_singles(queries, kv, pieces, spec),
        interpret=interpret,
        name="int8_paged_attention_single",
    )(pieces.number, pieces.lengths, pieces.table, x, logits, kv.pages, kv.scales)
    return mixed[:rows, :, : 2 * group].reshape(queries.shape)


def _words(buffer: Any, word: int, words: int, dtype: Any) -> jax.Array:
    """Row `word` of each token's `words` rows of 32 bits: [tokens, 128] as int32, [4 * tokens, 128] as int8."""
    pages, size, rows, lanes = buffer.shape
    flat = buffer.reshape(pages * size * rows, lanes).bitcast(jnp.uint32)
    taken = flat[...] if words == 1 else flat[word::words, :]
    return pltpu.bitcast(taken, dtype)


def _scales(buffer: Any, pair: int, count: int) -> list[jax.Array]:
    """[1, 4 * page_size] of each page."""
    rows = range(pair * count, (pair + 1) * count)
    return [
        jnp.concatenate([buffer[page, row : row + 1, :] for row in rows], axis=1) for page in range(buffer.shape[0])
    ]


def _single(
    number: Any,
    lengths: Any,
    table: Any,
    queries: Any,
    sinks: Any,
    pages: Any,
    scales: Any,
    out: Any,
    buffer: Any,
    scale_buffer: Any,
    ready: Any,
    slots: Any,
    *,
    spec: AttentionSpec,
    page_size: int,
    group: int,
    digits: bool,
) -> None:
    """Pieces with one query, the last token of each. queries and out [pieces, pairs, 2 * q_per_kv, width], sinks
    [pairs, 2 * q_per_kv, 1]."""
    count, pairs, rows, width = queries.shape
    halves, page_block = width // LANES, buffer.shape[1]
    keys, few = page_block * page_size, max(1, page_block // FEW)
    copies = PageCopies((pages, scales), (buffer, scale_buffer), ready, table)
    begin = pl.program_id(0) * count

    def used_pages(index: Any) -> Any:
        return pl.cdiv(lengths[index], page_size)

    @pl.when((begin == 0) & (number[0] > 0))
    def copy_first() -> None:
        slots[0] = 0
        copies.start(0, 0, used_pages(0), 0)

    out[...] = jnp.zeros(out.shape, out.dtype)

    def piece(index: Any, _: None) -> None:
        length, used = lengths[index], used_pages(index)
        blocks = pl.cdiv(length, keys)
        wide = queries[index - begin].astype(jnp.float32) * spec.softmax_scale
        operands = [Rows(wide[pair], digits) for pair in range(pairs)]

        def block(number_of_block: Any, carry: Any) -> Any:
            slot, later = slots[0], number_of_block + 1 < blocks
            then = jnp.where(later, index, index + 1)

            @pl.when(then < number[0])
            def copy_next() -> None:
                copies.start(then, jnp.where(later, number_of_block + 1, 0), used_pages(then), 1 - slot)

            copies.wait(number_of_block, used, slot)
            slots[0] = 1 - slot
            left = length - number_of_block * keys
            sizes = [partial(attended, slot, left, number_of_pages) for number_of_pages in (few, page_block)]
            return jax.lax.cond(left <= few * page_size, *sizes, carry)

        def attended(slot: Any, left: Any, number_of_pages: int, carry: Any) -> Any:
            shape = (rows, PAIR * number_of_pages * page_size)
            lane = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
            second = jax.lax.broadcasted_iota(jnp.int32, shape, 0) >= group
            visible = (lane & (PAIR - 1)) == jnp.where(second, 2, 0)
            visible = visible & (lane < PAIR * left)
            if spec.window is not None:
                visible = visible & (lane >= PAIR * (left - spec.window))
            there = lane[:1] < PAIR * left
            part = pl.ds(0, number_of_pages)
            found = buffer.at[slot, part], scale_buffer.at[slot, part]
            return tuple(of_pair(pair, *found, there, visible, *state) for pair, state in enumerate(carry))

        def of_pair(
            pair: int, rows: Any, scales: Any, there: Any, visible: Any, highest: Any, total: Any, mixed: Any
        ) -> Any:
            rows_of = [_words(rows, half * pairs + pair, pairs * halves, jnp.int8) for half in range(halves)]
            kept = jnp.concatenate(_scales(scales, pair, page_size * PAIR // LANES), axis=1)
            scale = jnp.where(there, kept, 0.0)  # others may be anything
            scores = _capped(operands[pair].by_features(rows_of) * scale, spec)
            scores = jnp.where(visible, scores, MASKED)
            now = jnp.maximum(highest, scores.max(1, keepdims=True))
            weights = jnp.exp(scores - now)  # 0 where masked: the last block has a key, and so has each before it
            keep = jnp.exp(highest - now)
            moved = pltpu.roll(weights, 1, 1) * scale
            more = Rows(moved, digits, scale.max(1, keepdims=True)).by_rows(rows_of)
            return now, total * keep + weights.sum(1, keepdims=True), mixed * keep + more

        start = []
        for pair in range(pairs):
            sink = sinks[pair]
            some = sink > -jnp.inf
            start.append((
                jnp.where(some, sink, MASKED), jnp.where(some, 1.0, 0.0), jnp.zeros((rows, width), jnp.float32)
            ))
        for pair, (_, total, mixed) in enumerate(jax.lax.fori_loop(0, blocks, block, tuple(start))):
            out[index - begin, pair] = (mixed / total).astype(out.dtype)

    jax.lax.fori_loop(begin, jnp.minimum(begin + count, number[0]), piece, None)


def _read(buffers: Sequence[Any], left: Any, *, pairs: int, dtype: Any) -> Callable[[int], BlockKeys]:
    """The `Reader` of paired pages and their scales: keys and values are converted to `dtype`."""
    found, scales = buffers
    _, page_size, rows, _ = found.shape
    halves = rows // (PAIR * pairs)
    # Column 4 * token + entry of a page's scales → column `token` of row `entry`.
    column = jax.lax.broadcasted_iota(jnp.int32, (8, PAIR * page_size), 1)
    own_entry = (column & (PAIR - 1)) == jax.lax.broadcasted_iota(jnp.int32, column.shape, 0)
    source = jax.lax.broadcasted_iota(jnp.int32, (PAIR * page_size, page_size), 0) // PAIR
    separate = (source == jax.lax.broadcasted_iota(jnp.int32, source.shape, 1)).astype(jnp.bfloat16)

    @cache
    def of_pair(pair: int) -> tuple[list[jax.Array], jax.Array]:
        """The words of a pair's rows, and the scales of its keys and values, [8, keys], in the first four rows."""
        parts = []
        for page, each in enumerate(_scales(scales, pair, page_size * PAIR // LANES)):
            mine = own_entry & (column < PAIR * (left - page * page_size))
            one_entry = jnp.where(mine, each, 0.0).astype(jnp.bfloat16)  # which holds scales exactly, see `layout`
            over = (((1,), (0,)), ((), ()))
            parts.append(jax.lax.dot_general(one_entry, separate, over, preferred_element_type=jnp.float32))
        words = [_words(found, half * pairs + pair, pairs * halves, jnp.int32) for half in range(halves)]
        return words, jnp.concatenate(parts, axis=1)

    def read(head: int) -> BlockKeys:
        words, of_entries = of_pair(head // 2)
        entry = 2 * (head % 2)
        key, value = (jnp.concatenate([_entry(word, entry + i, dtype) for word in words], axis=1) for i in range(2))
        return BlockKeys(key, value, (of_entries[entry : entry + 1], of_entries[entry + 1 : entry + 2]))

    return read


def _entry(words: jax.Array, entry: int, dtype: Any) -> jax.Array:
    """One of the four int8 in each of `words`."""
    return ((words << (24 - 8 * entry)) >> 24).astype(jnp.float32).astype(dtype)


def _capped(scores: jax.Array, spec: AttentionSpec) -> jax.Array:
    cap = spec.logit_softcap
    return scores if cap is None else jnp.tanh(scores / cap) * cap
