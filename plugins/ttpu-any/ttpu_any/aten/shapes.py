"""ATen operations that make arrays, and that rearrange, select or replace their elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_any.aten.table import Result, cast, operation


@operation(
    "view", "_unsafe_view", "reshape", "view_copy", "expand", "expand_copy", "unsqueeze", "unsqueeze_copy", "squeeze",
    "squeeze_copy",
)  # fmt: skip
def reshaped(result: Result, x: jax.Array, *_: Any, **__: Any) -> jax.Array:
    """x in the result's shape, repeated along dimensions of size 1 that the result has larger."""
    if x.size == int(np.prod(result.shape)):
        return x.reshape(result.shape)
    return jnp.broadcast_to(x, result.shape)


@operation("view.dtype", "view_copy.dtype")
def same_bits(result: Result, x: jax.Array, dtype: Any) -> jax.Array:
    """The bits of x as another dtype of the same size."""
    return jax.lax.bitcast_convert_type(x, result.dtype)


@operation("alias", "alias_copy", "clone", "contiguous", "detach", "detach_copy", "lift_fresh", "lift_fresh_copy")
def same(result: Result, x: jax.Array, *_: Any, **__: Any) -> jax.Array:
    """x."""
    return x


@operation("_to_copy", "to", "_cast", "convert_element_type")
def converted(result: Result, x: jax.Array, *_: Any, **__: Any) -> jax.Array:
    """x in the result's dtype."""
    return cast(x, result.dtype)


@operation("copy")
def copied(result: Result, x: jax.Array, source: jax.Array, *_: Any) -> jax.Array:
    """The source in the shape and dtype of x."""
    return jnp.broadcast_to(cast(source, result.dtype), result.shape)


@operation("permute", "permute_copy")
def permute(result: Result, x: jax.Array, dims: Sequence[int]) -> jax.Array:
    """x with its dimensions in another order."""
    return jnp.transpose(x, dims)


@operation("transpose", "transpose_copy")
def transpose(result: Result, x: jax.Array, first: int, second: int) -> jax.Array:
    """x with two dimensions exchanged."""
    return jnp.swapaxes(x, first, second)


@operation("t", "t_copy")
def matrix_transpose(result: Result, x: jax.Array) -> jax.Array:
    """The transpose of a matrix."""
    return x.T


@operation("cat")
def cat(result: Result, parts: Sequence[jax.Array], dim: int = 0) -> jax.Array:
    """The arrays joined along a dimension; empty ones are left out, as torch does."""
    kept = [cast(part, result.dtype) for part in parts if part.shape != (0,)]
    return jnp.concatenate(kept, dim) if kept else jnp.zeros(result.shape, result.dtype)


@operation("stack")
def stack(result: Result, parts: Sequence[jax.Array], dim: int = 0) -> jax.Array:
    """The arrays along a new dimension."""
    return jnp.stack([cast(part, result.dtype) for part in parts], dim)


@operation("repeat")
def repeat(result: Result, x: jax.Array, times: Sequence[int]) -> jax.Array:
    """x repeated along each dimension."""
    return jnp.tile(x, times)


@operation("flip")
def flip(result: Result, x: jax.Array, dims: Sequence[int]) -> jax.Array:
    """x in reverse order along some dimensions."""
    return jnp.flip(x, tuple(dims))


@operation("roll")
def roll(result: Result, x: jax.Array, shifts: Sequence[int], dims: Sequence[int] = ()) -> jax.Array:
    """x rotated along some dimensions."""
    return jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x, shifts[0])


@operation("constant_pad_nd")
def pad(result: Result, x: jax.Array, widths: Sequence[int], value: Any = 0) -> jax.Array:
    """x with a constant around it; a negative width cuts. Widths come in pairs from the last dimension on."""
    pairs = [(0, 0, 0)] * x.ndim
    for place in range(len(widths) // 2):
        pairs[x.ndim - 1 - place] = (widths[2 * place], widths[2 * place + 1], 0)
    return jax.lax.pad(x, cast(value, x.dtype), pairs)


@operation("split_with_sizes", "split_with_sizes_copy")
def split_with_sizes(result: Any, x: jax.Array, sizes: Sequence[int], dim: int = 0) -> list[jax.Array]:
    """x cut into parts of the given sizes."""
    return jnp.split(x, np.cumsum(sizes)[:-1], dim)


@operation("split", "split_copy", "chunk")
def split(result: Any, x: jax.Array, size: int, dim: int = 0) -> list[jax.Array]:
    """x cut into as many parts, and as large ones, as torch says."""
    return split_with_sizes(result, x, [part.shape[dim] for part in result], dim)


@operation("unbind", "unbind_copy")
def unbind(result: Any, x: jax.Array, dim: int = 0) -> list[jax.Array]:
    """The parts of x along a dimension, without it."""
    return [jax.lax.index_in_dim(x, place, dim, keepdims=False) for place in range(x.shape[dim])]


@operation("slice", "slice_copy")
def sliced(
    result: Result, x: jax.Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> jax.Array:
    """A range of x along a dimension."""
    return x[_range(x, dim, start, end, step)]


@operation("slice_scatter")
def slice_scatter(
    result: Result,
    x: jax.Array,
    source: jax.Array,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> jax.Array:
    """x with a range along a dimension replaced."""
    return x.at[_range(x, dim, start, end, step)].set(cast(source, x.dtype))


@operation("select", "select_copy")
def select(result: Result, x: jax.Array, dim: int, index: int) -> jax.Array:
    """One place of x along a dimension, without it."""
    return jax.lax.index_in_dim(x, index, dim, keepdims=False)


@operation("select_scatter")
def select_scatter(result: Result, x: jax.Array, source: jax.Array, dim: int, index: int) -> jax.Array:
    """x with one place along a dimension replaced."""
    return x.at[(slice(None),) * (dim % x.ndim) + (index,)].set(cast(source, x.dtype))


@operation("diagonal", "diagonal_copy")
def diagonal(result: Result, x: jax.Array, offset: int = 0, first: int = 0, second: int = 1) -> jax.Array:
    """The diagonal of two dimensions, as the last one."""
    return jnp.diagonal(x, offset, first, second)


@operation("tril")
def tril(result: Result, x: jax.Array, diagonal: int = 0) -> jax.Array:
    """The lower triangle."""
    return jnp.tril(x, diagonal)


@operation("triu")
def triu(result: Result, x: jax.Array, diagonal: int = 0) -> jax.Array:
    """The upper triangle."""
    return jnp.triu(x, diagonal)


@operation("as_strided", "as_strided_copy")
def as_strided(
    result: Result, x: jax.Array, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> jax.Array:
    """Elements of a contiguous x by their place in memory."""
    return x.reshape(-1)[_places(size, stride, offset)]


@operation("as_strided_scatter")
def as_strided_scatter(
    result: Result,
    x: jax.Array,
    source: jax.Array,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int | None = None,
) -> jax.Array:
    """A contiguous x with elements replaced by their place in memory."""
    return x.reshape(-1).at[_places(size, stride, offset)].set(cast(source, x.dtype)).reshape(x.shape)


@operation("unfold", "unfold_copy")
def unfold(result: Result, x: jax.Array, dim: int, size: int, step: int) -> jax.Array:
    """Windows of x along a dimension, as the last one."""
    starts = np.arange(result.shape[dim % x.ndim]) * step
    windows = jnp.take(x, starts[:, None] + np.arange(size), axis=dim % x.ndim)
    return jnp.moveaxis(windows, dim % x.ndim + 1, -1)


@operation("index")
def index(result: Result, x: jax.Array, indices: Sequence[jax.Array | None]) -> jax.Array:
    """Elements of x by arrays of indices; None takes a whole dimension."""
    return x[tuple(slice(None) if each is None else each for each in indices)]


@operation("index_put", "_unsafe_index_put", "_index_put_impl")
def index_put(
    result: Result,
    x: jax.Array,
    indices: Sequence[jax.Array | None],
    values: jax.Array,
    accumulate: bool = False,
    unsafe: bool = False,
) -> jax.Array:
    """x with elements replaced, or added to."""
    values = cast(values, x.dtype)
    if len(indices) == 1 and indices[0] is not None and indices[0].dtype == jnp.bool_ and values.ndim == 0:
        mask = indices[0].reshape(indices[0].shape + (1,) * (x.ndim - indices[0].ndim))
        return jnp.where(mask, x + values if accumulate else values, x)
    place = x.at[tuple(slice(None) if each is None else each for each in indices)]
    return place.add(values) if accumulate else place.set(values)


@operation("index_select")
def index_select(result: Result, x: jax.Array, dim: int, indices: jax.Array) -> jax.Array:
    """Places of x along a dimension."""
    return jnp.take(x, indices.reshape(-1), axis=dim, mode="clip") if x.ndim else x


@operation("index_copy")
def index_copy(result: Result, x: jax.Array, dim: int, indices: jax.Array, source: jax.Array) -> jax.Array:
    """x with places along a dimension replaced."""
    if indices.size == 1:  # a cache's next slot: a scatter, which is slow on a TPU, is not needed
        return jax.lax.dynamic_update_slice_in_dim(x, cast(source, x.dtype), indices.reshape(()), dim % x.ndim)
    return x.at[(slice(None),) * (dim % x.ndim) + (indices,)].set(cast(source, x.dtype))


@operation("index_add")
def index_add(
    result: Result, x: jax.Array, dim: int, indices: jax.Array, source: jax.Array, *, alpha: Any = 1
) -> jax.Array:
    """x with something added at places along a dimension."""
    source = cast(source, x.dtype)
    return x.at[(slice(None),) * (dim % x.ndim) + (indices,)].add(source if alpha == 1 else source * alpha)


@operation("gather")
def gather(result: Result, x: jax.Array, dim: int, indices: jax.Array, **_: Any) -> jax.Array:
    """For each index the element of x at that place along a dimension."""
    return x[_beside(indices, dim)] if indices.ndim else x


@operation("scatter")
def scatter(result: Result, x: jax.Array, dim: int, indices: jax.Array, source: Any, **_: Any) -> jax.Array:
    """x with the element at each index along a dimension replaced."""
    source = cast(source, x.dtype)
    source = source[tuple(slice(size) for size in indices.shape)] if source.ndim else source
    return x.at[_beside(indices, dim)].set(source)


@operation("scatter_add")
def scatter_add(result: Result, x: jax.Array, dim: int, indices: jax.Array, source: jax.Array) -> jax.Array:
    """x with something added to the element at each index along a dimension."""
    return x.at[_beside(indices, dim)].add(cast(source, x.dtype)[tuple(slice(size) for size in indices.shape)])


@operation("scatter_reduce")
def scatter_reduce(
    result: Result,
    x: jax.Array,
    dim: int,
    indices: jax.Array,
    source: jax.Array,
    reduce: str,
    *,
    include_self: bool = True,
) -> jax.Array:
    """x joined with something at each index along a dimension."""
    place = x.at[_beside(indices, dim)]
    if not include_self:
        place = place.set({"sum": 0, "prod": 1, "amax": -jnp.inf, "amin": jnp.inf}[reduce]).at[_beside(indices, dim)]
    join: Any = {"sum": place.add, "prod": place.multiply, "amax": place.max, "amin": place.min}[reduce]
    return join(cast(source, x.dtype)[tuple(slice(size) for size in indices.shape)])


@operation("embedding")
def embedding(result: Result, table: jax.Array, indices: jax.Array, *_: Any) -> jax.Array:
    """Rows of a table."""
    return table[indices]


@operation("arange")
def arange(result: Result, start: Any, end: Any = None, step: Any = 1, **_: Any) -> jax.Array:
    """Evenly spaced numbers."""
    first = 0 if end is None else start
    return cast(first, result.dtype) + cast(step, result.dtype) * jnp.arange(result.shape[0], dtype=result.dtype)


@operation("linspace")
def linspace(result: Result, start: Any, end: Any, steps: int, **_: Any) -> jax.Array:
    """Evenly spaced numbers, both ends included."""
    return jnp.linspace(start, end, steps, dtype=result.dtype)


@operation("full", "full_like", "new_full", "fill")
def full(result: Result, shape: Any, value: Any, *_: Any, **__: Any) -> jax.Array:
    """An array of one value."""
    return jnp.broadcast_to(cast(value, result.dtype), result.shape)


@operation(
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "new_zeros", "zeros",
    "zeros_like", "zero",
)  # fmt: skip
def zeros(result: Result, *_: Any, **__: Any) -> jax.Array:
    """An array of zeros, also where torch leaves memory as it is."""
    return jnp.zeros(result.shape, result.dtype)


@operation("ones", "ones_like", "new_ones")
def ones(result: Result, *_: Any, **__: Any) -> jax.Array:
    """An array of ones."""
    return jnp.ones(result.shape, result.dtype)


@operation("eye")
def eye(result: Result, *_: Any, **__: Any) -> jax.Array:
    """The identity matrix."""
    return jnp.eye(result.shape[0], result.shape[-1], dtype=result.dtype)


@operation("scalar_tensor")
def scalar(result: Result, value: Any, **_: Any) -> jax.Array:
    """A number as an array."""
    return cast(value, result.dtype)


@operation("repeat_interleave")
def repeat_interleave(result: Result, x: jax.Array, times: int, dim: int | None = None, **_: Any) -> jax.Array:
    """Each element repeated."""
    return jnp.repeat(x, times, axis=dim)


@operation("_assert_async", "_assert_scalar", "_assert_tensor_metadata", "sym_constrain_range_for_size")
def nothing(result: Any, *_: Any, **__: Any) -> None:
    """A check of torch's, which traced values cannot fail."""


def _range(x: jax.Array, dim: int, start: int | None, end: int | None, step: int) -> tuple[slice, ...]:
    return (slice(None),) * (dim % x.ndim) + (slice(start, end, step),)


def _places(size: Sequence[int], stride: Sequence[int], offset: int | None) -> np.ndarray:
    places = np.array(offset or 0)
    for length, step in zip(size, stride, strict=True):
        places = places[..., None] + np.arange(length) * step
    return places


def _beside(indices: jax.Array, dim: int) -> tuple[Any, ...]:
    """`indices` along a dimension, and each element's own place along the others."""
    own = list(jnp.indices(indices.shape, sparse=True))
    own[dim % indices.ndim] = indices
    return tuple(own)
