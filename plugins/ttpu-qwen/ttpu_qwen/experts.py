"""Mixtures of experts as Qwen's configs describe them."""

from __future__ import annotations

from ttpu_core import ModelConfig
from ttpu_core.defaults import activation
from ttpu_core.spec import MLPSpec, MoESpec, RouterSpec

SHARED_EXPERT = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj")


def is_sparse(config: ModelConfig, layer: int) -> bool:
    """Whether a layer has experts, by `mlp_only_layers` and `decoder_sparse_step`; else it has a dense MLP."""
    config.does_not_matter("intermediate_size", because="it is the size of dense layers, of which there may be none")
    dense = config.int_list("mlp_only_layers", default=())
    step = config.positive_int("decoder_sparse_step", default=1)
    return layer not in dense and number_of_experts(config) > 0 and (layer + 1) % step == 0


def number_of_experts(config: ModelConfig) -> int:
    """Number of experts per layer, under either of the two keys that configs use."""
    number: int = config.require("num_local_experts" if "num_local_experts" in config else "num_experts", int)
    return number


def experts(config: ModelConfig, *, renormalize: bool, shared: bool) -> MoESpec:
    """A mixture with softmax over all experts and the best ones chosen, and with a gated shared expert if `shared`."""
    size = config.positive_int("shared_expert_intermediate_size") if shared else 0
    return MoESpec(
        num_experts=number_of_experts(config),
        experts_per_token=config.positive_int("num_experts_per_tok"),
        intermediate_size=config.positive_int("moe_intermediate_size"),
        activation=activation(config),
        router=RouterSpec(renormalize=renormalize),
        shared=MLPSpec(size, activation(config)) if shared else None,
        shared_gate=shared,
    )
