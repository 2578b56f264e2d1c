"""Products of activations whose rows are cut over the devices of a ring, which exchange them while they multiply.

A kernel whose outputs are shared among the devices needs all rows: `gathered_product` multiplies those that are there
while the next ones arrive. A kernel whose inputs are shared leaves each device sums for all rows, of which it keeps
those of its own: `scattered_product`. In `ring_mlp` rows go round, and the sums for them follow.

Whatever goes round goes in both directions at once, so that a device sends and receives over the links to both of its
neighbours. Sums travel in the dtype of the activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, PartitionSpec

from ttpu_core.errors import RequestError
from ttpu_core.sharding.hardware import Chip, chip_of_device_kind
from ttpu_jax.ops.memories import in_vmem

StreamForm = Literal["whole", "auto", "rings"]
"""Where the sequence of the residual stream is cut over the devices that share MLPs and heads: nowhere ("whole"), in
programs of enough tokens for v5e and v6e ("auto"), or wherever the devices divide the tokens ("rings")."""
Multiply = Callable[[jax.Array], jax.Array]
"""A product with one device's share of a kernel: rows [batch, rows, in] to [batch, rows, *out]."""
Lower = Callable[[jax.Array, jax.Array], jax.Array]
"""An activation and its product with one device's share of a kernel."""
Halves = tuple[jax.Array, jax.Array]
"""Of rows or sums that travel: what goes ahead, and what goes back."""

# Up to so many bytes of a gathered product stay in VMEM, on chips that have 128 MiB of it.
_IN_VMEM_BYTES, _CHIPS_WITH_ROOM = 16 << 20, ("v5e", "v6e")


@dataclass(frozen=True)
class Ring:
    """Devices along a mesh axis, each of which has neighbours before and behind it. Hashable: static while a program is
    traced.

    mesh: all devices.
    axis: the mesh axis that cuts rows.
    batch: the mesh axes that shard the batch.
    """

    mesh: Mesh
    axis: str
    batch: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Number of devices in the ring."""
        return int(self.mesh.shape[self.axis])

    @property
    def chip(self) -> Chip | None:
        """What the devices are, if they are TPUs."""
        return chip_of_device_kind(self.mesh.devices.flat[0].device_kind)

    @property
    def cut_rows(self) -> PartitionSpec:
        """The sharding of activations [batch, seq, features] of which each device has its own rows."""
        return PartitionSpec(self.batch or None, self.axis, None)

    def kernel(self, rank: int, dimension: int) -> PartitionSpec:
        """The sharding of a kernel or bias of `rank` dimensions of which the devices share one dimension."""
        return PartitionSpec(*(self.axis if each == dimension else None for each in range(rank)))

    def run(
        self, local: Callable[..., jax.Array], arrays: tuple[Any, ...], specs: tuple[Any, ...], out: PartitionSpec
    ) -> jax.Array:
        """Run a function on every device's shards of arrays, some of which may be None; return its results
        [batch, seq, ...], which are sharded by `out`."""
        mapped = jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=out, check_vma=False)
        result: jax.Array = mapped(*arrays)
        return result


def stream_form(name: str) -> StreamForm:
    """The form of the residual stream with a name.

    Raises:
        RequestError: an unknown name.
    """
    forms: dict[str, StreamForm] = {form: form for form in get_args(StreamForm)}
    if not isinstance(name, str) or name not in forms:
        raise RequestError(
            f"residual_stream={name!r} was asked for, but it is one of {', '.join(forms)}: write one of them."
        )
    return forms[name]


def gathered_product(
    x: jax.Array, kernel: jax.Array, bias: jax.Array | None, ring: Ring, *, shared: int = 0
) -> jax.Array:
    """x [batch, seq, in], whose rows are cut, times kernel [*out, in], plus bias [*out]: [batch, seq, *out] in x's
    dtype, with whole rows.

    Args:
        x: [batch, seq, in]; the ring divides seq.
        kernel: [*out, in].
        bias: [*out], or None.
        ring: the devices.
        shared: the dimension of the kernel that the devices share.
    """

    def local(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
        return _heads_outside(_gathered(x, lambda rows: _product(rows, kernel, bias).astype(x.dtype), ring))

    rank = len(kernel.shape)
    specs = (ring.cut_rows, ring.kernel(rank, shared), ring.kernel(rank - 1, shared))
    out = PartitionSpec(ring.batch or None, None, *ring.kernel(rank - 1, shared))
    return ring.run(local, (x, kernel, bias), specs, out)


def heads_outside(x: jax.Array, ring: Ring) -> jax.Array:
    """x [batch, seq, kv_heads, ..., dim], whose heads the devices share, as a TPU lays it out with tokens within heads:
    then its slices of heads are no copies."""
    specs = PartitionSpec(ring.batch or None, None, ring.axis)
    return ring.run(_heads_outside, (x,), (specs,), specs)


def scattered_product(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, ring: Ring) -> jax.Array:
    """x [batch, seq, in], whose features are shared, times kernel [out, in], plus bias [out]: [batch, seq, out] in x's
    dtype, whose rows are cut.

    One reduce-scatter follows the product. Sums that go round while others are computed are predicted to take as long,
    because the core then adds them itself.

    Args:
        x: [batch, seq, in]; the ring divides seq.
        kernel: [out, in], whose inputs the devices share.
        bias: [out], or None.
        ring: the devices.
    """

    def local(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
        own = _scattered(_product(x, kernel).astype(x.dtype), ring)
        return own if bias is None else (own + bias.astype(jnp.float32)).astype(x.dtype)

    features = PartitionSpec(ring.batch or None, None, ring.axis)
    return ring.run(local, (x, kernel, bias), (features, ring.kernel(2, 1), PartitionSpec()), ring.cut_rows)


def scattered_rows(table: jax.Array, tokens: jax.Array, ring: Ring) -> jax.Array:
    """Rows of an embedding table: [batch, seq, features], whose rows are cut.

    Args:
        table: [vocab, features], whose rows the devices share; the ring divides vocab.
        tokens: [batch, seq], indices into the table; the ring divides seq.
        ring: the devices.
    """

    def local(table: jax.Array, tokens: jax.Array) -> jax.Array:
        places = tokens - jax.lax.axis_index(ring.axis) * len(table)
        own = (places >= 0) & (places < len(table))
        found = jnp.take(table, places, axis=0, mode="clip")
        # Shaped as layers shape their outputs, or the compiler makes code of its own for all of the first layer.
        return jax.lax.optimization_barrier(_scattered(jnp.where(own[..., None], found, 0), ring))

    specs = ring.kernel(2, 0), PartitionSpec(ring.batch or None)
    return ring.run(local, (table, tokens), specs, ring.cut_rows)


def exchanged_rows(table: jax.Array, tokens: jax.Array, ring: Ring) -> jax.Array:
    """Rows of an embedding table: [batch, seq, features], whose rows are cut. Each device looks up its part of all
    rows, and sends to each the part of those that it has.

    Args:
        table: [vocab, features], whose features the devices share.
        tokens: [batch, seq], indices into the table; the ring divides seq.
        ring: the devices.
    """

    def local(table: jax.Array, tokens: jax.Array) -> jax.Array:
        found = jnp.take(table, tokens, axis=0, mode="clip")
        batch, seq, features = found.shape
        # Rows of a device come first: along an inner dimension XLA:TPU copies them into other tiles before and after.
        by_device = found.reshape(batch, ring.size, -1, features).swapaxes(0, 1).reshape(ring.size, -1, features)
        own = jax.lax.all_to_all(by_device, ring.axis, 0, 0, tiled=True).swapaxes(0, 1)
        # Shaped as layers shape their outputs, or the compiler makes code of its own for all of the first layer.
        return jax.lax.optimization_barrier(own.reshape(batch, seq // ring.size, -1))

    specs = ring.kernel(2, 1), PartitionSpec(ring.batch or None)
    return ring.run(local, (table, tokens), specs, ring.cut_rows)


def ring_mlp(
    x: jax.Array,
    up: tuple[jax.Array, jax.Array | None],
    down: tuple[jax.Array, jax.Array | None],
    activate: Callable[[jax.Array], jax.Array],
    ring: Ring,
) -> jax.Array:
    """An MLP on x [batch, seq, hidden], whose rows are cut: the same shape.

    Args:
        x: [batch, seq, hidden]; the ring divides seq.
        up: the first kernel [*out, hidden], whose last outputs the devices share, and its bias.
        down: the second kernel [hidden, mlp], whose inputs they share, and its bias.
        activate: from the first product, float32 [batch, rows, *out], to the inputs of the second, [batch, rows, mlp].
        ring: the devices.
    """
    rank = len(up[0].shape)

    def local(
        x: jax.Array, up: tuple[jax.Array, jax.Array | None], down: tuple[jax.Array, jax.Array | None]
    ) -> jax.Array:
        def lowered(raised: jax.Array, kernel: jax.Array) -> jax.Array:
            return _product(activate(raised).astype(x.dtype), kernel)

        early = _links_take_longer(x, up[0].size + down[0].size, ring)
        return _round(x, lambda rows: _product(rows, *up), lowered, down, ring, early=early)

    of_up = ring.kernel(rank, rank - 2), ring.kernel(rank - 1, rank - 2)
    of_down = ring.kernel(2, 1), PartitionSpec()
    return ring.run(local, (x, up, down), (ring.cut_rows, of_up, of_down), ring.cut_rows)


def _heads_outside(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, _outside(x))


def _outside(x: jax.Array) -> Layout:
    """Tokens within heads, of x [batch, seq, *heads, dim]."""
    return Layout((0, *range(2, x.ndim - 1), 1, x.ndim - 1))


def _product(rows: jax.Array, kernel: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """rows [batch, rows, in] times kernel [*out, in], plus bias [*out]: float32 [batch, rows, *out]."""
    dimensions = (((2,), (kernel.ndim - 1,)), ((), ()))
    product = jax.lax.dot_general(rows, kernel, dimensions, preferred_element_type=jnp.float32)
    return product if bias is None else product + bias.astype(jnp.float32)


def _sent(x: jax.Array, ring: Ring, to: int) -> jax.Array:
    """What the device `to` places before this one has sent."""
    return jax.lax.ppermute(x, ring.axis, [(place, (place + to) % ring.size) for place in range(ring.size)])


def _round(
    x: jax.Array,
    up: Multiply,
    lower: Lower,
    down: tuple[jax.Array, jax.Array | None],
    ring: Ring,
    *,
    early: bool,
) -> jax.Array:
    """The sums over all devices of lower(up(rows), down[0]), plus down[1], for the device's own rows x [batch, rows,
    in]: [batch, rows, out] in x's dtype. The two halves of a device's rows visit the others in opposite directions, and
    each is followed by its sums. While the first rows travel, the first half of a device's own rows is multiplied by
    the first kernel; while the last sums travel, the second half is.

    early: rows of the next turn are sent before the sums of this one, so that links are busy while rows travel. Without
        it sums wait behind rows on slow links.
    """
    half = x.shape[1] // 2
    first, second = jax.lax.optimization_barrier((x[:, :half], x[:, half:]))  # arrays of one shape share one product
    rows, own = _both_ways((first, second), ring), up(first)
    rows, own = jax.lax.optimization_barrier((rows, own))  # else all of own rows would be multiplied at the end
    following = _both_ways(rows, ring) if ring.size > 2 else rows
    sums: Halves | None = None
    for turn in range(1, ring.size):
        raised, rows = up(jnp.concatenate(rows, axis=1)), following
        rows_follow = turn < ring.size - 2
        if early and rows_follow:
            parts = _lowered_whole(raised, sums, lower, down[0], x.dtype)
        else:
            parts, rows = _lowered_in_halves(raised, sums, rows, lower, down[0], x.dtype)
        if rows_follow:
            following = _both_ways(rows, ring)
        if early and rows_follow:
            parts, following = jax.lax.optimization_barrier((parts, following))
        else:
            rows, _ = jax.lax.optimization_barrier((rows, parts[1]))  # else they would be multiplied before sums are
        sums = _both_ways(parts, ring)
    result = lower(jnp.concatenate([own, up(second)], axis=1), down[0])
    if sums is not None:
        result = result + jnp.concatenate(sums, axis=1)
    if down[1] is not None:
        result = result + down[1].astype(jnp.float32)
    return result.astype(x.dtype)


def _lowered_in_halves(
    raised: jax.Array, sums: Halves | None, rows: Halves, lower: Lower, kernel: jax.Array, dtype: Any
) -> tuple[Halves, Halves]:
    """For each half of the rows of a turn, its product with the second kernel and what has arrived, in `dtype`; and the
    rows of the next turn, which are there before.

    The barrier gives each half its own copy of the kernel, as far as XLA:TPU can see, which is available only after the
    sums have arrived. So XLA makes two products, adds the sums within them, and copies no half of a common result.

    Args:
        raised: [batch, 2 * half, *out], the first product with the rows of both halves.
        sums: what has arrived for either half, [batch, half, out].
        rows: of the next turn.
        lower: the second product.
        kernel: [out, mlp].
        dtype: of the results.
    """
    kernels, raised, sums, rows = jax.lax.optimization_barrier(((kernel, kernel), raised, sums, rows))
    products = [lower(each, own) for each, own in zip(jnp.split(raised, 2, axis=1), kernels, strict=True)]
    if sums is not None:
        products = [product + arrived for product, arrived in zip(products, sums, strict=True)]
    return (products[0].astype(dtype), products[1].astype(dtype)), rows


def _lowered_whole(raised: jax.Array, sums: Halves | None, lower: Lower, kernel: jax.Array, dtype: Any) -> Halves:
    """What `_lowered_in_halves` returns of sums, from one product, whose halves are copied while the rows of the next
    turn travel.

    XLA:TPU seems to expect rows to travel faster than they do: it sends them just before the last product or fusion
    that precedes their use. Of two products that is the second, and one fusion that copies both halves follows the wait
    for the rows. Before copies that are no fusions it sends the rows in time.

    Args:
        raised: [batch, 2 * half, *out], the first product with the rows of both halves.
        sums: what has arrived for either half, [batch, half, out].
        lower: the second product.
        kernel: [out, mlp].
        dtype: of the results.
    """
    product = lower(raised, kernel)
    if sums is not None:
        product = product + jnp.concatenate(sums, axis=1)
    product = product.astype(dtype)
    half = product.shape[1] // 2
    first, product = jax.lax.optimization_barrier((product[:, :half], product))  # else one fusion makes both copies
    return first, product[:, half:]


def _links_take_longer(x: jax.Array, numbers: int, ring: Ring) -> bool:
    """Whether the rows and sums of a turn travel longer than its products take, on the chips of the ring.

    Args:
        x: [batch, rows, features], a device's own rows.
        numbers: those of a device's share of the kernels.
        ring: the devices.
    """
    if ring.chip is None:
        return False
    rows_and_sums = x.size * x.dtype.itemsize / ring.chip.ici_bytes_per_second  # half of either in each direction
    return rows_and_sums > 2 * x.shape[0] * x.shape[1] * numbers / ring.chip.bf16_flops


def _both_ways(halves: Halves, ring: Ring) -> Halves:
    """What the devices before and behind this one have sent: the first half goes ahead, the second one back."""
    return _sent(halves[0], ring, 1), _sent(halves[1], ring, -1)


def _scattered(sums: jax.Array, ring: Ring) -> jax.Array:
    """What the devices have of sums [batch, seq, out], added up: each one's own rows [batch, rows, out]."""
    batch, seq, out = sums.shape
    # Rows of a device come first: along an inner dimension XLA:TPU makes a whole all-reduce of it.
    by_device = sums.reshape(batch, ring.size, -1, out).swapaxes(0, 1).reshape(-1, out)
    own = jax.lax.psum_scatter(by_device, ring.axis, scatter_dimension=0, tiled=True)
    return own.reshape(batch, seq // ring.size, out)


def _gathered(x: jax.Array, multiply: Multiply, ring: Ring) -> jax.Array:
    """multiply(all rows) [batch, seq, *out] of the rows x [batch, rows, in] of each device. Each row goes round half of
    the ring, half of those of the device opposite in either direction.

    Where VMEM has no room for the result, the halves of a device's rows travel apart all the way: XLA copies half of
    what has arrived before it sends that on. Else they travel together, which takes fewer permutes.
    """
    size, rows, here = ring.size, x.shape[1], jax.lax.axis_index(ring.axis)
    half = rows // 2
    result = jax.eval_shape(multiply, x)
    small = size * result.size * result.dtype.itemsize <= _IN_VMEM_BYTES
    together = small and (ring.chip is None or ring.chip.name in _CHIPS_WITH_ROOM)
    # Without the barrier XLA multiplies halves of what is whole, and what is in halves as one.
    own = jax.lax.optimization_barrier((x,) if together else (x[:, :half], x[:, half:]))
    gathered = jax.lax.empty((len(x), size * rows, *result.shape[2:]), result.dtype)

    def put(gathered: jax.Array, product: jax.Array, before: int, first: int) -> jax.Array:
        """With the product of rows of the device `before` places before this one, of which the first is `first`."""
        return jax.lax.dynamic_update_slice_in_dim(gathered, product, (here - before) % size * rows + first, 1)

    firsts = (0,) if together else (0, half)
    products = [multiply(each) for each in own]
    for first, product in zip(firsts, products, strict=True):
        gathered = put(gathered, product, 0, first)
    travelling = [(first, step, each) for first, each in zip(firsts, own, strict=True) for step in (1, -1)]
    for turn in range(1, size // 2 + 1):
        if 2 * turn == size and together:
            (_, _, ahead), (_, _, back) = travelling
            travelling = [(0, 1, ahead[:, :half]), (half, -1, back[:, half:])]
        elif 2 * turn == size:
            travelling = [each for each in travelling if (each[0] == 0) == (each[1] > 0)]
        travelling = [(first, step, _sent(piece, ring, step)) for first, step, piece in travelling]
        for first, step, arrived in travelling:
            gathered = put(gathered, multiply(arrived), step * turn, first)
    if ring.chip is None or not together:
        return gathered
    return in_vmem(gathered, _outside(gathered))  # XLA:TPU would keep it in HBM on v5e
