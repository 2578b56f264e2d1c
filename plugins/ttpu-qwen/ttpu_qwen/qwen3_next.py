"""Qwen3-Next-80B-A3B and Qwen3-Coder-Next: Gated DeltaNet in three of four layers, gated attention in the fourth,
and a mixture of many small experts with a shared one."""

from __future__ import annotations

from ttpu_core import ModelConfig, hookimpl
from ttpu_core import defaults as core
from ttpu_core.mapping import FlaxMapping, Tensor
from ttpu_core.mapping.layout import CheckpointNames, Rules, stacked_experts, standard_mapping, with_alternative
from ttpu_core.spec import ArchitectureSpec, MixerSpec, MLPSpec, MoESpec
from ttpu_qwen import hybrid
from ttpu_qwen.experts import SHARED_EXPERT, experts, is_sparse

CONFIG_DEFAULTS = hybrid.CONFIG_DEFAULTS | {
    "vocab_size": 151_936,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "norm_topk_prob": True,
}
NAMES = CheckpointNames(shared_gate_up_down=SHARED_EXPERT)

# Hooks of this module too.
ttpu_norm, ttpu_mixer, ttpu_attention = hybrid.ttpu_norm, hybrid.ttpu_mixer, hybrid.ttpu_attention


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """A qwen3_next config with the class's defaults."""
    config.does_not_matter("use_sliding_window", because="no layer of this type slides")
    return config.with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_mlp(config: ModelConfig, layer: int) -> MLPSpec | MoESpec:
    """Experts with a shared expert, or a dense MLP."""
    renormalize = config.flag("norm_topk_prob")
    return experts(config, renormalize=renormalize, shared=True) if is_sparse(config, layer) else core.ttpu_mlp(config)


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """The usual names. Checkpoints store DeltaNet's input projections fused and grouped by key head, as the
    parameters do."""
    mapping = hybrid.with_mixer_rules(standard_mapping(spec, NAMES), spec, NAMES, _fused_inputs)
    return with_alternative(mapping, stacked_experts(spec, NAMES))


def _fused_inputs(spec: MixerSpec, hidden: int, prefix: str) -> Rules:
    parameters = dict(spec.parameters)
    heads, rows, _ = parameters["qkvz.kernel"].shape
    yield "qkvz.kernel", Tensor(f"{prefix}in_proj_qkvz.weight", (heads * rows, hidden)).reshape(heads, rows, hidden)
    _, pair, group, _ = parameters["ba.kernel"].shape
    ba = Tensor(f"{prefix}in_proj_ba.weight", (heads * pair * group, hidden))
    yield "ba.kernel", ba.reshape(heads, pair, group, hidden)
