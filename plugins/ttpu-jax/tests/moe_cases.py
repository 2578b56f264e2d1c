"""Mixtures of experts of every kind at sizes of a test, and what they should give: all experts computed for all
tokens, and those not chosen multiplied by zero."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_core.spec import (
    ActivationSpec,
    AttentionSpec,
    LayerSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
    Parameter,
    RouterSpec,
)
from ttpu_core.spec.parameters import layer_parameters
from ttpu_jax.model.modules import Parameters, Runtime
from ttpu_jax.model.moe import MoE
from ttpu_jax.ops.few_tokens import ExpertsForm
from ttpu_jax.params.placement import Placement, local_placement

HIDDEN = 16
Arrays = dict[str, Any]

BASE = MoESpec(num_experts=8, experts_per_token=2, intermediate_size=12)
KINDS = {
    "softmax": BASE,
    "renormalized": replace(BASE, router=RouterSpec(renormalize=True, scaling_factor=1.5)),
    "topk_softmax": replace(BASE, router=RouterSpec(score="topk_softmax", bias=True), expert_bias=True),
    "sigmoid_on_input": replace(BASE, router=RouterSpec(score="sigmoid", weight_on="input"), experts_per_token=1),
    "sparsemixer": replace(BASE, router=RouterSpec(score="sparsemixer")),
    "corrected_groups": replace(
        BASE,
        router=RouterSpec(
            score="sigmoid",
            correction_bias=True,
            groups=4,
            top_groups=2,
            group_score="top2_sum",
            renormalize=True,
            renormalize_eps=1e-20,
            scaling_factor=2.5,
        ),
        experts_per_token=3,
        shared=MLPSpec(10),
    ),
    "groups_by_best": replace(BASE, router=RouterSpec(groups=4, top_groups=1)),
    "softcap": replace(BASE, router=RouterSpec(score="sigmoid", logit_softcap=5.0)),
    "normed_and_scaled": replace(
        BASE,
        router=RouterSpec(renormalize=True, norm=NormSpec(scale=False), input_scale=HIDDEN**-0.5, expert_scale=True),
        activation=ActivationSpec("gelu_tanh"),
        dense=MLPSpec(20, ActivationSpec("gelu_tanh")),
    ),
    "gated_shared": replace(BASE, shared=MLPSpec(8), shared_gate=True),
    "clamped": replace(BASE, activation=ActivationSpec("clamped_swiglu", alpha=1.3, limit=0.8), expert_bias=True),
    "ungated": replace(BASE, gated=False, activation=ActivationSpec("relu2"), expert_bias=True),
    "all_experts": replace(BASE, experts_per_token=8),
    "identities": replace(  # more are chosen for a token than have parameters
        BASE,
        identity_experts=4,
        experts_per_token=9,
        router=RouterSpec(correction_bias=True, scaling_factor=3.0),
        shared=MLPSpec(10),
    ),
}


def table(spec: MoESpec) -> dict[str, Parameter]:
    layer = LayerSpec(AttentionSpec(2, 2, 8), spec, NormSpec())
    return {
        path.removeprefix("moe."): parameter
        for path, parameter in layer_parameters(layer, HIDDEN).items()
        if path.startswith("moe.")
    }


def arrays(spec: MoESpec, seed: int = 0, dtype: Any = np.float32) -> Arrays:
    rng = np.random.default_rng(seed)
    return {
        path: jnp.asarray(rng.normal(size=p.shape, scale=1.0 if "router" in path else 0.4), p.dtype or dtype)
        for path, p in table(spec).items()
    }


def tokens(batch: int = 8, seq: int = 6, seed: int = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(batch, seq, HIDDEN)), jnp.float32)


def module(spec: MoESpec, values: Arrays, placement: Placement | None = None, form: ExpertsForm = "auto") -> MoE:
    return MoE(spec, Parameters(values, table(spec)), Runtime(placement or Placement(), experts=form))


def run(spec: MoESpec, values: Arrays, x: jax.Array, mesh: str | None = None) -> jax.Array:
    return run_with_gradients(spec, values, x, mesh)[0]


def run_with_gradients(
    spec: MoESpec, values: Arrays, x: jax.Array, mesh: str | None = None, form: ExpertsForm = "auto"
) -> tuple[jax.Array, Arrays, jax.Array]:
    """The output, and the gradients to the parameters and to x."""
    placement = local_placement(mesh)
    if mesh is not None:
        values = {path: jax.device_put(a, placement.parameter(path, table(spec)[path])) for path, a in values.items()}

    def objective(values: Arrays, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = module(spec, values, placement, form)(x)
        return loss(out), out

    (to_values, to_x), out = jax.jit(jax.grad(objective, argnums=(0, 1), has_aux=True))(values, x)
    return out, to_values, to_x


def loss(out: jax.Array) -> jax.Array:
    """A scalar in which every element of the output counts differently."""
    return (out * jnp.sin(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)).sum()


def reference(spec: MoESpec, values: Arrays, x: jax.Array) -> jax.Array:
    """All experts computed for every token, and those not chosen multiplied by zero."""
    weights, chosen = reference_weights(spec, values, x)

    def activation(gate: jax.Array, up: jax.Array | float) -> jax.Array:
        name = spec.activation.name
        if name == "clamped_swiglu":
            limit, alpha = spec.activation.limit or 0.0, spec.activation.alpha or 0.0
            up = jnp.where(up > limit, limit, jnp.where(up < -limit, -limit, up))
            gate = jnp.where(gate > limit, limit, gate)
            return (up + 1) * gate / (1 + jnp.exp(-alpha * gate))
        if name == "silu":
            return gate / (1 + jnp.exp(-gate)) * up
        if name == "gelu_tanh":
            return 0.5 * gate * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
        return jnp.where(gate > 0, gate, 0) ** 2 * up

    def mlp(x: jax.Array, part: Arrays) -> jax.Array:
        if "gate_up.kernel" in part:
            pair = jnp.einsum("...h,gih->...gi", x, part["gate_up.kernel"]) + part.get("gate_up.bias", 0.0)
            inner = activation(pair[..., 0, :], pair[..., 1, :])
        else:
            inner = activation(x @ part["up.kernel"].T + part.get("up.bias", 0.0), 1.0)
        return inner @ part["down.kernel"].T + part.get("down.bias", 0.0)

    def below(prefix: str) -> Arrays:
        return {name.removeprefix(prefix): a for name, a in values.items() if name.startswith(prefix)}

    kept = weights[..., spec.num_experts :].sum(-1, keepdims=True)
    weights, chosen = (jnp.moveaxis(each[..., : spec.num_experts], -1, 0)[..., None] for each in (weights, chosen))
    on_input = spec.router.weight_on == "input"
    outputs = jax.vmap(lambda part, weight: mlp(x * weight if on_input else x, part))(below("experts."), weights)
    out = (outputs * (chosen if on_input else weights)).sum(0) + x * kept
    if spec.shared is not None:
        gate = 1 / (1 + jnp.exp(-x @ values["shared_gate.kernel"].T)) if spec.shared_gate else 1.0
        out += gate * mlp(x, below("shared."))
    return out + mlp(x, below("dense.")) if spec.dense else out


def reference_weights(spec: MoESpec, values: Arrays, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each expert's weight for each token, and which are chosen, both [..., experts]."""
    router = spec.router
    if router.norm is not None:
        x = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + router.norm.eps)
    if router.input_scale is not None:
        x = x * values["router.scale"] * router.input_scale
    logits = x @ values["router.kernel"].T + values.get("router.bias", 0.0)
    if router.logit_softcap is not None:
        logits = router.logit_softcap * jnp.tanh(logits / router.logit_softcap)
    if router.score == "sparsemixer":
        weights, chosen = jnp.zeros_like(logits), jnp.zeros(logits.shape, bool)
        for _ in range(spec.experts_per_token):
            best = jnp.where(chosen, -jnp.inf, logits).max(-1, keepdims=True)
            near = (best - logits) <= 0.02 * jnp.maximum(jnp.abs(logits), best)
            shares = jnp.where(near & ~chosen, jnp.exp(logits - best), 0.0)
            weights = jnp.where(logits == best, shares / shares.sum(-1, keepdims=True), weights)
            chosen |= logits == best
        return weights, chosen
    scores = {
        "softmax": lambda: jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True),
        "sigmoid": lambda: 1 / (1 + jnp.exp(-logits)),
        "topk_softmax": lambda: jnp.exp(logits),
    }[router.score]()
    preference = scores + values.get("router.correction_bias", 0.0)
    if router.groups > 1:
        grouped = jnp.sort(preference.reshape(*preference.shape[:-1], router.groups, -1), axis=-1)
        group_scores = grouped[..., -1] if router.group_score == "max" else grouped[..., -2:].sum(-1)
        threshold = jnp.sort(group_scores, axis=-1)[..., -router.top_groups, None]
        kept = jnp.repeat(group_scores >= threshold, spec.num_experts // router.groups, axis=-1)
        preference = jnp.where(kept, preference, -jnp.inf)
    chosen = preference >= jnp.sort(preference, axis=-1)[..., -spec.experts_per_token, None]
    weights = jnp.where(chosen, scores, 0.0)
    if router.renormalize or router.score == "topk_softmax":
        weights = weights / (weights.sum(-1, keepdims=True) + router.renormalize_eps)
    return weights * router.scaling_factor * values.get("router.expert_scale", 1.0), chosen


def assert_close(ours: Any, expected: Any, tolerance: float = 1e-5) -> None:
    ours, expected = np.asarray(ours, np.float64), np.asarray(expected, np.float64)
    assert np.abs(ours - expected).max() <= tolerance * max(np.abs(expected).max(), 1e-3)


def assert_same(ours: tuple[jax.Array, Arrays, jax.Array], expected: tuple[jax.Array, Arrays, jax.Array]) -> None:
    assert_close(ours[0], expected[0])
    assert_close(ours[2], expected[2], 2e-5)
    for path, gradient in expected[1].items():
        assert_close(ours[1][path], gradient, 2e-5)
