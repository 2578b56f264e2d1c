"""A mixture of experts as a Flax NNX module over the residual stream [batch, seq, hidden]. On a mesh, each device
computes the contribution of its own experts, or of its shard of their inner dimension, to its own tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from ttpu_core.sharding.experts import exchanges, gathers_own_rows
from ttpu_core.spec import MoESpec, axes
from ttpu_jax.model.modules import (
    MLP,
    RESIDUAL,
    Linear,
    Norm,
    Parameters,
    Runtime,
    constrain_stream,
    ring_of,
    value_of,
    with_whole_rows,
)
from ttpu_jax.ops.exchanged_experts import ExchangedExperts, run_exchanged
from ttpu_jax.ops.few_tokens import Router as RouterValues
from ttpu_jax.ops.few_tokens import run_few, why_not_few
from ttpu_jax.ops.kernels import QuantizedKernel, map_arrays
from ttpu_jax.ops.linear import linear
from ttpu_jax.ops.local_experts import run_local, why_not_local
from ttpu_jax.ops.moe import ExpertKernels, choose_experts, run_experts
from ttpu_jax.ops.parts import Part, part


class ExpertLoads(nnx.Intermediate):
    """What a router keeps when asked: float32 [2, batch, seq, experts], each token's softmax over all experts, and 1
    for each of its likeliest experts."""


class RealTokens(nnx.Intermediate):
    """bool [batch, seq], true for tokens that are not padding."""


class Router(nnx.Module):
    """Chooses the experts of each token and their weights."""

    keeps_loads = False

    def __init__(self, spec: MoESpec, values: Parameters, runtime: Runtime) -> None:
        self.spec, self.runtime = spec, runtime
        self.kernel, self.bias = values["kernel"], values.get("bias")
        self.correction_bias, self.expert_scale = values.get("correction_bias"), values.get("expert_scale")
        norm, fuses = spec.router.norm, runtime.fuses_norms
        self.norm = Norm(norm, values.at("norm"), by_feature=fuses) if norm else None
        self.scale = values.get("scale")

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the experts and their weights, both [batch, seq, experts_per_token], for x [batch, seq, hidden]."""
        logits = self.runtime.placement.constrain(self.logits(x), *RESIDUAL)
        if self.keeps_loads:
            self.loads = ExpertLoads(expert_loads(logits, self.spec.experts_per_token))
        return choose_experts(
            logits,
            self.spec.router,
            self.spec.experts_per_token,
            value_of(self.correction_bias),
            value_of(self.expert_scale),
        )

    def logits(self, x: jax.Array) -> jax.Array:
        """Return logits [batch, seq, choices] for x [batch, seq, hidden]."""
        spec = self.spec.router
        if self.norm is not None:
            x = self.norm(x)
        if self.scale is not None and spec.input_scale is not None:
            x = x * self.scale[...].astype(x.dtype) * jnp.asarray(spec.input_scale, x.dtype)
        # transformers rounds the logits to the activations' dtype, except where a choice is corrected in float32.
        x = x.astype(jnp.float32) if spec.fp32 else x
        out_dtype = jnp.dtype(jnp.float32) if spec.correction_bias else x.dtype
        return linear(x, value_of(self.kernel), value_of(self.bias), out_dtype=out_dtype)


def expert_loads(logits: jax.Array, count: int) -> jax.Array:
    """`ExpertLoads` [2, ..., experts] of logits [..., experts], of which each token chooses `count`."""
    probabilities = jax.nn.softmax(logits.astype(jnp.float32))
    likeliest = jax.nn.one_hot(jax.lax.top_k(probabilities, count)[1], logits.shape[-1], dtype=jnp.float32).sum(-2)
    return jnp.stack([probabilities, likeliest])


def load_balancing_loss(loads: jax.Array, rows: jax.Array) -> jax.Array:
    """How unevenly tokens are spread over experts, a float32 scalar (arXiv 2101.03961, equations 4 to 6, over all
    layers at once as `load_balancing_loss_func` of transformers).

    Args:
        loads: [2, experts], `ExpertLoads` summed over the tokens of all layers.
        rows: float32 scalar, the tokens in each layer times the layers.
    """
    probability, share = loads / jnp.maximum(rows, 1)
    return loads.shape[-1] * (probability * share).sum()


class Experts(nnx.Module):
    """The experts' kernels, run on the tokens that the router gives them.

    real_tokens: of the step; None where all are real."""

    real_tokens: RealTokens | None = None

    def __init__(self, spec: MoESpec, values: Parameters, runtime: Runtime) -> None:
        self.spec, self.runtime = spec, runtime
        if spec.gated:
            self.gate_up = Linear(values.at("gate_up"), runtime)
        else:
            self.up = Linear(values.at("up"), runtime)
        self.down = Linear(values.at("down"), runtime)

    def __call__(self, x: jax.Array, chosen: jax.Array, weights: jax.Array) -> jax.Array:
        """Return the weighted sum of the chosen experts' outputs. Experts that return their input are left out.

        Args:
            x: [batch, seq, hidden].
            chosen: int [batch, seq, experts_per_token].
            weights: [batch, seq, experts_per_token].

        Returns:
            [batch, seq, hidden].
        """
        platform, exchange = self.runtime.placement.platform, self._exchange(x)
        own_rows = exchange is None and self._gathers_own_rows(x)
        summed_in = jnp.dtype(jnp.float32) if ring_of(x, self.runtime) is None else x.dtype
        real = self.real_tokens
        if (own_rows or exchange) and real is not None and real.shape == chosen.shape[:-1]:
            # Tokens of padding are all alike: a few devices would have the rows of all of them.
            chosen = jnp.where(real[...][..., None], chosen, self.spec.choices)
            exchange = exchange and replace(exchange, padded=True)

        def run(
            x: jax.Array,
            chosen: jax.Array,
            weights: jax.Array,
            kernels: ExpertKernels,
            first: jax.Array | int,
            inner_axes: tuple[str, ...],
        ) -> jax.Array:
            if exchange is not None:
                return run_exchanged(x, chosen, weights, kernels, exchange)
            if own_rows and why_not_local(x, kernels, platform, inner_axes) is None:
                return run_local(x, chosen, weights, kernels, self.spec, platform, first, inner_axes, summed_in)
            return run_experts(x, chosen, weights, kernels, self.spec, platform, first, inner_axes)

        return self._sharded(run, x, chosen, weights, exchanging=exchange.exchanging if exchange else ())

    def _gathers_own_rows(self, x: jax.Array) -> bool:
        """Whether devices gather the rows of their own experts only, of x [batch, seq, hidden]; on TPUs where that
        pays."""
        placement = self.runtime.placement
        if placement.mesh is None or self.runtime.experts != "auto":
            return False
        experts, _, batch, sequence = self._mesh_axes(x)
        sizes = dict(placement.mesh.shape)
        devices = prod(sizes[axis] for axis in experts)
        tokens = x.shape[0] * x.shape[1] // prod(sizes[axis] for axis in (*batch, *sequence))
        return devices > 1 and (placement.platform != "tpu" or gathers_own_rows(tokens, devices))

    def _exchange(self, x: jax.Array) -> ExchangedExperts | None:
        """How devices send each other the tokens of x [batch, seq, hidden]; None where they gather them: between
        slices, and on TPUs where that is as fast."""
        placement, form = self.runtime.placement, self.runtime.experts
        if placement.mesh is None or form not in ("auto", "exchanged"):
            return None
        experts, inner, *_ = self._mesh_axes(x)
        of_tokens = {*placement.mesh_axes(axes.BATCH, x.shape[0]), *placement.mesh_axes(axes.SEQUENCE, x.shape[1])}
        exchanging, across = tuple(axis for axis in experts if axis in of_tokens), placement.axes_across_slices
        if not exchanging or across.intersection(exchanging):
            return None
        sizes = dict(placement.mesh.shape)
        gathered = x.shape[0] * x.shape[1] // prod(sizes[axis] for axis in of_tokens - set(exchanging))
        pays = exchanges(gathered, prod(sizes[axis] for axis in exchanging))
        if form == "auto" and placement.platform == "tpu" and not pays:
            return None
        by_experts = tuple((axis, sizes[axis]) for axis in experts)
        others = tuple(axis for axis in sizes if axis not in exchanging and axis not in across)
        return ExchangedExperts(self.spec, placement.platform, by_experts, exchanging, others, inner)

    def why_not_few(self, x: jax.Array) -> str | None:
        """Why `of_few` does not serve x [batch, seq, hidden], or None."""
        placement = self.runtime.placement
        tokens = x.shape[0] * x.shape[1]
        if placement.mesh is not None:
            *_, batch, sequence = self._mesh_axes(x)
            tokens //= prod(placement.mesh.shape[axis] for axis in (*batch, *sequence))
        return why_not_few(self.spec, self._kernels(), tokens, placement.platform, self.runtime.experts)

    def of_few(self, x: jax.Array, router: Router, routed_by: jax.Array) -> jax.Array:
        """`__call__` for few tokens, with their router. Each device routes the tokens that it multiplies.

        Args:
            x: [batch, seq, hidden].
            router: of the experts.
            routed_by: [batch, seq, hidden], the router's input.

        Returns:
            [batch, seq, hidden].
        """
        placement = self.runtime.placement
        if placement.mesh is not None:  # gathered once, for router and experts
            *_, batch, sequence = self._mesh_axes(x)
            tokens = NamedSharding(placement.mesh, PartitionSpec(batch or None, sequence or None, None))
            same = routed_by is x
            x = jax.lax.with_sharding_constraint(x, tokens)
            routed_by = x if same else jax.lax.with_sharding_constraint(routed_by, tokens)
        values = RouterValues(value_of(router.correction_bias), value_of(router.expert_scale))

        def run(
            x: jax.Array,
            logits: jax.Array,
            kernels: ExpertKernels,
            first: jax.Array | int,
            inner_axes: tuple[str, ...],
            *values: jax.Array | None,
        ) -> jax.Array:
            return run_few(x, logits, kernels, first, RouterValues(*values), self.spec, placement.platform)

        return self._sharded(run, x, router.logits(routed_by), whole=values)

    def _kernels(self) -> ExpertKernels:
        up = self.gate_up if self.spec.gated else self.up
        return ExpertKernels(*map(value_of, (up.kernel, self.down.kernel, up.bias, self.down.bias)))

    def _sharded(
        self,
        run: Callable[..., jax.Array],
        x: jax.Array,
        *of_tokens: jax.Array,
        whole: tuple[jax.Array | None, ...] = (),
        exchanging: tuple[str, ...] = (),
    ) -> jax.Array:
        """Call `run` on each device with its tokens and its part of the kernels, and add the results.

        Args:
            run: a function of x [tokens, hidden], of arrays [tokens, ...], the kernels of the device's experts, the
                index of the first, the mesh axes that shard their inner dimension, and of arrays that all devices have.
            x: [batch, seq, hidden].
            of_tokens: [batch, seq, ...] each.
            whole: arrays that all devices have.
            exchanging: mesh axes along which devices keep their own tokens, and exchange them in `run`.

        Returns:
            [batch, seq, hidden].
        """
        kernels, mesh, ring = self._kernels(), self.runtime.placement.mesh, ring_of(x, self.runtime)

        def of_rows(
            x: jax.Array,
            *rest: Any,
            kernels: ExpertKernels,
            first: jax.Array | int = 0,
            inner: tuple[str, ...] = (),
            whole: tuple[jax.Array | None, ...] = whole,
        ) -> jax.Array:
            rows = [each.reshape(-1, each.shape[-1]) for each in (x, *rest)]
            return run(*rows, kernels, first, inner, *whole).reshape(x.shape)

        if mesh is None:
            return of_rows(x, *of_tokens, kernels=kernels).astype(x.dtype)
        experts, inner, batch, sequence = self._mesh_axes(x, exchanging)

        def on_one_device(
            tokens: tuple[jax.Array, ...], kernels: ExpertKernels, whole: tuple[jax.Array | None, ...]
        ) -> jax.Array:
            first = jax.lax.axis_index(experts) * kernels.up.shape[0] if experts else 0
            if kernels.down_bias is not None and inner:  # of the devices that share an expert, one adds its bias
                at_start = jax.lax.axis_index(inner) == 0
                kernels = kernels._replace(down_bias=jnp.where(at_start, kernels.down_bias, 0))
            out = of_rows(*tokens, kernels=kernels, first=first, inner=inner, whole=whole)
            return (out if ring is None else out.astype(tokens[0].dtype))[None]  # as the sums of a ring travel

        tokens = PartitionSpec(batch or None, sequence or None, None)
        up_bias = (experts or None, *((None,) if self.spec.gated else ()), inner or None)
        dimensions = ((*up_bias, None), (experts or None, None, inner or None), up_bias, (experts or None, None))
        in_specs = ExpertKernels._make(
            None if kernel is None else map_arrays(kernel, by, lambda _, by: PartitionSpec(*by))
            for kernel, by in zip(kernels, dimensions, strict=True)
        )
        if isinstance(kernels.down, QuantizedKernel) and kernels.down.input_order is not None:
            down: Any = in_specs.down
            by_columns = replace(down, input_order=PartitionSpec(experts or None, inner or None))
            in_specs = in_specs._replace(down=by_columns)
        # Partial sums leave the manual region apart and are added outside: the gradient of that sum is a copy, where
        # that of a psum inside would be a second one.
        parts = jax.shard_map(
            on_one_device,
            mesh=mesh,
            in_specs=((tokens,) * (1 + len(of_tokens)), in_specs, (PartitionSpec(),) * len(whole)),
            out_specs=PartitionSpec((*(a for a in experts if a not in exchanging), *inner) or None, *tokens),
            check_vma=False,  # the kernels do not say over which axes their results vary
        )((x, *of_tokens), kernels, tuple(whole))
        return constrain_stream(parts.sum(0), self.runtime).astype(x.dtype)

    def _mesh_axes(self, x: jax.Array, exchanging: tuple[str, ...] = ()) -> tuple[tuple[str, ...], ...]:
        """The mesh axes that shard experts, their inner dimension, the batch and the sequence."""
        placement = self.runtime.placement
        assert placement.mesh is not None
        sizes = dict(placement.mesh.shape)
        by_weights = placement.strategy.mesh_axes(
            (axes.EXPERT, axes.MLP), (self.spec.num_experts, self.spec.intermediate_size), sizes, "a layer of experts"
        )
        # Where a strategy shards tokens along the experts' axes too, they are gathered for the experts, or exchanged.
        taken = {axis for each in by_weights for axis in each} - set(exchanging)
        batch = tuple(a for a in placement.mesh_axes(axes.BATCH, x.shape[0]) if a not in taken)
        sequence = tuple(a for a in placement.mesh_axes(axes.SEQUENCE, x.shape[1]) if a not in taken and a not in batch)
        assert x.shape[0] % prod(sizes[a] for a in batch) == 0
        return (*by_weights, batch, sequence)


class MoE(nnx.Module):
    """Router and experts, with the shared expert and the dense MLP that some models add."""

    def __init__(self, spec: MoESpec, values: Parameters, runtime: Runtime) -> None:
        self.spec = spec
        self.router = Router(spec, values.at("router"), runtime)
        self.experts = Experts(spec, values.at("experts"), runtime)
        self.shared = MLP(spec.shared, values.at("shared"), runtime) if spec.shared else None
        gated = spec.shared is not None and spec.shared_gate
        self.shared_gate = Linear(values.at("shared_gate"), runtime) if gated else None
        self.dense = MLP(spec.dense, values.at("dense"), runtime) if spec.dense else None

    def __call__(self, x: jax.Array, routed_by: jax.Array | None = None) -> jax.Array:
        """Return the sum of the experts' outputs for x [batch, seq, hidden], in the same shape.

        `routed_by` [batch, seq, hidden] is the input of the router where it is not x.
        """
        out = self.routed(x, routed_by)
        return out if self.dense is None else out + self.dense(x)

    @part(Part.EXPERTS)
    def routed(self, x: jax.Array, routed_by: jax.Array | None = None) -> jax.Array:
        """Return the sum of the experts' outputs without the dense MLP's for x [batch, seq, hidden], in the same shape.

        `routed_by` [batch, seq, hidden] is the input of the router where it is not x.
        """
        stream, x = x, self._gathered(x)
        routed_by = x if routed_by is None or routed_by is stream else self._gathered(routed_by)
        if not self.router.keeps_loads and self.experts.why_not_few(x) is None:
            out = self.experts.of_few(x, self.router, routed_by)
        else:
            chosen, weights = self.router(routed_by)
            out = self.experts(x, chosen, weights)
            if self.spec.identity_experts:
                kept = jnp.where(chosen >= self.spec.num_experts, weights, 0).sum(-1, keepdims=True)
                out = (out + x * kept).astype(x.dtype)
        if self.shared is not None:
            shared = self.shared(stream)
            if self.shared_gate is not None:
                shared = jax.nn.sigmoid(self.shared_gate(stream)) * shared
            out = out + shared
        return out

    def _gathered(self, x: jax.Array) -> jax.Array:
        """x [batch, seq, hidden], which the devices of a ring may have cut, with all rows on each of them."""
        runtime = self.router.runtime
        if ring_of(x, runtime) is None:
            return x
        return with_whole_rows(constrain_stream(x, runtime), runtime)  # the norm before it is of cut rows
