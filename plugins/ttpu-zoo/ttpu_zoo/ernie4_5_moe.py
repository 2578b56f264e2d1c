"""ERNIE 4.5 MoE (`model_type` "ernie4_5_moe"): ernie4_5 with a mixture of experts in some layers, chosen by corrected
probabilities, beside shared experts."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.mapping import Expression, FlaxMapping, Tensor
from ttpu_core.mapping.layout import replace_rules, standard_mapping
from ttpu_core.spec import ArchitectureSpec, HeadSpec, MLPSpec, MoESpec, RouterSpec
from ttpu_zoo import ernie4_5

CONFIG_DEFAULTS = {
    "vocab_size": 103_424,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_norm_min": 1e-12,
}
RENAMED = {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}

ttpu_attention, ttpu_rope = ernie4_5.ttpu_attention, ernie4_5.ttpu_rope  # hooks of this module too


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the names and defaults of `Ernie4_5_MoeConfig`. The sizes that define a model are required."""
    config.does_not_matter("intermediate_size", because="it is the size of dense layers, of which there may be none")
    return config.with_renamed(RENAMED).with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_head(config: ModelConfig) -> HeadSpec:
    """The head has a bias where all layers do."""
    return replace(defaults.ttpu_head(config), bias=config.flag("use_bias", default=False))


@hookimpl
def ttpu_mlp(config: ModelConfig, layer: int) -> MLPSpec | MoESpec:
    """Experts in every `moe_layer_interval`-th layer from the first index to the last, else a dense MLP."""
    first, last = config.require("moe_layer_start_index", int), config.require("moe_layer_end_index", int)
    last = config.positive_int("num_hidden_layers") - 1 if last == -1 else last
    shared, inner = config.require("moe_num_shared_experts", int), config.positive_int("moe_intermediate_size")
    minimum, activation = config.number("moe_norm_min"), defaults.activation(config)
    if (layer + 1) % config.positive_int("moe_layer_interval") or not first <= layer <= last:
        return ernie4_5.ttpu_mlp(config)
    return MoESpec(
        num_experts=config.positive_int("moe_num_experts"),
        experts_per_token=config.positive_int("moe_k"),
        intermediate_size=inner,
        activation=activation,
        router=RouterSpec(renormalize=True, renormalize_min=minimum, correction_bias=True, fp32=True),
        shared=MLPSpec(inner * shared, activation, bias=config.flag("use_bias", default=False)) if shared else None,
    )


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """The usual names, but for the correction of the choice. What predicts further tokens is left out."""
    rules: dict[str, Expression | None] = {}
    for index, layer in enumerate(spec.layers):
        if isinstance(layer.mlp, MoESpec):
            name, experts = f"model.layers.{index}.mlp.moe_statics.e_score_correction_bias", layer.mlp.num_experts
            rules[f"layers.{index}.moe.router.correction_bias"] = Tensor(name, (1, experts)).reshape(experts)
    mapping = replace_rules(standard_mapping(spec), rules)
    return replace(mapping, ignored=(*mapping.ignored, r".*\bmtp_.*"))
