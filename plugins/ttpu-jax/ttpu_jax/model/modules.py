"""The parts that all modules of the decoder share: the view of the parameters, the values of one forward step, and the
smallest Flax NNX modules, which are built from specs and know no model type.

Custom mixers, blocks and embeddings use these too (see `ttpu_jax.model.custom`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ttpu_core.sharding.stream import STREAM_ROWS, cuts_rows
from ttpu_core.sharding.training_state import GATE, UP
from ttpu_core.spec import LayerSpec, MLPSpec, NormSpec, Parameter, RopeSpec, axes
from ttpu_core.spec.parameters import SHARED
from ttpu_jax.ops.activation import activate, gated_activation, sparsify, xielu
from ttpu_jax.ops.few_tokens import ExpertsForm
from ttpu_jax.ops.kernels import dense
from ttpu_jax.ops.linear import linear
from ttpu_jax.ops.masters import Master
from ttpu_jax.ops.matmul.devices import Devices, UsePallas
from ttpu_jax.ops.matmul.rings import Ring, StreamForm, ring_mlp
from ttpu_jax.ops.matmul.trained import Axes, GradientRing, gradient_ring, trained_product, trained_products
from ttpu_jax.ops.norm import normalize
from ttpu_jax.ops.parts import Part, part
from ttpu_jax.ops.saved import saved
from ttpu_jax.optimizations import Optimization
from ttpu_jax.params.placement import Placement

if TYPE_CHECKING:
    from ttpu_jax.model.step_cache import Keys

FLOAT32 = np.dtype(np.float32)
RESIDUAL = (axes.BATCH, axes.SEQUENCE, None)
"""Axes of the residual stream [batch, seq, hidden]: its features are whole on every device."""


@dataclass(frozen=True)
class Runtime:
    """The settings that all layers share and that never change: the placement of arrays, the attention implementation
    and its options, the model's different ropes, the number of rows from which products are widened (see
    `ttpu_jax.ops.linear`), whether Pallas kernels multiply by quantized kernels, the dtype of activations where no
    dense embedding table gives it, and whether the axes that cut MLPs cut the sequence of the residual stream too, so
    that devices share norms, rounding and additions, and gather rounded activations; the form in which experts are
    computed (`ttpu_jax.ops.few_tokens`); where the residual stream is cut and products exchange its rows around a ring
    (`ttpu_jax.ops.matmul.rings`); whether products are those of training (`ttpu_jax.ops.matmul.trained`); and the
    optimizations that are left out for comparison. Static."""

    placement: Placement
    attention: str = "eager"
    ropes: tuple[RopeSpec, ...] = ()
    attention_options: tuple[tuple[str, Any], ...] = ()
    widen_rows: int | None = None
    use_pallas: UsePallas = "auto"
    dtype: np.dtype[Any] = FLOAT32
    cuts_stream: bool = False
    experts: ExpertsForm = "auto"
    stream: StreamForm = "whole"
    trains: bool = False
    without: frozenset[Optimization] = frozenset()

    @property
    def rotates_by_product(self) -> bool:
        """Whether ropes are applied as products: on TPUs."""
        return self.placement.platform == "tpu" and Optimization.ROPE_PRODUCT not in self.without

    @property
    def fuses_norms(self) -> bool:
        """Whether norms compute the root for each feature (`ttpu_jax.ops.norm.normalize`): on TPUs, except in training.
        """
        return self.placement.platform == "tpu" and Optimization.FUSED_NORMS not in self.without

    def in_training(self) -> Runtime:
        """This runtime for a training step, which has products of its own, and no fused norms: their backward pass
        would compute with the root of each feature."""
        without = self.without | {Optimization.FUSED_NORMS}
        return replace(self, trains=self.has_trained_products, without=without)

    @property
    def has_trained_products(self) -> bool:
        """Whether products of a training step are those of `ttpu_jax.ops.matmul.trained`: on TPUs."""
        return self.placement.platform == "tpu" and Optimization.TRAINED_PRODUCTS not in self.without

    def gradient_ring(self, kernel: tuple[Axes, ...], rows: tuple[Axes, ...]) -> GradientRing | None:
        """The devices that sum the gradient of a kernel in a ring, see `ttpu_jax.ops.matmul.trained.gradient_ring`."""
        if Optimization.GRADIENT_RINGS in self.without:
            return None
        sums_in_hbm = self.placement.platform == "tpu" and Optimization.SUMS_IN_HBM not in self.without
        across = self.placement.axes_across_slices
        return gradient_ring(self.placement.mesh, kernel, rows, sums_in_hbm=sums_in_hbm, across=across)


class SharedParam(nnx.Param):
    """A parameter that several layers use."""


@dataclass(frozen=True)
class Parameters:
    """A view on a flat dict of arrays and on the parameter table, below a path. What is not there is looked up below
    `shared`, the path of parameters that the layer shares with others."""

    arrays: Mapping[str, jax.Array]
    table: Mapping[str, Parameter]
    prefix: str = ""
    shared: str | None = None

    def at(self, path: str) -> Parameters:
        """The view below `path`."""
        shared = None if self.shared is None else f"{self.shared}{path}."
        return replace(self, prefix=f"{self.prefix}{path}.", shared=shared)

    def of_layer(self, path: str, layer: LayerSpec) -> Parameters:
        """The view on a layer's parameters below `path`, and on those that it shares."""
        shared = layer.block.shared
        return replace(self.at(path), shared=None if shared is None else f"{SHARED}{shared.block}.")

    def get(self, name: str) -> nnx.Param | None:
        """The parameter as an NNX variable that carries its logical axes; None where the spec has none of this name."""
        path, kind = self.prefix + name, nnx.Param
        if path not in self.table and self.shared is not None:
            path, kind = self.shared + name, SharedParam
        if path not in self.table:
            return None
        return kind(self.arrays[path], axis_names=self.table[path].axes)

    def __getitem__(self, name: str) -> nnx.Param:
        variable = self.get(name)
        if variable is None:
            raise KeyError(self.prefix + name)
        return variable


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Step:
    """The values that all layers share in one forward pass, independent of the cache.

    query_positions: [batch, seq], negative for padding.
    angles: cos and sin for each of the runtime's ropes, by feature if the runtime rotates by product.
    adapters: int32 [tokens], the LoRA adapter of each token, 0 for none; None where there are none.
    segments: int32 [batch, seq], the sequence that each token belongs to where a row holds several, from 1; 0 for
        padding; None where each row holds one.
    last_only: a layer's output is wanted for the last token alone. Static.
    routing: routers keep the loads of their experts (`ttpu_jax.model.moe.ExpertLoads`). Static.
    """

    query_positions: jax.Array
    angles: tuple[tuple[jax.Array, jax.Array], ...]
    adapters: jax.Array | None = None
    segments: jax.Array | None = None
    last_only: bool = field(default=False, metadata={"static": True})
    routing: bool = field(default=False, metadata={"static": True})

    @property
    def valid(self) -> jax.Array:
        """bool [batch, seq], true for tokens that are not padding."""
        return self.query_positions >= 0

    @property
    def wanted(self) -> Step:
        """The step of the tokens for which a layer's output is wanted. Adapters, which only steps over pages have, are
        left: those want all tokens."""
        if not self.last_only:
            return self
        angles = tuple((cos[:, -1:], sin[:, -1:]) for cos, sin in self.angles)
        segments = None if self.segments is None else self.segments[:, -1:]
        return replace(self, query_positions=self.query_positions[:, -1:], angles=angles, segments=segments)

    @property
    def starts(self) -> jax.Array | None:
        """bool [batch, seq], true for the first token of each sequence in a row; None where each row holds one."""
        if self.segments is None:
            return None
        before = jnp.pad(self.segments, ((0, 0), (1, 0)))[:, :-1]
        return self.valid & (self.segments != before)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerInputs:
    """The inputs of a layer beside the residual stream: `keys`, another layer's keys and values, for a layer without
    its own; `beside` [batch, seq, features] from a custom embedding; `embedding` [batch, seq, hidden], what went into
    the first layer, for a layer that reads it."""

    keys: Keys | None = None
    beside: jax.Array | None = None
    embedding: jax.Array | None = None


class WithShortcut(NamedTuple):
    """The residual stream, and what the layer before has left for behind the next one, both [batch, seq, hidden]."""

    stream: jax.Array
    shortcut: jax.Array


Stream = jax.Array | WithShortcut
"""What goes from layer to layer."""


class Norm(nnx.Module):
    """Normalisation with its own scale and bias.

    Args:
        spec: the kind of norm.
        values: of the norm, scale and bias or neither.
        over: number of trailing axes over which statistics run.
        features: how many of what is there they count, if some of it is padding.
        by_feature: see `ttpu_jax.ops.norm.normalize`.
    """

    def __init__(
        self,
        spec: NormSpec,
        values: Parameters,
        over: int = 1,
        features: int | None = None,
        *,
        by_feature: bool = False,
    ) -> None:
        self.spec, self.over, self.features, self.by_feature = spec, over, features, by_feature
        self.scale, self.bias = values.get("scale"), values.get("bias")

    @part(Part.NORM)
    def __call__(self, x: jax.Array, total: jax.Array | None = None) -> jax.Array:
        """x [..., features]: the same shape. `total` [..., 1] is the sum of its squares, if it is known."""
        scale, bias = value_of(self.scale), value_of(self.bias)
        over, features, by_feature = self.over, self.features, self.by_feature
        return normalize(x, self.spec, scale, bias, axes=over, features=features, by_feature=by_feature, total=total)

    def is_like(self, other: Norm) -> bool:
        """Whether both norms do the same with the features of a single head, but for the values of scale and bias."""
        shapes = [getattr(value_of(each), "shape", None) for one in (self, other) for each in (one.scale, one.bias)]
        of_heads = all(len(shape) == 1 for shape in shapes if shape is not None)
        same = (self.spec, self.over, self.features) == (other.spec, 1, other.features) and shapes[:2] == shapes[2:]
        return same and of_heads and self.over == 1

    @part(Part.NORM)
    def but_for(self, head: int, other: Norm, x: jax.Array) -> jax.Array:
        """Norm x [..., heads, features], one head by another norm, which is like this one: the same shape."""
        is_other = jnp.arange(x.shape[-2])[:, None] == head
        scale, bias = (
            None if one is None else jnp.where(is_other, others, one)
            for one, others in (
                (value_of(self.scale), value_of(other.scale)),
                (value_of(self.bias), value_of(other.bias)),
            )
        )
        return normalize(x, self.spec, scale, bias, features=self.features, by_feature=self.by_feature)


class Linear(nnx.Module):
    """x @ kernel.T + bias, whatever the kernel is: dense, quantized, or with LoRA adapters (`ttpu_jax.ops.kernels`).

    A shared kernel may have an update b @ a of the layer's own. Where several projections are fused in the kernel [kv,
    slots, dim, in], each has an a of its own, and `slots` counts their slots. `saved_as` names the result for policies
    that keep it for the backward pass (`ttpu_jax.ops.saved`)."""

    def __init__(
        self, values: Parameters, runtime: Runtime, slots: tuple[int, ...] = (), saved_as: str | None = None
    ) -> None:
        self.runtime, self.slots, self.saved_as = runtime, tuple(filter(None, slots)), saved_as
        self.kernel, self.bias = values["kernel"], values.get("bias")
        self.update_a, self.update_b = values.get("update.a"), values.get("update.b")

    def __call__(self, x: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
        """x [..., in]: [..., *out]."""
        return saved(self._product(x, out_dtype), self.saved_as)

    def _product(self, x: jax.Array, out_dtype: jnp.dtype | None) -> jax.Array:
        kernel, bias = value_of(self.kernel), value_of(self.bias)
        if self._trains:
            ring = self.runtime.gradient_ring(*kernel_and_row_axes(x, self.kernel, self.runtime))
            wide = (out_dtype or x.dtype) if bias is None else jnp.dtype(jnp.float32)
            return _biased(trained_product(x, dense(kernel), wide, ring), bias, out_dtype or x.dtype)
        on_one_device, widen_rows = self.runtime.placement.mesh is None, self.runtime.widen_rows
        devices = product_devices(x, self.kernel, self.runtime)
        product = linear(
            x, kernel, bias, out_dtype=out_dtype, flatten=on_one_device, widen_rows=widen_rows, devices=devices
        )
        return product if self.update_a is None else (product + self._update(x)).astype(product.dtype)

    def each(self, x: jax.Array, out_dtype: jnp.dtype) -> tuple[jax.Array, ...]:
        """The products of x [..., in] with the kernels that are fused along the first dimension of this one: [...,
        *out] each."""
        if not self._trains:
            product, rest = self(x, out_dtype), (slice(None),) * (len(value_of(self.kernel).shape) - 2)
            return tuple(product[(..., number, *rest)] for number in range(product.shape[x.ndim - 1]))
        kernel, bias = value_of(self.kernel), value_of(self.bias)
        of_kernel, of_rows = kernel_and_row_axes(x, self.kernel, self.runtime)
        ring = None if of_kernel[0] else self.runtime.gradient_ring(of_kernel[1:], of_rows)
        wide = out_dtype if bias is None else jnp.dtype(jnp.float32)
        kernels = kernel.each() if isinstance(kernel, Master) else tuple(kernel)
        products = trained_products(x, kernels, wide, ring)
        biases = (None,) * len(products) if bias is None else bias
        return tuple(_biased(one, bias, out_dtype) for one, bias in zip(products, biases, strict=True))

    @property
    def _trains(self) -> bool:
        return self.runtime.trains and isinstance(value_of(self.kernel), jax.Array | Master) and self.update_a is None

    @property
    def is_plain(self) -> bool:
        """Whether the product is that of a dense kernel alone."""
        return self.update_a is None and isinstance(value_of(self.kernel), jax.Array)

    @property
    def arrays(self) -> tuple[jax.Array, jax.Array | None]:
        """The kernel [*out, in], if it is dense, and the bias [*out] if there is one."""
        return value_of(self.kernel), value_of(self.bias)

    def _update(self, x: jax.Array) -> jax.Array:
        """float32 [..., *out]: x [..., in] times b @ a."""
        a, b = value_of(self.update_a), value_of(self.update_b)
        wide, on_one_device = jnp.dtype(jnp.float32), self.runtime.placement.mesh is None
        narrow = linear(x, a, flatten=on_one_device)
        if len(a) == 1:
            return linear(narrow[..., 0, :], b, out_dtype=wide, flatten=on_one_device)
        parts = jnp.split(b, np.cumsum(self.slots)[:-1], axis=1)
        each = (
            linear(narrow[..., i, :], part, out_dtype=wide, flatten=on_one_device) for i, part in enumerate(parts)
        )
        return jnp.concatenate(list(each), axis=-2)


def _biased(product: jax.Array, bias: jax.Array | None, dtype: Any) -> jax.Array:
    return product if bias is None else (product + bias.astype(jnp.float32)).astype(dtype)


class XIELU(nnx.Module):
    """The activation xIELU with its learned constants."""

    def __init__(self, values: Parameters) -> None:
        self.alpha_p, self.alpha_n = values["alpha_p"], values["alpha_n"]
        self.beta, self.eps = values["beta"], values["eps"]

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., features]: the same shape."""
        return xielu(x, self.alpha_p[...], self.alpha_n[...], self.beta[...], self.eps[...])


class MLP(nnx.Module):
    """Gated or plain feed-forward layer."""

    def __init__(self, spec: MLPSpec, values: Parameters, runtime: Runtime) -> None:
        self.spec, self.runtime = spec, runtime
        if spec.gated:
            self.gate_up = Linear(values.at("gate_up"), runtime)
        else:
            self.up = Linear(values.at("up"), runtime)
        self.xielu = XIELU(values.at("activation")) if spec.activation.name == "xielu" else None
        inner, fuses = spec.inner_norm, runtime.fuses_norms
        self.inner_norm = Norm(inner, values.at("inner_norm"), by_feature=fuses) if inner else None
        self.down = Linear(values.at("down"), runtime)

    @part(Part.MLP)
    def __call__(self, x: jax.Array) -> jax.Array:
        """x [batch, seq, hidden]: the same shape."""
        first, ring = self._first, self.ring(x)
        if ring is not None:
            return ring_mlp(x, first.arrays, self.down.arrays, self._activate, ring)
        x = with_whole_rows(x, self.runtime)
        if self.runtime.trains and self.spec.gated:
            gate, up = self.gate_up.each(x, x.dtype)
            inner = self._gated(saved(gate, GATE), saved(up, UP)).astype(x.dtype)
        else:
            wide = x.dtype if self.runtime.trains else jnp.dtype(jnp.float32)
            inner = self._activate(first(x, wide)).astype(x.dtype)
        if self.inner_norm is not None:
            inner = self.inner_norm(inner)
        inner = self.runtime.placement.constrain(inner, axes.BATCH, axes.SEQUENCE, axes.MLP)
        return self.down(inner)

    def ring(self, x: jax.Array) -> Ring | None:
        """The devices that exchange the rows of x [batch, seq, hidden] while they multiply, if they do."""
        plain = self._each_feature_alone() and self._first.is_plain and self.down.is_plain
        return ring_of(x, self.runtime) if plain else None

    @property
    def _first(self) -> Linear:
        return self.gate_up if self.spec.gated else self.up

    def _activate(self, raised: jax.Array) -> jax.Array:
        """From the first product [batch, rows, mlp], or of gate and up [batch, rows, 2, mlp]: [batch, rows, mlp]."""
        if self.spec.gated:
            return self._gated(saved(raised[..., 0, :], GATE), saved(raised[..., 1, :], UP))
        raised = sparsify(saved(raised, UP), self.spec.sparsity)
        return self.xielu(raised) if self.xielu else activate(raised, self.spec.activation)

    def _gated(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        multiplier = self.spec.gate_multiplier
        gate = gate if multiplier == 1.0 else gate * multiplier
        return gated_activation(sparsify(gate, self.spec.sparsity), up, self.spec.activation)

    def _each_feature_alone(self) -> bool:
        """Whether an inner feature depends on nothing that another device has."""
        return not self.spec.sparsity and self.inner_norm is None and self.xielu is None


def product_devices(x: jax.Array, variable: nnx.Param, runtime: Runtime) -> Devices:
    """Where the product of x [..., in] with the kernel [*out, in] of a variable runs. A mesh axis that shards x's batch
    or sequence as well as the kernel shards x alone: the kernel is gathered along it."""
    placement = runtime.placement
    if placement.mesh is None:
        return Devices(placement.platform, use_pallas=runtime.use_pallas)
    of_kernel, rows = kernel_and_row_axes(x, variable, runtime)
    taken = {axis for each in rows for axis in each}
    kept = tuple(tuple(axis for axis in each if axis not in taken) for each in of_kernel)
    return Devices(placement.platform, placement.mesh, kept, rows, runtime.use_pallas, stream_axes(x, runtime))


def kernel_and_row_axes(
    x: jax.Array, variable: nnx.Param, runtime: Runtime
) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
    """The mesh axes that shard each dimension of the kernel [*out, in] of a variable, and each of x [..., in] but the
    last."""
    placement, shape = runtime.placement, value_of(variable).shape
    leading = (axes.BATCH, axes.SEQUENCE) if x.ndim == 3 else (None,) * (x.ndim - 1)
    rows = tuple(
        () if axis is None else placement.mesh_axes(axis, size) for axis, size in zip(leading, x.shape, strict=False)
    )
    logical = placement.divisible(variable.axis_names[-len(shape) :], shape)
    return placement.array_axes(logical, shape, "a kernel"), rows


def stream_axes(x: jax.Array, runtime: Runtime) -> tuple[str, ...]:
    """The mesh axes that cut the sequence of x [batch, seq, ...], beside those that shard every activation's. Empty
    for a few tokens, whose exchange takes as long as that of one."""
    placement = runtime.placement
    if not runtime.cuts_stream or placement.mesh is None or x.ndim != 3:
        return ()
    sharded = (*placement.mesh_axes(axes.BATCH, x.shape[0]), *placement.mesh_axes(axes.SEQUENCE, x.shape[1]))
    found = placement.axes_of(axes.MLP)
    ways = prod(placement.mesh.shape[axis] for axis in (*placement.mesh_axes(axes.SEQUENCE, x.shape[1]), *found))
    enough = x.shape[1] % ways == 0 and x.shape[1] // ways >= STREAM_ROWS
    return found if enough and not set(found) & set(sharded) else ()


def ring_of(x: jax.Array | jax.ShapeDtypeStruct, runtime: Runtime) -> Ring | None:
    """The devices that cut the rows of the residual stream x [batch, seq, ...] and exchange them around a ring; None
    where its rows are whole.

    These are the devices along the mesh axis that shards heads and MLPs, if one does. On v5e and v6e each gets rows
    enough for products that take as long as sending them on.
    """
    placement = runtime.placement
    if runtime.stream == "whole" or not isinstance(placement.mesh, Mesh) or x.ndim != 3:
        return None
    if runtime.stream == "auto" and placement.platform != "tpu":
        return None
    found = placement.axes_of(axes.MLP)
    batch = placement.mesh_axes(axes.BATCH, x.shape[0])
    if len(found) != 1 or placement.axes_of(axes.KV_HEADS) != found or found[0] in batch:
        return None
    if placement.axes_of(axes.SEQUENCE):
        return None
    size, seq = placement.mesh.shape[found[0]], x.shape[1]
    rows = placement.part(axes.BATCH, x.shape[0])
    worth = runtime.stream == "rings" or cuts_rows(rows, seq, size, placement.chip)
    return Ring(placement.mesh, found[0], batch) if seq % (2 * size) == 0 and worth else None


def with_whole_rows(x: jax.Array, runtime: Runtime) -> jax.Array:
    """x [batch, seq, ...], which the devices of a ring may have cut, with all rows on each of them."""
    if ring_of(x, runtime) is None:
        return x
    return runtime.placement.constrain(x, *RESIDUAL)


def into_layers(x: jax.Array, runtime: Runtime) -> jax.Array:
    """Constrain the sharding of what the first layer takes, x [batch, seq, ...]: the same shape. Its rows are whole, or
    those that each device of a ring keeps."""
    if ring_of(x, runtime) is not None:
        return constrain_stream(x, runtime)
    return runtime.placement.constrain(x, *RESIDUAL, *(None,) * (x.ndim - len(RESIDUAL)))


def constrain_stream(x: jax.Array, runtime: Runtime) -> jax.Array:
    """Constrain the sharding of the residual stream x [batch, seq, hidden]: the same shape."""
    ring = ring_of(x, runtime)
    if ring is not None:
        return jax.lax.with_sharding_constraint(x, NamedSharding(ring.mesh, ring.cut_rows))
    placement, cut = runtime.placement, stream_axes(x, runtime)
    if placement.mesh is None or not cut:
        return placement.constrain(x, *RESIDUAL)
    batch, sequence = placement.mesh_axes(axes.BATCH, x.shape[0]), placement.mesh_axes(axes.SEQUENCE, x.shape[1])
    partition = PartitionSpec(batch or None, (*sequence, *cut), None)
    return jax.lax.with_sharding_constraint(x, NamedSharding(placement.mesh, partition))


def different_ropes(layers: tuple[LayerSpec, ...]) -> tuple[RopeSpec, ...]:
    """The different ropes of a model's layers, in order of appearance."""
    ropes = (layer.mixer.rope for layer in layers)
    return tuple(dict.fromkeys(rope for rope in ropes if rope is not None and rope.type != "none"))


def maybe(norm: Norm | None, x: jax.Array) -> jax.Array:
    """Return `norm(x)`, or x where `norm` is None. x is [..., features], and the result has the same shape."""
    return x if norm is None else norm(x)


def value_of(variable: nnx.Param | None) -> Any:
    """The array or kernel in a variable, None where it is absent."""
    return None if variable is None else variable.get_value()
