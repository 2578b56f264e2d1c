"""Qwen3.5 with experts: `qwen3_5_moe_text`, and the text part of the multimodal `qwen3_5_moe`. Every layer has a
mixture of experts with a shared one, and the chosen experts' weights are always renormalised."""

from __future__ import annotations

from ttpu_core import ModelConfig, hookimpl
from ttpu_core.errors import ConfigError
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import stacked_experts, standard_mapping, with_alternative
from ttpu_core.spec import ArchitectureSpec, MoESpec
from ttpu_qwen import hybrid, multimodal
from ttpu_qwen.experts import experts
from ttpu_qwen.qwen3_5 import split_inputs

CONFIG_DEFAULTS = hybrid.CONFIG_DEFAULTS | {
    "vocab_size": 248_320,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
}

# Hooks of this module too.
ttpu_norm, ttpu_mixer, ttpu_attention = hybrid.ttpu_norm, hybrid.ttpu_mixer, hybrid.ttpu_attention


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The text part, with the class's defaults.

    Raises:
        ConfigError: the config lists layers without experts, which transformers does not support for this type.
    """
    text = multimodal.text_config(config, CONFIG_DEFAULTS)
    if text.items("mlp_only_layers", default=()):
        raise ConfigError(
            f"{config.source} lists 'mlp_only_layers', but every layer of this type has experts: correct the list to "
            "[], or take the config.json that the checkpoint was published with."
        )
    return text


@hookimpl
def ttpu_mlp(config: ModelConfig) -> MoESpec:
    """Experts with a shared expert."""
    return experts(config, renormalize=True, shared=True)


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """The usual names, below the prefix of the text part. A checkpoint holds one tensor per expert, as transformers
    saves them, or two stacked tensors per layer, as they are published."""
    names = multimodal.tensor_names(spec.model_type)
    mapping = hybrid.with_mixer_rules(standard_mapping(spec, names), spec, names, split_inputs)
    return with_alternative(multimodal.either_prefix(mapping, spec.model_type), stacked_experts(spec, names))
