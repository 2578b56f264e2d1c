"""GPT-NeoX (`model_type` "gpt_neox"; arXiv 2204.06745): attention and MLP beside each other, each on a LayerNorm of its
own, with biases, and a rope on a quarter of each head."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import CheckpointNames, fused_qkv, replace_rules, standard_mapping
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, BlockSpec, MLPSpec, NormSpec
from ttpu_core.spec.rope import RopeSpec, rope_from_config

CONFIG_DEFAULTS = {
    "vocab_size": 50_432,
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "hidden_act": "gelu",
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
    "attention_bias": True,
    "rotary_pct": 0.25,
}
NAMES = CheckpointNames(
    base="gpt_neox.",
    layer="gpt_neox.layers.{layer}.",
    embedding="gpt_neox.embed_in.weight",
    final_norm="gpt_neox.final_layer_norm",
    output="attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `GPTNeoXConfig`. The sizes that define a model are required."""
    return config.with_defaults(CONFIG_DEFAULTS).with_renamed({"rotary_pct": "partial_rotary_factor"})


@hookimpl
def ttpu_norm(config: ModelConfig) -> NormSpec:
    """LayerNorm with scale and bias."""
    return NormSpec(kind="layer", eps=config.positive_number("layer_norm_eps"), bias=True, scale_in_fp32=True)


@hookimpl
def ttpu_block(config: ModelConfig) -> BlockSpec:
    """Attention and MLP beside each other, or one after the other."""
    return BlockSpec(placement="parallel_two_norms" if config.flag("use_parallel_residual") else "pre")


@hookimpl
def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:
    """Rope on the first features of each head."""
    return rope_from_config(config, head_dim=attention.head_dim, theta_key="rotary_emb_base", partial=True)


@hookimpl
def ttpu_mlp(config: ModelConfig) -> MLPSpec:
    """A plain MLP with biases."""
    return replace(defaults.ttpu_mlp(config), gated=False, bias=True)


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """Each head's query, key and value in one tensor; published checkpoints call the head `embed_out`, and hold
    masks."""
    rules = fused_qkv(spec, NAMES, "attention.query_key_value", by_group=True)
    usual = replace_rules(standard_mapping(spec, NAMES), rules)
    prefixes = (("embed_out.", "lm_head."), *usual.prefixes)
    return replace(usual, prefixes=prefixes, ignored=(*usual.ignored, r".*\.attention\.bias"))
