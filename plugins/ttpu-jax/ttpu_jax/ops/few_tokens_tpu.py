"""A mixture of experts for few tokens as Pallas kernels for a TPU: one for routing, one for the experts.

Where tokens are few, as in a decode step, reading experts takes the time, and multiplying all tokens by each of them
takes none on top. So no token is sorted or gathered: each expert that any token chose is read once, and what it makes
of tokens that did not choose it counts as zero. For a layer of Qwen3-30B-A3B the grouped products of
`ttpu_jax.ops.grouped_tpu` take some thirty small programs beside them; this takes two kernels."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ttpu_core.spec import MoESpec, RouterSpec
from ttpu_core.spec.arithmetic import expert_shares, product_flops
from ttpu_jax.ops.activation import activate, gated_activation
from ttpu_jax.ops.attention.blocks import device_kind
from ttpu_jax.ops.attention.context import AttentionContext
from ttpu_jax.ops.grouped_tpu import stored_transposed
from ttpu_jax.ops.moe import ExpertKernels, weigh_experts

_FEW_SHARE = 0.5
_FETCHED_BYTES = 48 << 20
_LARGE_VMEM = ("TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU v6e")
"""Chips of which a core has 128 MiB of VMEM."""


class Routing(NamedTuple):
    """What a router decides for tokens: float32 weights [tokens, choices], zero where a token did not choose an expert;
    int32 [choices]: the experts of this device that any token chose, in order, then -1; and int32 [1]: how many they
    are, at least 1."""

    weights: jax.Array
    visits: jax.Array
    visited: jax.Array


def route(
    logits: jax.Array,
    spec: MoESpec,
    first: jax.Array | int,
    experts: int,
    correction_bias: jax.Array | None,
    expert_scale: jax.Array | None,
    *,
    interpret: bool = False,
) -> Routing:
    """`weigh_experts`, and which experts to visit.

    Args:
        logits: [tokens, choices].
        spec: the mixture.
        first: scalar, the index of this device's first expert.
        experts: number of this device's experts.
        correction_bias: [choices] or None.
        expert_scale: [choices] or None.
        interpret: run the kernel in the interpreter.
    """
    tokens, choices = logits.shape
    if not _in_kernel(spec.router):
        logits = weigh_experts(logits, spec.router, spec.experts_per_token, correction_bias, expert_scale)
        correction_bias = expert_scale = None
    vectors = [None if each is None else each.reshape(1, -1) for each in (correction_bias, expert_scale)]
    given = [each for each in vectors if each is not None]
    whole = pl.BlockSpec(memory_space=pltpu.VMEM)
    weights, visits, count = pl.pallas_call(
        partial(_route, spec=spec, experts=experts, has=tuple(each is not None for each in vectors)),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, choices), jnp.float32),
            jax.ShapeDtypeStruct((1, choices), jnp.int32),
            jax.ShapeDtypeStruct((1,), jnp.int32),
        ),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), whole, *(whole for _ in given)],
        out_specs=(whole, whole, pl.BlockSpec(memory_space=pltpu.SMEM)),
        cost_estimate=pl.CostEstimate(
            flops=choices * (20 * spec.experts_per_token * tokens + 2 * choices),
            bytes_accessed=logits.nbytes + 4 * (tokens + 2) * choices,
            transcendentals=tokens * choices,
        ),
        interpret=interpret,
        name="route_few",
    )(jnp.asarray(first, jnp.int32).reshape(1), logits, *given)
    return Routing(weights, visits[0], count)


def _in_kernel(spec: RouterSpec) -> bool:
    """Whether the kernel weighs experts itself. It does not reshape, as a choice among groups does."""
    return spec.top_groups >= spec.groups and spec.score != "sparsemixer"


def _route(first: Any, logits: Any, *rest: Any, spec: MoESpec, experts: int, has: tuple[bool, ...]) -> None:
    *given, weights_out, visits_out, count_out = rest
    values = iter(given)
    bias, scale = (next(values)[...] if there else None for there in has)
    weights = logits[...]
    if _in_kernel(spec.router):
        weights = weigh_experts(weights, spec.router, spec.experts_per_token, bias, scale)
    weights_out[...] = weights
    choices = weights.shape[1]
    index = jax.lax.broadcasted_iota(jnp.int32, (1, choices), 1)
    mine = (index >= first[0]) & (index < first[0] + experts)
    used = jnp.where(mine, jnp.where(weights != 0, 1.0, 0.0).max(0, keepdims=True), 0.0)
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (choices, choices), axis) for axis in (0, 1))
    # Sums of zeros and ones are exact. Along rows, of the used experts up to each; then each goes to its place.
    upto = jnp.where(column <= row, used, 0.0).sum(1, keepdims=True)
    is_used = jnp.where(column == row, used, 0.0).sum(1, keepdims=True)
    here = (upto.astype(jnp.int32) - 1 == column) & (is_used > 0)
    visits = jnp.where(here, row.astype(jnp.float32), 0.0).sum(0, keepdims=True).astype(jnp.int32)
    total = used.sum(1, keepdims=True).astype(jnp.int32)
    visits_out[...] = jnp.where(index < total, visits, -1)
    # A device whose experts nobody chose visits one, as number -1, which no token has a weight for.
    count_out[0] = jnp.maximum(used.sum().astype(jnp.int32), 1)


def run_visited(
    x: jax.Array,
    routing: Routing,
    kernels: ExpertKernels,
    spec: MoESpec,
    first: jax.Array | int,
    block: int,
    *,
    interpret: bool = False,
) -> jax.Array:
    """The weighted sum of each token's experts' outputs, over the experts that `kernels` holds.

    Args:
        x: [tokens, hidden].
        routing: of the same tokens.
        kernels: arrays of the experts from index `first` on, in x's dtype.
        spec: the mixture.
        first: scalar, the index of the first expert in `kernels`.
        block: inner features of one step of the grid; divides those of an expert.
        interpret: run the kernel in the interpreter.

    Returns:
        float32 [tokens, hidden].
    """
    up, down = kernels.up, kernels.down
    assert isinstance(up, jax.Array)
    assert isinstance(down, jax.Array)
    tokens = len(x)
    up, swapped = up if spec.gated else up[:, None], stored_transposed(down)
    if swapped:
        down = down.swapaxes(1, 2)
    share, _ = expert_shares(spec, tokens)
    if not interpret:
        up, down = _placed(up, down, share)
    experts, halves, inner, hidden = up.shape
    itemsize = up.dtype.itemsize
    x = jnp.pad(x, ((0, -tokens % (32 // itemsize)), (0, 0)))
    weights = jnp.pad(routing.weights, ((0, len(x) - tokens), (0, 0)))
    rows = len(x)

    def of_expert(visit: Any, n: Any, visits: Any, first: Any) -> Any:
        return jnp.clip(visits[visit] - first[0], 0, experts - 1)

    specs = [
        pl.BlockSpec((rows, hidden), lambda *_: (0, 0)),
        pl.BlockSpec(weights.shape, lambda *_: (0, 0)),
        pl.BlockSpec((None, halves, block, hidden), lambda v, n, *s: (of_expert(v, n, *s), 0, n, 0)),
        pl.BlockSpec((None, block, hidden), lambda v, n, *s: (of_expert(v, n, *s), n, 0))
        if swapped
        else pl.BlockSpec((None, hidden, block), lambda v, n, *s: (of_expert(v, n, *s), 0, n)),
    ]
    operands = [x, weights, up, down]
    if kernels.up_bias is not None:
        operands.append(kernels.up_bias.reshape(experts, halves, inner))
        specs.append(pl.BlockSpec((None, halves, block), lambda v, n, *s: (of_expert(v, n, *s), 0, n)))
    if kernels.down_bias is not None:
        operands.append(kernels.down_bias.reshape(experts, 1, hidden))
        specs.append(pl.BlockSpec((None, 1, hidden), lambda v, n, *s: (of_expert(v, n, *s), 0, 0)))
    has = (kernels.up_bias is not None, kernels.down_bias is not None)
    out: jax.Array = pl.pallas_call(
        partial(_visit, spec=spec, swapped=swapped, has=has),
        out_shape=jax.ShapeDtypeStruct((rows, hidden), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(routing.visited[0], inner // block),
            in_specs=specs,
            out_specs=pl.BlockSpec((rows, hidden), lambda *_: (0, 0)),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=int(share * experts * product_flops((halves + 1) * hidden * inner, rows)),
            bytes_accessed=int(share * (up.nbytes + down.nbytes)) + x.nbytes + 4 * rows * hidden,
            transcendentals=int(share * experts * rows * inner),
        ),
        interpret=interpret,
        name="experts_of_few",
    )(routing.visits, jnp.asarray(first, jnp.int32).reshape(1), *operands)
    return out[:tokens]


def _placed(up: jax.Array, down: jax.Array, share: float) -> tuple[jax.Array, jax.Array]:
    """Where the compiler puts kernels [experts, ...] of which a kernel reads at most this share. Where it reads most,
    `down` is fetched while other parts of the layer leave HBM idle; where it reads few, all stay where they are."""
    if share < _FEW_SHARE:
        up, down = (pltpu.with_memory_space_constraint(each, pltpu.HBM) for each in (up, down))
    if share == 1 and down.nbytes <= _FETCHED_BYTES and device_kind(AttentionContext(mesh=None)) in _LARGE_VMEM:
        down = pltpu.with_memory_space_constraint(down, pltpu.VMEM)
    return up, down


def _visit(
    visits: Any,
    first: Any,
    x: Any,
    weights: Any,
    up: Any,
    down: Any,
    *rest: Any,
    spec: MoESpec,
    swapped: bool,
    has: tuple[bool, ...],
) -> None:
    """Add a block of an expert's inner features for all tokens to the sums."""
    del first
    *biases, out = rest
    given = iter(biases)
    up_bias, down_bias = (next(given) if there else None for there in has)
    visit, n = pl.program_id(0), pl.program_id(1)

    @pl.when((visit == 0) & (n == 0))
    def _() -> None:
        out[...] = jnp.zeros_like(out)

    mine = jax.lax.broadcasted_iota(jnp.int32, weights.shape, 1) == visits[visit]
    weight = jnp.where(mine, weights[...], 0.0).sum(1, keepdims=True)
    rounded = weight.astype(x.dtype).astype(jnp.float32)
    rows = x[...]
    if spec.router.weight_on == "input":
        rows = (rows.astype(jnp.float32) * rounded).astype(rows.dtype)
    halves = [
        _product(rows, up[half], 1) + (0.0 if up_bias is None else up_bias[half : half + 1, :].astype(jnp.float32))
        for half in range(up.shape[0])
    ]
    gate = halves[0]
    inner = gated_activation(gate, halves[1], spec.activation) if spec.gated else activate(gate, spec.activation)
    by = rounded if spec.router.weight_on == "output" else jnp.ones_like(rounded)
    inner = jnp.where(weight != 0, inner * by, 0.0).astype(rows.dtype)
    out[...] += _product(inner, down[...], 0 if swapped else 1)
    if down_bias is not None:

        @pl.when(n == 0)
        def _() -> None:
            out[...] += jnp.where(weight != 0, by, 0.0) * down_bias[...].astype(jnp.float32)


def _product(rows: jax.Array, kernel: jax.Array, contract: int) -> jax.Array:
    return jax.lax.dot_general(rows, kernel, (((1,), (contract,)), ((), ())), preferred_element_type=jnp.float32)
