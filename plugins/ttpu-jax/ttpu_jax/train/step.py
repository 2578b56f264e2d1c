"""A training step: one optimizer update of a model's parameters on a batch of rows. Loss, optimizer, gradient
accumulation, the trained parameters and the stage of ZeRO are arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from ttpu_core.errors import RequestError
from ttpu_core.sharding.padding import Paddings
from ttpu_core.sharding.training_state import ADAMW, TrainingState
from ttpu_core.spec import Parameter, axes
from ttpu_core.spec.parameters import GROUPS, LAYERS
from ttpu_jax.model.causal_model import DecoderModel, Params
from ttpu_jax.model.loss import LossSums, TokenBatch, summed_cross_entropy
from ttpu_jax.ops.masters import Master
from ttpu_jax.ops.matmul.trained import LANES
from ttpu_jax.ops.parts import Part, part
from ttpu_jax.optimizations import Optimization
from ttpu_jax.params.padding import project_gradients, squared_norm
from ttpu_jax.params.placement import Placement
from ttpu_jax.train.backward_loop import LayerGradients, lies_as_rows
from ttpu_jax.train.offload import HOST, Offload
from ttpu_jax.train.pipeline import gradients_by_1f1b
from ttpu_jax.train.zero import ZeroPlacements

LEARNING_RATE = 1e-4
CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_
TABLE = "embed.embedding"
"""The path of the table of tokens."""


class Loss(Protocol):
    """The function to minimize."""

    def __call__(self, model: DecoderModel, params: Params, batch: TokenBatch) -> LossSums:
        """Its sums over a batch."""
        ...


class WholeBatch(Protocol):
    """Figures of a batch that the loss of each of its rows depends on."""

    def __call__(self, model: DecoderModel, params: Params, batch: TokenBatch) -> Mapping[str, jax.Array]:
        """Their sums, float32 scalars, which add up over parts of a batch."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Figures:
    """What an update says of itself: scalars on devices.

    Attributes:
        sums: of the whole batch, before the update.
        grad_norm: float32, of all trained parameters' gradients before clipping; copies count once.
        learning_rate: float32; 0 if the optimizer has its own.
        skipped: bool, nothing was changed because the gradients were not finite.
    """

    sums: LossSums
    grad_norm: jax.Array
    learning_rate: jax.Array
    skipped: jax.Array

    @property
    def loss(self) -> jax.Array:
        """What is minimized, as the mean over the batch: a float32 scalar."""
        return self.sums.total / _count(self.sums)


def every_parameter(path: str) -> bool:
    """Accept every parameter, so that all of them are trained."""
    return True


def adamw(learning_rate: Any = LEARNING_RATE, state: TrainingState = ADAMW) -> optax.GradientTransformation:
    """AdamW whose moments are what `state` says."""
    return optax.adamw(learning_rate, mu_dtype=np.dtype(state.moment_dtype))


@dataclass(frozen=True, eq=False)
class TrainStep:
    """Call it inside jit, with parameters and optimizer state donated.

    Attributes:
        model: made with the `remat` of the training state, and of the padded architecture.
        dtype: what the model computes in; parameters whose table names a dtype keep it.
        paddings: how parameters are padded for the mesh: a step leaves replicas equal and zeros zero.
        loss: the function to minimize, as the mean over a batch.
        optimizer: an optax transformation; its state is that of the trained parameters alone.
        accumulation: parts that a batch is computed in, one after the other; the update is that of the whole batch.
        trainable: path → whether a parameter is trained. The others leave the step bit for bit as they came.
        learning_rate: number of the update → what the optimizer's direction is multiplied by; None if the optimizer
            does so.
        max_grad_norm: gradients are scaled down to this norm; None clips nothing.
        skip_nonfinite: an update whose gradients are not finite changes nothing.
        zero: where weights, gradients and optimizer state lie; None: all of them where the weights do.
        rows_per_example: rows that belong together, such as the two of a pair: parts of a batch do not divide them.
        of_whole_batch: sums over all rows that the loss of each row depends on, computed without gradients before the
            loss, which finds their totals in `TokenBatch.shared`.
        interleaved: the parts of a batch are the microbatches of a pipeline by 1F1B, for a model whose layers the mesh
            divides into stages.
        noise: number of the update, part → what the loss's parameters hold beside the model's, from which it draws.
        offload: how the optimizer's state is held on the host; None holds it on the devices.
    """

    model: DecoderModel
    dtype: np.dtype[Any]
    paddings: Paddings = field(default_factory=dict)
    loss: Loss = summed_cross_entropy
    optimizer: optax.GradientTransformation = field(default_factory=adamw)
    accumulation: int = 1
    trainable: Callable[[str], bool] = every_parameter
    learning_rate: Callable[[jax.Array], jax.Array] | None = None
    max_grad_norm: float | None = None
    skip_nonfinite: bool = False
    zero: ZeroPlacements | None = None
    rows_per_example: int = 1
    of_whole_batch: WholeBatch | None = None
    noise: Callable[[jax.Array | int, jax.Array | int], Params] | None = None
    offload: Offload | None = None
    interleaved: bool = False

    def init(self, params: Params) -> Any:
        """The optimizer's state before the first step; for use inside jit, or of shapes with `jax.eval_shape`."""
        return self.optimizer.init(self._trained(params))

    def abstract_state(self, params: Mapping[str, jax.ShapeDtypeStruct]) -> Any:
        """Shapes and shardings of the optimizer's state: moments lie where their weights do, the scales of their blocks
        too where devices divide the blocks, and what has another shape lies whole on every device."""
        placement, trained = self.model.runtime.placement, self._trained(params)
        whole = placement.sharding((), (), "the step count")

        def like(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey) and key.key in trained]
            weight = trained[names[-1]] if names else None
            sharding = whole
            if weight is not None and leaf.shape == weight.shape:
                sharding = weight.sharding if self.offload is None else weight.sharding.with_memory_kind(HOST)
            elif weight is not None and leaf.ndim == weight.ndim and leaf.shape[:-1] == weight.shape[:-1]:
                sharding = _of_blocks(weight.sharding, leaf.shape)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree_util.tree_map_with_path(like, jax.eval_shape(self.optimizer.init, trained))

    def __call__(
        self, params: Params, state: Any, batch: TokenBatch, number: jax.Array | int = 0
    ) -> tuple[dict[str, Any], Any, Figures]:
        """One update.

        Args:
            params: path → master weight.
            state: of the optimizer.
            batch: rows of tokens.
            number: int32 scalar, how many updates came before.

        Returns:
            The parameters and the optimizer's state after the update, and its figures.

        Raises:
            RequestError: rows that `accumulation` does not divide.
        """
        trained = self._trained(params)
        sums, gradients = self._gradients(params, batch, number)
        gradients = project_gradients(gradients, self.model.spec, self.paddings, stacked=self.model.stacked)
        squares = squared_norm(gradients, self.model.spec, self.paddings, stacked=self.model.stacked)
        norm = jnp.sqrt(squares)
        if self.max_grad_norm is not None:
            scale = jnp.minimum(1.0, self.max_grad_norm / (norm + CLIP_EPSILON))
            gradients = jax.tree.map(lambda gradient: gradient * scale, gradients)
        rate = jnp.float32(0) if self.learning_rate is None else self.learning_rate(jnp.asarray(number))
        finite = jnp.isfinite(norm) & jnp.isfinite(sums.total)
        skipped = ~finite if self.skip_nonfinite else jnp.asarray(False)
        update = partial(self._updated, rate, skipped)
        if self.offload is None:
            updated, after = update(self.optimizer, trained, state, gradients)
        else:
            updated, after = self.offload(update, trained, state, gradients)
        return {**params, **updated}, after, Figures(sums, norm, rate, skipped)

    @part(Part.OPTIMIZER)
    def _updated(
        self,
        rate: jax.Array,
        skipped: jax.Array,
        optimizer: optax.GradientTransformation,
        params: dict[str, jax.Array],
        state: Any,
        gradients: dict[str, jax.Array],
    ) -> tuple[dict[str, jax.Array], Any]:
        """Parameters and their optimizer's state after an update, or as they were if it is skipped."""
        updates, after = optimizer.update(gradients, state, params)
        if self.learning_rate is not None:
            updates = jax.tree.map(lambda update: -rate * update, updates)
        updated = optax.apply_updates(params, updates)
        if self.skip_nonfinite:
            updated, after = jax.tree.map(
                lambda new, old: jnp.where(skipped, old, new), (updated, after), (params, state)
            )
        return updated, after

    def sums(self, weights: Params, batch: TokenBatch) -> LossSums:
        """The sums of a batch that is computed at once, with weights as `computed` gives them."""
        return self.loss(self.model, weights, self._with_whole(weights, batch, 1))

    def computed(self, params: Params) -> dict[str, Any]:
        """The parameters as the model computes with them: dense ones rounded to `dtype`, where weights lie."""
        table = self.model.parameters

        def rounded(path: str, value: Any) -> Any:
            if not isinstance(value, jax.Array):
                return value
            value = value.astype(self.dtype) if table[path].dtype is None else value
            return value if self.zero is None else _constrained(value, self.zero.weight(path, table[path]))

        return {path: rounded(path, value) for path, value in params.items()}

    def _trained(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {path: value for path, value in params.items() if self.trainable(path)}

    @property
    def _rounds_where_used(self) -> bool:
        """Whether layers round their master weights themselves. Stages of a pipeline and adapted kernels read rounded
        weights, and ZeRO's stages 1 and 2 gather the weights once an update."""
        as_they_lie = self.zero is None or self.zero.stage in (0, 3)
        return as_they_lie and not self.interleaved and self.model.takes_masters

    def _weights(self, params: Params) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the model computes with, and of the trained parameters what the gradients are taken with respect to:
        path → weight, or slot or value of a `Master`."""
        if not self._rounds_where_used:
            weights = self.computed(params)
            return weights, self._trained(weights)
        table = self.model.parameters
        masters = {path: value for path, value in params.items() if self._is_master(path, value)}
        weights = self.computed({path: value for path, value in params.items() if path not in masters})
        trained = self._trained(weights)
        for path, value in masters.items():
            if path == TABLE:  # its rows' gradients are added up in float32
                weights[path] = Master(value, None, self.dtype)
                trained |= self._trained({path: value})
                continue
            lies = self.model.runtime.placement.parameter(path, table[path])
            named = lies if isinstance(lies, NamedSharding) else None
            of_layer = named and NamedSharding(named.mesh, PartitionSpec(*named.spec[path.startswith(GROUPS) :]))
            of_experts = axes.EXPERT in table[path].axes
            weights[path] = Master(value, None, self.dtype, of_layer, self._is_taken_apart(path), of_experts)
            if self.trainable(path):
                slot = jnp.zeros(value.shape, self.dtype)
                trained[path] = slot if named is None else jax.lax.with_sharding_constraint(slot, named)
        return weights, trained

    def _is_master(self, path: str, value: Any) -> bool:
        """Whether a parameter is rounded where it is used: those of layers, and the table of tokens. On TPUs a weight
        whose features on a device do not fill lanes is not: the compiler (libtpu 0.0.42) would copy the float32 weights
        of all layers to another order of dimensions before the loop, which takes twice the memory of rounded ones."""
        parameter = self.model.parameters[path]
        wider = isinstance(value, jax.Array) and parameter.dtype is None and value.dtype.itemsize > self.dtype.itemsize
        table = path == TABLE and self.model.spec.embedding.custom is None
        return wider and (table or (path.startswith((GROUPS, LAYERS)) and self._lies_as_used(path)))

    def _lies_as_used(self, path: str) -> bool:
        on_tpu = self.model.runtime.placement.platform == "tpu"
        return not on_tpu or not path.endswith("kernel") or self._is_taken_apart(path) or self._fills_lanes(path)

    def _fills_lanes(self, path: str) -> bool:
        """Whether the last dimension of a parameter fills lanes on each device."""
        parameter = self.model.parameters[path]
        lies = self.model.runtime.placement.parameter(path, parameter)
        return lies.shard_shape(parameter.shape)[-1] % LANES == 0

    def _is_taken_apart(self, path: str) -> bool:
        """Whether a layer's module takes a stacked kernel apart before it rounds it."""
        return self.model.runtime.trains and path.endswith(".mlp.gate_up.kernel")

    def _gradients(
        self, params: Params, batch: TokenBatch, number: jax.Array | int
    ) -> tuple[LossSums, dict[str, jax.Array]]:
        """The sums of the loss, and the gradient of its mean for each trained parameter."""
        weights, trained = self._weights(params)
        batch = self._with_whole(weights, batch, self.accumulation)
        shared = batch.shared

        def summed(trained: dict[str, Any], batch: TokenBatch, part: jax.Array | int = 0) -> tuple[jax.Array, LossSums]:
            noise = {} if self.noise is None else self.noise(number, part)
            sums = self.loss(self.model, {**weights, **_bound(weights, trained), **noise}, batch)
            return sums.total, sums

        if self.interleaved:
            parts = replace(jax.tree.map(self._in_parts, replace(batch, shared={})), shared=shared)
            sums, gradients = gradients_by_1f1b(self.model, self.loss, weights, trained, parts, self._as_given)
            return sums, jax.tree.map(lambda gradient: gradient / _count(sums), gradients)

        if self.accumulation == 1:

            def mean(trained: dict[str, Any]) -> tuple[jax.Array, LossSums]:
                total, sums = summed(trained, batch)
                return total / _count(sums), sums

            gradients, sums = self._in_layers(jax.grad(mean, has_aux=True), trained)(trained)
            return sums, self._as_given(gradients)

        part_gradients = self._in_layers(jax.grad(summed, has_aux=True), trained)

        def add(so_far: Any, numbered: tuple[jax.Array, TokenBatch]) -> tuple[Any, None]:
            place, part = numbered
            gradients, sums = part_gradients(trained, replace(part, shared=shared), place)
            return jax.tree.map(jnp.add, so_far, (sums, self._as_given(gradients))), None

        parts = jax.tree.map(self._in_parts, replace(batch, shared={}))
        first = replace(jax.tree.map(lambda array: array[0], parts), shared=shared)
        sums = jax.eval_shape(summed, trained, first)[1]
        zeros = (
            jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), sums),
            self._as_given(jax.tree.map(jnp.zeros_like, trained)),
        )
        (sums, gradients), _ = jax.lax.scan(add, zeros, (jnp.arange(self.accumulation), parts))
        return sums, jax.tree.map(lambda gradient: gradient / _count(sums), gradients)

    def _in_layers(self, gradients: Any, trained: Mapping[str, jax.Array]) -> LayerGradients:
        """A function that computes gradients for `trained`, with a lean loop over layers."""
        placement, table = self.model.runtime.placement, self.model.parameters
        rows = placement.axes_of(axes.BATCH)
        stacked = [path for path in trained if path in table and path.startswith(GROUPS)]
        unset = {path for path in stacked if self._may_be_unset(path)}
        by_rows = {path for path in unset if lies_as_rows(placement.parameter(path, table[path]), rows)}
        sizes = {} if placement.mesh is None else placement.mesh.shape
        return LayerGradients(gradients, unset, by_rows, prod(sizes[axis] for axis in rows))

    def _may_be_unset(self, path: str) -> bool:
        """Whether the gradients of a parameter of all layers begin with unset memory. On GPUs it was never tried."""
        platform = self.model.runtime.placement.platform
        if Optimization.UNSET_GRADIENTS in self.model.runtime.without:
            return False
        return platform == "cpu" or (platform == "tpu" and self._fills_lanes(path))

    def _as_given(self, gradients: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Gradients as the optimizer is given them: in the dtype of gradients, where they lie."""
        table: Mapping[str, Parameter] = self.model.parameters
        kind = np.dtype(ADAMW.gradient_dtype)

        def given(path: str, gradient: jax.Array) -> jax.Array:
            gradient = gradient.astype(kind)
            return gradient if self.zero is None else _constrained(gradient, self.zero.gradient(path, table[path]))

        return {path: given(path, gradient) for path, gradient in gradients.items()}

    def _with_whole(self, weights: Params, batch: TokenBatch, accumulation: int) -> TokenBatch:
        """The batch with the totals of `of_whole_batch` among what its rows share, computed in parts."""
        if self.of_whole_batch is None:
            return batch
        given, shared = self.of_whole_batch, batch.shared
        fixed = jax.lax.stop_gradient(weights)

        def of_part(part: TokenBatch) -> Mapping[str, jax.Array]:
            return given(self.model, fixed, replace(part, shared=shared))

        if accumulation == 1:
            found = of_part(batch)
        else:
            parts = jax.tree.map(self._in_parts, replace(batch, shared={}))
            found = jax.tree.map(lambda each: each.sum(), jax.lax.map(of_part, parts))
        return replace(batch, shared={**shared, **jax.lax.stop_gradient(found)})

    def _in_parts(self, rows: jax.Array) -> jax.Array:
        """rows [batch, ...] as [accumulation, batch / accumulation, ...], every device keeping its own rows, and the
        rows of one example together."""
        batch, *rest = rows.shape
        together = self.rows_per_example
        if batch % (self.accumulation * together):
            raise RequestError(
                f"a batch of {batch} rows was to be computed in {self.accumulation} parts, but they would differ in "
                f"size: use a batch that is a multiple of {self.accumulation * together}, or another accumulation."
            )
        each = batch // self.accumulation
        parts = rows.reshape(each // together, self.accumulation, together, *rest).swapaxes(0, 1)
        return self.model.runtime.placement.constrain(
            parts.reshape(self.accumulation, each, *rest), None, axes.BATCH, *(None for _ in rest)
        )


def _bound(weights: Mapping[str, Any], trained: Mapping[str, Any]) -> dict[str, Any]:
    """The trained parameters as the model computes with them, so that their gradients are those of `trained`."""

    def one(path: str, given: Any) -> Any:
        weight = weights[path]
        if not isinstance(weight, Master):
            return given
        return replace(weight, value=given) if path == TABLE else replace(weight, slot=given)

    return {path: one(path, given) for path, given in trained.items()}


def mean_of(sums: LossSums, value: jax.Array) -> jax.Array:
    """One of the sums, `value` [], as the mean by weight []; both float32."""
    return value / _at_least_one(sums.weight)


def _count(sums: LossSums) -> jax.Array:
    """What the sum of all that is minimized is divided by, and 1 for a batch without any."""
    return _at_least_one(sums.weight if sums.divisor is None else sums.divisor)


def _at_least_one(count: jax.Array) -> jax.Array:
    return jnp.where(count > 0, count, 1.0)


def _of_blocks(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> jax.sharding.Sharding:
    """The sharding of an array with one number for each block along a weight's last axis: the weight's, but for that
    axis where devices do not divide the blocks."""
    if not isinstance(sharding, NamedSharding) or len(sharding.spec) < len(shape):
        return sharding
    last = sharding.spec[-1]
    names = () if last is None else (last,) if isinstance(last, str) else tuple(last)
    if shape[-1] % prod(sharding.mesh.shape[name] for name in names) == 0:
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:-1], None))


def _constrained(value: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    if not isinstance(sharding, NamedSharding):
        return value
    return jax.lax.with_sharding_constraint(value, sharding)


def abstract_tokens(batch: int, tokens: int, placement: Placement) -> jax.ShapeDtypeStruct:
    """Token ids [batch, tokens] as a step is given them, rows over the mesh's devices where it divides them."""
    shape = (batch, tokens)
    logical = placement.divisible((axes.BATCH, None), shape)
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=placement.sharding(logical, shape, "the tokens"))
