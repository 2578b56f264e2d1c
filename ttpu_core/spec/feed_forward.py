"""What a feed-forward layer is: dense, or a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ttpu_core.errors import ConfigError
from ttpu_core.spec.norm import NormSpec


@dataclass(frozen=True)
class ActivationSpec:
    """An elementwise function by name, with the constants that some models add.

    Names: silu, gelu (erf), gelu_tanh, relu, relu2, xielu (learned), clamped_swiglu (alpha, limit), identity."""

    name: str = "silu"
    alpha: float | None = None
    limit: float | None = None


@dataclass(frozen=True)
class MLPSpec:
    """A dense feed-forward layer: gated (down(act(gate_multiplier * gate(x)) * up(x))) or plain (down(act(up(x)))).

    With `sparsity`, the activation gets only the amount by which a feature exceeds that quantile of the token's
    features, which are assumed to be normally distributed (gemma3n).

    Raises:
        ConfigError: the activation is no `ActivationSpec`.
    """

    intermediate_size: int
    activation: ActivationSpec = ActivationSpec()
    gated: bool = True
    bias: bool = False
    inner_norm: NormSpec | None = None
    sparsity: float = 0.0
    gate_multiplier: float = 1.0

    def __post_init__(self) -> None:
        """Check the activation."""
        _check_activation(self.activation)


def _check_activation(activation: object) -> None:
    if not isinstance(activation, ActivationSpec):
        raise ConfigError(
            f"a feed-forward layer was described with the activation {activation!r}, but an ActivationSpec is needed: "
            "write ActivationSpec(name) in `ttpu_mlp`."
        )


NO_MLP = MLPSpec(0)
"""What `ttpu_mlp` answers for a layer without a feed-forward part; `LayerSpec.mlp` is then None."""


@dataclass(frozen=True)
class RouterSpec:
    """How tokens choose experts.

    `score` is applied to all logits before the choice; "topk_softmax" normalises only the chosen logits.
    `correction_bias` affects the choice but not the weights. `renormalize` divides the chosen weights by their sum
    plus `renormalize_eps`, or by `renormalize_min` if that is more. `fp32` keeps the kernel and computes the logits in
    float32, whatever the model's dtype (ernie4_5_moe). With `groups`, experts are first limited to the `top_groups`
    best groups by `group_score`. `weight_on` "input" multiplies the expert's input (llama4). `jitter` is half the
    relative distance from the best logit up to which an expert takes part in a softmax of "sparsemixer" (phimoe)."""

    score: Literal["softmax", "sigmoid", "topk_softmax", "sparsemixer"] = "softmax"
    renormalize: bool = False
    renormalize_eps: float = 0.0
    renormalize_min: float = 0.0
    fp32: bool = False
    correction_bias: bool = False
    bias: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    scaling_factor: float = 1.0
    weight_on: Literal["output", "input"] = "output"
    logit_softcap: float | None = None
    norm: NormSpec | None = None
    input_scale: float | None = None
    expert_scale: bool = False
    jitter: float = 0.01


@dataclass(frozen=True)
class MoESpec:
    """A mixture of experts, with an optional shared expert and an optional dense MLP beside it.

    `identity_experts` further experts, which the router counts after the others, return their input and have no
    parameters (LongCat-Flash, arXiv 2509.01322). With `shortcut`, what the experts return is added to the residual
    stream behind the next layer (arXiv 2404.05019), and this layer adds the dense MLP's output alone.

    Raises:
        ConfigError: the number of experts per token or of groups does not fit the number of experts, or that of
            identity experts is negative; or the activation is no `ActivationSpec`.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    activation: ActivationSpec = ActivationSpec()
    gated: bool = True
    router: RouterSpec = RouterSpec()
    expert_bias: bool = False
    shared: MLPSpec | None = None
    shared_gate: bool = False
    dense: MLPSpec | None = None
    identity_experts: int = 0
    shortcut: bool = False

    @property
    def choices(self) -> int:
        """Number of experts from which the router chooses, identity experts included."""
        return self.num_experts + self.identity_experts

    def __post_init__(self) -> None:
        """Check that the router can choose the requested experts."""
        _check_activation(self.activation)
        router, experts = self.router, self.choices
        if self.identity_experts < 0:
            raise ConfigError(
                f"a mixture was described with {self.identity_experts} experts that return their input, but their "
                "number must be 0 or more: correct the config or `ttpu_mlp`."
            )
        if not 1 <= self.experts_per_token <= experts:
            raise ConfigError(
                f"a mixture was described that gives each token {self.experts_per_token} of {experts} experts, but the "
                f"number must be from 1 to {experts}: correct the config or `ttpu_mlp`."
            )
        if router.groups < 1 or experts % router.groups or not 1 <= router.top_groups <= router.groups:
            raise ConfigError(
                f"a mixture was described that chooses from {router.top_groups} of {router.groups} groups of {experts} "
                "experts, but the groups must divide the experts evenly, and no more groups can be chosen than there "
                "are: correct the config or `ttpu_mlp`."
            )
        if router.top_groups * (experts // router.groups) < self.experts_per_token:
            raise ConfigError(
                f"a mixture was described whose {router.top_groups} best groups hold "
                f"{router.top_groups * (experts // router.groups)} experts, fewer than the {self.experts_per_token} of "
                "each token: correct the config or `ttpu_mlp`."
            )
