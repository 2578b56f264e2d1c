"""Mixture of experts as pure functions. `choose_experts` turns router logits into each token's experts and weights;
`run_experts` computes each token's own experts only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from ttpu_core.spec import MoESpec, RouterSpec
from ttpu_jax.ops.activation import activate, gated_activation
from ttpu_jax.ops.grouped import grouped_linear
from ttpu_jax.ops.kernels import Kernel, QuantizedKernel
from ttpu_jax.ops.parts import filled


class ExpertKernels(NamedTuple):
    """Parameters of all experts. `up` is [experts, 2, inner, hidden] with the gate first, or [experts, inner,
    hidden] for experts without a gate. `down` is [experts, hidden, inner]. Biases lack the last dimension, or are
    None."""

    up: Kernel
    down: Kernel
    up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None


def choose_experts(
    logits: jax.Array,
    spec: RouterSpec,
    count: int,
    correction_bias: jax.Array | None = None,
    expert_scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Each token's experts, best first, and their weights.

    Args:
        logits: [..., experts].
        spec: the router.
        count: experts per token.
        correction_bias: [experts], added for the choice only (arXiv 2408.15664).
        expert_scale: [experts], factors on the weights.

    Returns:
        int32 [..., count] and float32 [..., count].
    """
    logits = _capped(logits, spec)
    if spec.score == "sparsemixer":
        chosen, weights = _sparsemixer(logits, count, spec.jitter)
    else:
        scores, preference = _scores(logits, spec, correction_bias)
        chosen = jax.lax.top_k(preference, count)[1]
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if spec.score == "topk_softmax":
            weights = jax.nn.softmax(weights)
    weights = _scaled(weights, spec)
    if expert_scale is not None:
        weights = weights * expert_scale.astype(jnp.float32)[chosen]
    return chosen, weights


def weigh_experts(
    logits: jax.Array,
    spec: RouterSpec,
    count: int,
    correction_bias: jax.Array | None = None,
    expert_scale: jax.Array | None = None,
) -> jax.Array:
    """`choose_experts` as weights of all experts: float32 [tokens, experts], zero for those that are not chosen. Takes
    neither a sort nor a gather, so that a kernel can compute it, but for groups and "sparsemixer".

    Args:
        logits: [tokens, experts].
        spec: the router.
        count: experts per token.
        correction_bias: [experts] or [1, experts].
        expert_scale: [experts] or [1, experts].
    """
    if spec.score == "sparsemixer":
        chosen, weights = choose_experts(logits, spec, count, correction_bias, expert_scale)
        of_choice = jnp.where(chosen[..., None] == jnp.arange(logits.shape[-1]), weights[..., None], 0)
        return of_choice.sum(-2)
    scores, preference = _scores(_capped(logits, spec), spec, correction_bias)
    index = jax.lax.broadcasted_iota(jnp.int32, preference.shape, 1).astype(jnp.float32)
    preference = jnp.where(preference != preference, jnp.inf, preference)  # NaN comes first, as in top_k
    chosen = jnp.zeros(preference.shape, jnp.bool_)
    for _ in range(count):
        left = jnp.where(chosen, -jnp.inf, preference)
        best = (left == left.max(-1, keepdims=True)) & ~chosen
        # Of equal ones the first, as top_k takes them. Where it takes experts at -inf, `best` has those not chosen yet.
        chosen = chosen | (index == jnp.where(best, index, preference.shape[1]).min(-1, keepdims=True))
    if spec.score == "topk_softmax":
        scores = jax.nn.softmax(jnp.where(chosen, scores, -jnp.inf))
    weights = _scaled(jnp.where(chosen, scores, 0.0), spec)
    return weights if expert_scale is None else weights * expert_scale.astype(jnp.float32)


def _capped(logits: jax.Array, spec: RouterSpec) -> jax.Array:
    """The logits in float32, soft-capped where the router does that."""
    logits = logits.astype(jnp.float32)
    return logits if spec.logit_softcap is None else jnp.tanh(logits / spec.logit_softcap) * spec.logit_softcap


def _scores(logits: jax.Array, spec: RouterSpec, correction_bias: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """What weighs experts and what chooses them, both float32 like logits [..., experts]."""
    scores = logits
    if spec.score == "softmax":
        scores = jax.nn.softmax(logits)
    elif spec.score == "sigmoid":
        scores = jax.nn.sigmoid(logits)
    # If nothing is added to the scores, logits decide: the sigmoid saturates at 1 for large logits.
    bare = spec.score == "sigmoid" and correction_bias is None and spec.groups == 1
    preference = logits if bare else scores
    if correction_bias is not None:
        preference = preference + correction_bias.astype(jnp.float32)
    return scores, _best_groups(preference, spec)


def _scaled(weights: jax.Array, spec: RouterSpec) -> jax.Array:
    """Weights [..., experts] of a token's experts (zero for others), renormalised and scaled as the router has it."""
    if spec.renormalize:
        total = weights.sum(-1, keepdims=True) + spec.renormalize_eps
        weights = weights / (jnp.maximum(total, spec.renormalize_min) if spec.renormalize_min else total)
    return weights if spec.scaling_factor == 1.0 else weights * spec.scaling_factor


def _best_groups(scores: jax.Array, spec: RouterSpec) -> jax.Array:
    """The scores, -inf outside the best groups (DeepSeek-V2, arXiv 2405.04434; "top2_sum": V3, arXiv 2412.19437)."""
    if spec.top_groups >= spec.groups:
        return scores
    grouped = scores.reshape(*scores.shape[:-1], spec.groups, -1)
    if spec.group_score == "max":
        group_scores = grouped.max(-1)
    else:
        group_scores = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
    best = jax.lax.top_k(group_scores, spec.top_groups)[1]
    kept = (best[..., None] == jnp.arange(spec.groups)).any(-2)
    return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(scores.shape)


def _sparsemixer(logits: jax.Array, count: int, jitter: float) -> tuple[jax.Array, jax.Array]:
    """SparseMixer-v2 (arXiv 2409.12136) as phimoe runs it in inference: experts are chosen one after another, each
    weighted by a softmax over the remaining experts whose logits are close to its own."""
    left = logits
    chosen, weights = [], []
    for _ in range(count):
        best = left.max(-1, keepdims=True)
        index = left.argmax(-1, keepdims=True)
        distance = jax.lax.stop_gradient((best - logits) / jnp.maximum(jnp.abs(logits), best))
        near = jnp.where(distance > 2 * jitter, -jnp.inf, left)
        chosen.append(index)
        weights.append(jnp.take_along_axis(jax.nn.softmax(near), index, axis=-1))
        left = jnp.where(jnp.arange(logits.shape[-1]) == index, -jnp.inf, left)
    return jnp.concatenate(chosen, -1).astype(jnp.int32), jnp.concatenate(weights, -1)


def run_experts(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    kernels: ExpertKernels,
    spec: MoESpec,
    platform: str,
    first: jax.Array | int = 0,
    inner_axes: tuple[str, ...] = (),
) -> jax.Array:
    """The weighted sum of each token's experts' outputs, over the experts that `kernels` holds.

    Args:
        x: [tokens, hidden].
        chosen: [tokens, count], indices of experts, perhaps of ones that are not here.
        weights: [tokens, count], cast to x's dtype.
        kernels: parameters of the experts from index `first` on.
        spec: the mixture.
        platform: platform of the devices, see `grouped_linear`.
        first: scalar, the index of the first expert in `kernels`.
        inner_axes: mesh axes that shard the experts' inner dimension, inside a shard_map. An input order of `down` is
            sharded with it, and numbers the features of all shards.

    Returns:
        float32 [tokens, hidden]. If the experts are sharded, the shards' results must be added.
    """
    count, experts = chosen.shape[1], kernels.up.shape[0]
    expert = chosen.T.reshape(-1) - first
    here = (expert >= 0) & (expert < experts) if experts < spec.choices else None
    if here is not None:
        expert = jnp.where(here, expert, experts)  # assignments to absent experts are sorted last
    sorting, sizes = sorted_by(expert, experts, here)
    weight = weights_of(weights, sorting, x.dtype)
    rows = dispatch(x, sorting, count)
    with filled(min(1.0, experts / spec.choices)):
        out = expert_outputs(rows, weight, expert[sorting.order], sizes, kernels, spec, platform, inner_axes)
    return combine(out, sorting, count)


def expert_outputs(
    rows: jax.Array,
    weight: jax.Array,
    expert: jax.Array,
    sizes: jax.Array,
    kernels: ExpertKernels,
    spec: MoESpec,
    platform: str,
    inner_axes: tuple[str, ...] = (),
) -> jax.Array:
    """What each row's expert gives it, times the row's weight.

    Args:
        rows: [rows, hidden], those of the first expert first.
        weight: [rows, 1] in the dtype of `rows`.
        expert: int [rows], the expert of each row in `kernels`; beyond the last where it is not there.
        sizes: int32 [experts], the number of rows of each expert; the rows after them are undefined in the result.
        kernels: parameters of the experts.
        spec: the mixture.
        platform: platform of the devices, see `grouped_linear`.
        inner_axes: as of `run_experts`.

    Returns:
        [rows, hidden] in the dtype of `rows`.
    """
    if spec.router.weight_on == "input":
        rows = rows * weight
    down_bias = None if kernels.down_bias is None else _of_expert(kernels.down_bias.astype(rows.dtype), expert)
    down, on_output = kernels.down, spec.router.weight_on == "output"
    static_step = isinstance(down, QuantizedKernel) and down.input_scale is not None
    # Equal to weighting the output, but for fewer features and before the rounding to the rows' dtype. A static scale
    # belongs to features without weight.
    inner_weight = weight if on_output and not static_step else None
    if inner_weight is not None and _fits_one_kernel(kernels, spec, platform):
        inner = _gated(rows, kernels.up, inner_weight[:, 0], sizes, spec, platform)
    else:
        product = _linear(rows, kernels.up, kernels.up_bias, expert, sizes, platform)
        inner = _activated(product, inner_weight, spec)
    if down_bias is not None and inner_weight is not None:
        down_bias = down_bias * weight
    inner = inner.astype(rows.dtype)
    if inner_axes and isinstance(down, QuantizedKernel) and down.input_order is not None:
        # The features that meet this shard's columns may have been computed by another.
        features = jax.lax.all_gather(inner, inner_axes, axis=-1, tiled=True)
        inner = jnp.take_along_axis(features, down.input_order.at[expert].get(mode="clip"), axis=-1)
        down = replace(down, input_order=None)
    out = _linear(inner, down, None, expert, sizes, platform, inner_axes)
    out = out if down_bias is None else out + down_bias
    return out * weight if on_output and static_step else out


def _activated(product: jax.Array, weight: jax.Array | None, spec: MoESpec) -> jax.Array:
    """The inner features, float32 [rows, inner], of products [rows, inner], or [rows, 2 * inner] with the gate first,
    times weight [rows, 1]."""
    if spec.gated:
        gate, up = (half.astype(jnp.float32) for half in jnp.split(product, 2, axis=-1))
        inner = gated_activation(gate, up, spec.activation)
    else:
        inner = activate(product.astype(jnp.float32), spec.activation)
    return inner if weight is None else inner * weight


def _fits_one_kernel(kernels: ExpertKernels, spec: MoESpec, platform: str) -> bool:
    """Whether `_gated` computes these experts' inner features."""
    plain = isinstance(kernels.up, jax.Array) and kernels.up_bias is None
    # No kernel for TPUs computes the error function.
    return platform.startswith("tpu") and spec.gated and plain and spec.activation.name != "gelu"


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _gated(
    x: jax.Array, kernels: jax.Array, weight: jax.Array, sizes: jax.Array, spec: MoESpec, platform: str
) -> jax.Array:
    """`_activated` products of x [rows, in] and kernels [experts, 2, inner, in] times weight [rows], in x's dtype."""
    from ttpu_jax.ops import grouped_tpu  # Pallas takes 0.4 s to import

    kernels = kernels.astype(x.dtype)
    return grouped_tpu.gated_product(x, kernels, weight, sizes, spec.activation, interpret=platform != "tpu")


def _gated_with_residuals(
    x: jax.Array, kernels: jax.Array, weight: jax.Array, sizes: jax.Array, spec: MoESpec, platform: str
) -> tuple[jax.Array, Callable[[jax.Array], tuple[jax.Array, ...]]]:
    """For a gradient the products are kept, so that it does not compute them again."""
    return jax.vjp(
        lambda x, kernels, weight: _activated(
            grouped_linear(x, kernels, sizes, platform), weight[:, None], spec
        ).astype(x.dtype),
        x,
        kernels,
        weight,
    )


_gated.defvjp(_gated_with_residuals, lambda spec, platform, back, gradient: (*back(gradient), None))


def _where(kept: jax.Array | None, x: jax.Array) -> jax.Array:
    """x [n, ...], zero where `kept` [n] is False (None keeps all)."""
    return x if kept is None else jnp.where(kept.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)


def _linear(
    x: jax.Array,
    kernels: Kernel,
    bias: jax.Array | None,
    expert: jax.Array,
    sizes: jax.Array,
    platform: str,
    input_axes: tuple[str, ...] = (),
) -> jax.Array:
    """x [rows, in], kernels [experts, *out, in], expert [rows]: [rows, out]."""
    product = grouped_linear(x, kernels, sizes, platform, input_axes)
    return product if bias is None else product + _of_expert(bias.reshape(len(bias), -1).astype(x.dtype), expert)


def _of_expert(values: jax.Array, expert: jax.Array) -> jax.Array:
    """values [experts, n] of each row's expert [rows]: [rows, n]. Rows of an absent expert, whose index is out of
    range, are zero and add nothing to the gradient."""
    return values.at[expert].get(mode="fill", fill_value=0)


class Sorting(NamedTuple):
    """Arrays [count * tokens], of assignments numbered choice by choice: that of each sorted row, the row of each, and
    which go to experts that are here (None: all)."""

    order: jax.Array
    place: jax.Array
    here: jax.Array | None


def sorted_by(group: jax.Array, groups: int, here: jax.Array | None) -> tuple[Sorting, jax.Array]:
    """Sort assignments by group.

    Args:
        group: int [count * tokens], of each assignment, numbered choice by choice, so that results are summed over a
            leading axis; `groups` where it has none.
        groups: their number.
        here: bool [count * tokens], which assignments have a group; None: all.

    Returns:
        Their order, and int32 [groups], the number of assignments of each group.
    """
    order = jnp.argsort(group, stable=True)
    sizes = (group[:, None] == jnp.arange(groups)).sum(0, dtype=jnp.int32)
    return Sorting(order, jnp.argsort(order), here), sizes


def weights_of(weights: jax.Array, sorting: Sorting, dtype: Any) -> jax.Array:
    """weights [tokens, count] in their order and in a dtype: [count * tokens, 1], zero where the expert is absent."""
    return _permuted(_where(sorting.here, weights.T.reshape(-1).astype(dtype)), sorting)[:, None]


# Each function is the other's gradient, so that neither scatters, which is slow on a TPU.


@jax.custom_vjp
def _permuted(values: jax.Array, sorting: Sorting) -> jax.Array:
    """values [count * tokens] in their order."""
    return values[sorting.order]


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def dispatch(x: jax.Array, sorting: Sorting, count: int) -> jax.Array:
    """Each sorted row's token: x [tokens, ...] → [count * tokens, ...]."""
    return x[sorting.order % len(x)]


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def combine(rows: jax.Array, sorting: Sorting, count: int) -> jax.Array:
    """The sum of each token's rows: rows [count * tokens, ...] → float32 [tokens, features], all features merged."""
    parts = rows[sorting.place].reshape(count, len(rows) // count, -1)
    # Left to itself, XLA lays the parts out as the residual stream, and copies all of them for it.
    parts = with_layout_constraint(parts, Layout((0, 1, 2)))
    here = [None] * count if sorting.here is None else list(sorting.here.reshape(count, -1))
    # One reduction over all parts would first store them, and their mask, in float32 (libtpu 0.0.42).
    return reduce(jnp.add, (_where(kept, part.astype(jnp.float32)) for kept, part in zip(here, parts, strict=True)))


def _dispatch_gradients(count: int, sorting: Sorting, gradient: jax.Array) -> tuple[jax.Array, None]:
    sums = combine(gradient, sorting, count).astype(gradient.dtype)
    return sums.reshape(-1, *gradient.shape[1:]), None


def _combine_gradients(
    count: int, residuals: tuple[Sorting, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, None]:
    sorting, none_of_rows = residuals  # which has their dtype and shape
    return dispatch(gradient.astype(none_of_rows.dtype).reshape(-1, *none_of_rows.shape[1:]), sorting, count), None


_permuted.defvjp(
    lambda values, sorting: (_permuted(values, sorting), sorting),
    lambda sorting, gradient: (gradient[sorting.place], None),
)
dispatch.defvjp(lambda x, sorting, count: (dispatch(x, sorting, count), sorting), _dispatch_gradients)
combine.defvjp(lambda rows, sorting, count: (combine(rows, sorting, count), (sorting, rows[:0])), _combine_gradients)
