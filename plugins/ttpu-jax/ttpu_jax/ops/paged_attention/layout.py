"""The layout of keys and values in pages.

Split pages are [pages, planes, kv_heads, page_size, dim] with one plane for keys and one for values, or one plane
for both. Products on a CPU need this layout, one product per KV head. TPUs have it, with dim a multiple of 128, for
pages of int8, and for those of float8 whose combined rows would need heads of zeros: of one KV head on each device, and
of latents. Their pages have a multiple of 32 tokens, the tokens of a tile, and a kernel writes whole tiles
(`tile_write`). The scales of int8 are [pages, planes, kv_heads, page_size] on a CPU. On a TPU those of a tile lie
together, [pages, page_size / 32, 1, kv_heads * 64 or 128]: of each head the scales of 32 keys, then those of their
values. A head has 64 numbers where that gives each device rows of 128, or else 128, of which the rest is unused.

Combined pages are [pages, page_size, kv_heads * planes, dim], each head's key before its value, with dim a multiple of
128. JAX's kernel needs this layout, and XLA:TPU writes tokens into it without copying all pages. Both need whole tiles,
so heads of zeros follow each device's heads if those do not fill tiles. Where values are beside keys and heads have 256
or 512 features, these are split into parts of 128 that follow one another, [pages, page_size, parts * kv_heads * 2,
128]: the same bytes, but a kernel loads one part of many tokens at once."""

from __future__ import annotations

import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, Sharding

from ttpu_core.spec import AttentionSpec, axes
from ttpu_jax.ops.paged_attention.batch import PagedKV
from ttpu_jax.ops.paged_attention.kernel import LANES, padded_heads

SPLIT = (2 * LANES, 4 * LANES)
"""Widths of heads whose features combined pages split; other parts would leave gaps between tokens."""
TILE_TOKENS = 32
"""Tokens of a tile of 8 bits, in which split pages are written: four in each of eight rows of a register."""
INT8_LIMIT = 127.0
SMALLEST = 1e-30  # of a token's largest feature: its scale must be a normal number


class Placement(Protocol):
    """The part of `ttpu_jax.params.placement.Placement` that pages need. Modules in `ops` may not import that class."""

    @property
    def mesh(self) -> Mesh | None: ...

    @property
    def platform(self) -> str: ...

    def divisible(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> tuple[str | None, ...]: ...

    def sharding(self, axes: tuple[str | None, ...], shape: tuple[int, ...], name: str) -> Sharding: ...

    def mesh_axes(self, axis: str, size: int) -> tuple[str, ...]: ...


def empty_pages(
    spec: AttentionSpec,
    num_pages: int,
    page_size: int,
    placement: Placement,
    dtype: Any,
    group: int = 0,
    *,
    value_in_key: bool = False,
    abstract: bool = False,
) -> PagedKV:
    """Pages of zeros for one layer on the placement's devices, sharded over KV heads if they divide.

    Args:
        spec: the layer's attention.
        num_pages: number of pages, including `NULL_PAGE`.
        page_size: tokens per page.
        placement: the devices.
        dtype: int8 entries have one float32 scale per token and head; other dtypes are cast to. XLA:CPU cannot index
            arrays of 16-bit floats without converting them whole, so there bfloat16 is stored as its bits in uint16,
            and float16 as float32.
        group: the page group.
        value_in_key: store keys only; values are their first `spec.value_dim` features.
        abstract: return shapes and shardings without memory.
    """
    dtype = _kept(dtype, placement)
    combined = _combined(spec, page_size, placement, dtype, value_in_key)
    shape, logical = _shape(spec, num_pages, page_size, dtype, value_in_key, combined, placement)

    def make(shape: tuple[int, ...], logical: tuple[str | None, ...], kind: Any) -> Any:
        sharding = placement.sharding(placement.divisible(logical, shape), shape, "KV pages")
        if abstract:
            return jax.ShapeDtypeStruct(shape, kind, sharding=sharding)
        return jnp.zeros(shape, kind, device=sharding)

    scales = None
    if dtype == np.int8:
        scales = make(*_scales(spec, shape, logical, placement), jnp.float32)
    return PagedKV(make(shape, logical, dtype), scales, group, value_in_key, combined)


def page_bytes(
    spec: AttentionSpec, page_size: int, placement: Placement, dtype: Any, *, value_in_key: bool = False
) -> tuple[int, int]:
    """Bytes of one page of one layer on all devices together, and the number of devices that share it.

    Args:
        spec: the layer's attention.
        page_size: tokens per page.
        placement: the devices.
        dtype: dtype of the cache, see `empty_pages`.
        value_in_key: whether keys only are stored.
    """
    dtype = _kept(dtype, placement)
    combined = _combined(spec, page_size, placement, dtype, value_in_key)
    shape, logical = _shape(spec, 1, page_size, dtype, value_in_key, combined, placement)
    size = math.prod(shape) * dtype.itemsize
    if dtype == np.int8:
        size += math.prod(_scales(spec, shape, logical, placement)[0]) * 4
    return size, _ways(spec, placement)


def page_size_of(kv: PagedKV) -> int:
    """Tokens per page."""
    return kv.pages.shape[1 if kv.combined else 3]


def has_tiled_scales(kv: PagedKV) -> bool:
    """Whether the scales of split pages lie together by tiles."""
    return kv.scales is not None and not kv.combined and kv.scales.shape != kv.pages.shape[:-1]


def rows_of(kv: PagedKV, key: jax.Array, value: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """The entries that the pages of `kv` store for new tokens, one slot per token, and their scales (or None).

    Args:
        kv: the layer's pages.
        key: [tokens, kv_heads, dim].
        value: [tokens, kv_heads, value_dim], or None if values are the first features of keys.
    """
    parts = 1 if value is None else parts_of(kv, max(key.shape[-1], value.shape[-1]))
    width = kv.pages.shape[-1] * parts
    planes = [widened(key, width)] if value is None else [widened(key, width), widened(value, width)]
    rows = _beside(kv, jnp.stack(planes, axis=2), parts) if kv.combined else jnp.stack(planes, axis=1)
    if kv.scales is None:
        return _stored(kv, rows), None
    rows = rows.astype(jnp.float32)
    scales = jnp.maximum(jnp.abs(rows).max(-1), SMALLEST) / INT8_LIMIT
    return jnp.round(rows / scales[..., None]).astype(jnp.int8), scales


def rows_of_pairs(kv: PagedKV, pairs: jax.Array) -> jax.Array:
    """The entries that combined pages without scales store for pairs [tokens, kv_heads, 2, dim] of a key and a value,
    as `rows_of` gives them."""
    parts = parts_of(kv, pairs.shape[-1])
    return _stored(kv, _beside(kv, widened(pairs, kv.pages.shape[-1] * parts), parts))


def takes_heads(kv: PagedKV) -> bool:
    """Whether the kernel that writes pages puts keys and values into the order of their rows itself."""
    return bool(kv.combined) and kv.pages.dtype in (jnp.bfloat16, jnp.float32) and not kv.value_in_key


def heads_of(kv: PagedKV, *new: jax.Array) -> tuple[jax.Array, ...]:
    """Keys, and values where they are apart, [tokens, kv_heads, features] each, as kernels take them that put rows in
    order: [kv_heads, tokens, features]. The kernel for split pages rounds them itself."""
    width = kv.pages.shape[-1] * parts_of(kv, max(each.shape[-1] for each in new))
    if kv.combined:
        kept = [each.astype(kv.pages.dtype) for each in new]
    else:  # kernels read no float16
        kept = [each.astype(jnp.float32) if each.dtype == jnp.float16 else each for each in new]
    return tuple(widened(each, width).swapaxes(0, 1) for each in kept)


def _beside(kv: PagedKV, planes: jax.Array, parts: int) -> jax.Array:
    """The rows [tokens, rows, width] of combined pages for planes [tokens, kv_heads, 1 or 2, width * parts]: keys, and
    values beside them."""
    tokens, _, _, width = planes.shape
    rows = planes.reshape(tokens, kv.combined, -1, width)
    more = kv.pages.shape[2] * kv.pages.shape[3] // width // kv.combined - rows.shape[2]
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, more), (0, 0)))
    if parts > 1:
        rows = rows.reshape(tokens, kv.combined, -1, parts, LANES).swapaxes(2, 3)
    return rows.reshape(tokens, -1, kv.pages.shape[-1])


def _stored(kv: PagedKV, rows: jax.Array) -> jax.Array:
    """Rows in the dtype of pages without scales."""
    if kv.pages.dtype == jnp.float8_e4m3fn:
        return in_float8(rows)
    if kv.pages.dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(rows.astype(jnp.bfloat16), jnp.uint16)
    return rows.astype(kv.pages.dtype)


def in_float8(x: jax.Array) -> jax.Array:
    """x [...] in float8_e4m3fn, the same shape. A cast of a larger value than its maximum would give NaN."""
    most = float(jnp.finfo(jnp.float8_e4m3fn).max)
    return jnp.clip(x, -most, most).astype(jnp.float8_e4m3fn)


def read(
    kv: PagedKV, pages: jax.Array, spec: AttentionSpec, kv_heads: int, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Keys [rows, kv_heads, n * page_size, head_dim] and values [rows, kv_heads, n * page_size, value_dim] of given
    pages, on one device.

    Args:
        kv: the layer's pages.
        pages: [rows, n] page numbers.
        spec: the layer's attention.
        kv_heads: KV heads of this device.
        dtype: dtype of the result.
    """
    rows, n = pages.shape
    tokens = n * page_size_of(kv)
    one = rows * n == 1  # XLA:CPU copies a slice faster than it gathers
    found = jax.lax.dynamic_index_in_dim(kv.pages, pages[0, 0], 0)[None] if one else kv.pages[pages]
    scales = None
    parts = 1 if kv.value_in_key else parts_of(kv, max(spec.head_dim, spec.value_dim))
    if parts > 1:
        found = found.reshape(rows, n, -1, parts, found.shape[3] // parts, LANES).swapaxes(3, 4)
        found = found.reshape(rows, n, found.shape[2], -1, parts * LANES)
    if kv.scales is not None:
        # Without the constraint XLA:TPU would convert all 8-bit pages to another layout to read these.
        found = with_layout_constraint(found, Layout(tuple(range(found.ndim))))
        scales = kv.scales[pages]
        if has_tiled_scales(kv):
            planes, heads = found.shape[2:4]
            tiles = scales.reshape(*scales.shape[:3], heads, -1, TILE_TOKENS)[..., :planes, :]
            scales = tiles.transpose(0, 1, 4, 3, 2, 5).reshape(rows, n, planes, heads, page_size_of(kv))
        scales = (scales.swapaxes(2, 3) if kv.combined else scales)[..., None]
    if found.dtype == jnp.uint16:  # bfloat16 is the upper half of a float32
        found = jax.lax.bitcast_convert_type(found.astype(jnp.uint32) << 16, jnp.float32)
    found = found.astype(dtype)
    if scales is not None:
        found = (found * scales).astype(dtype)
    width = found.shape[-1]
    if kv.combined:
        planes = 1 if kv.value_in_key else 2
        found = found.reshape(rows, tokens, -1, planes, width)[:, :, :kv_heads].transpose(3, 0, 2, 1, 4)
    else:
        planes, heads = found.shape[2:4]
        found = found.transpose(2, 0, 3, 1, 4, 5).reshape(planes, rows, heads, tokens, width)
    values = found[0] if kv.value_in_key else found[1]
    return found[0][..., : spec.head_dim], values[..., : spec.value_dim]


def _kept(dtype: Any, placement: Placement) -> np.dtype[Any]:
    kept = np.dtype(dtype)
    if placement.platform == "cpu" and kept == jnp.bfloat16:
        return np.dtype(np.uint16)
    return np.dtype(np.float32) if placement.platform == "cpu" and kept == np.float16 else kept


def _ways(spec: AttentionSpec, placement: Placement) -> int:
    """Number of devices that share the KV heads."""
    if placement.mesh is None:
        return 1
    return math.prod(placement.mesh.shape[axis] for axis in placement.mesh_axes(axes.KV_HEADS, spec.num_kv_heads))


def _combined(
    spec: AttentionSpec, page_size: int, placement: Placement, dtype: np.dtype[Any], value_in_key: bool
) -> int:
    """`PagedKV.combined` of pages."""
    if placement.platform != "tpu":
        return 0
    ways = _ways(spec, placement)
    if dtype.itemsize > 1 or page_size % TILE_TOKENS:
        return ways
    own = spec.num_kv_heads // ways
    return 0 if dtype == np.int8 or padded_heads(own, dtype, _parts(spec, dtype, value_in_key)) > own else ways


def _parts(spec: AttentionSpec, dtype: np.dtype[Any], value_in_key: bool) -> int:
    """Parts of 128 into which combined pages split the features of a head; 1 where they do not. Integers have one scale
    for a whole head."""
    width = -(-max(spec.head_dim, spec.value_dim) // LANES) * LANES
    return width // LANES if width in SPLIT and not value_in_key and dtype != np.int8 else 1


def _shape(
    spec: AttentionSpec,
    num_pages: int,
    page_size: int,
    dtype: np.dtype[Any],
    value_in_key: bool,
    combined: int,
    placement: Placement,
) -> tuple[tuple[int, ...], tuple[str | None, ...]]:
    """The shape of pages, and its logical axes."""
    width = spec.head_dim if value_in_key else max(spec.head_dim, spec.value_dim)
    planes, heads = 1 if value_in_key else 2, spec.num_kv_heads
    if placement.platform == "tpu":
        width = -(-width // LANES) * LANES
    if combined:
        logical = None, None, axes.KV_HEADS if combined > 1 else None, None  # else each device holds all rows
        if planes == 2:
            parts = _parts(spec, dtype, value_in_key)
            heads = parts * combined * padded_heads(heads // combined, dtype, parts)
            width //= parts
        return (num_pages, page_size, heads * planes, width), logical
    return (num_pages, planes, heads, page_size, width), (None, None, axes.KV_HEADS, None, None)


def _scales(
    spec: AttentionSpec, shape: tuple[int, ...], logical: tuple[str | None, ...], placement: Placement
) -> tuple[tuple[int, ...], tuple[str | None, ...]]:
    """The shape and axes of the scales of pages with this `shape` and these axes. Tokens come last, since a TPU pads
    the last dimension to 128."""
    if len(shape) == 4:
        return (shape[0], shape[2], shape[1]), (logical[0], logical[2], logical[1])
    if placement.platform != "tpu":
        return shape[:-1], logical[:-1]
    _, planes, heads, page_size, _ = shape
    ways = _ways(spec, placement)
    of_head = planes * TILE_TOKENS
    if heads // ways * of_head % LANES:
        of_head = LANES
    shared = logical[2] if ways > 1 else None  # else each device holds those of all heads
    return (shape[0], page_size // TILE_TOKENS, 1, heads * of_head), (None, None, None, shared)


def parts_of(kv: PagedKV, features: int) -> int:
    """Parts of 128 into which pages without scales split heads of that many features; 1 where they do not."""
    return -(-features // LANES) if kv.combined and features > kv.pages.shape[-1] else 1


def widened(x: jax.Array, width: int) -> jax.Array:
    """x [..., dim] with zeros up to `width` features."""
    missing = width - x.shape[-1]
    return x if missing == 0 else jnp.pad(x, (*((0, 0),) * (x.ndim - 1), (0, missing)))
