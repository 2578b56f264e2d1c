"""Mixtures of experts as Qwen describes them. In: a config; out: the `MoESpec` of a layer, and the rules for experts
that are published as one tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ttpu_core import ModelConfig
from ttpu_core.defaults import activation
from ttpu_core.errors import ConfigError
from ttpu_core.layout import CheckpointNames
from ttpu_core.mapping import Expression, FlaxMapping, Tensor
from ttpu_core.spec import ArchitectureSpec, MLPSpec, MoESpec, RouterSpec

SHARED_EXPERT = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj")


def is_sparse(config: ModelConfig, layer: int) -> bool:
    """Whether a layer has experts, by `mlp_only_layers` and `decoder_sparse_step`; else it has a dense MLP."""
    config.get("intermediate_size")  # of the dense layers; files have it even where there are none
    dense = config.int_list("mlp_only_layers", default=())
    step = config.positive_int("decoder_sparse_step", default=1)
    return layer not in dense and number_of_experts(config) > 0 and (layer + 1) % step == 0


def number_of_experts(config: ModelConfig) -> int:
    """Experts of a layer, under either of the names that configs use."""
    number: int = config.require("num_local_experts" if "num_local_experts" in config else "num_experts", int)
    return number


def experts(config: ModelConfig, *, renormalize: bool, shared: bool) -> MoESpec:
    """Softmax over all experts, the best ones chosen; with a gated shared expert beside them where there is one.

    Raises:
        ConfigError: more experts per token than there are.
    """
    number, chosen = number_of_experts(config), config.positive_int("num_experts_per_tok")
    if chosen > number:
        raise ConfigError(
            f"{config.source} gives each token {chosen} of {number} experts, but there must be as many: correct "
            "'num_experts_per_tok' or 'num_experts'."
        )
    size = config.positive_int("shared_expert_intermediate_size") if shared else 0
    return MoESpec(
        num_experts=number,
        experts_per_token=chosen,
        intermediate_size=config.positive_int("moe_intermediate_size"),
        activation=activation(config),
        router=RouterSpec(renormalize=renormalize),
        shared=MLPSpec(size, activation(config)) if shared else None,
        shared_gate=shared,
    )


def with_stacked_experts(mapping: FlaxMapping, spec: ArchitectureSpec, names: CheckpointNames) -> FlaxMapping:
    """The mapping, which reads one tensor per expert, for checkpoints too that keep the experts of a layer in two
    tensors: `gate_up_proj` [experts, 2 * inner, hidden], gates first, and `down_proj` [experts, hidden, inner].

    That is how transformers 5 holds them in memory; Qwen3.5 is published so, and saved by transformers in the other
    way."""
    return replace(mapping, alternatives=(tuple(_stacked(spec, names)),))


def _stacked(spec: ArchitectureSpec, names: CheckpointNames) -> Iterator[tuple[str, Expression]]:
    hidden = spec.hidden_size
    for index, layer in enumerate(spec.layers):
        if isinstance(layer.mlp, MoESpec):
            count, inner = layer.mlp.num_experts, layer.mlp.intermediate_size
            path, name = f"layers.{index}.moe.experts", names.layer.format(layer=index) + "mlp.experts"
            gate_up = Tensor(f"{name}.gate_up_proj", (count, 2 * inner, hidden))
            yield f"{path}.gate_up.kernel", gate_up.reshape(count, 2, inner, hidden)
            yield f"{path}.down.kernel", Tensor(f"{name}.down_proj", (count, hidden, inner))
