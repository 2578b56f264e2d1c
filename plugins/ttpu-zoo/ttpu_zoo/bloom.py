"""BLOOM (`model_type` "bloom"; arXiv 2211.05100): ALiBi instead of rope, LayerNorm also behind the embedding, and
biases everywhere."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import CheckpointNames, fused_qkv, replace_rules, standard_mapping
from ttpu_core.spec import (
    NO_ROPE,
    ActivationSpec,
    AlibiSpec,
    ArchitectureSpec,
    AttentionSpec,
    BlockSpec,
    EmbeddingSpec,
    MLPSpec,
    NormSpec,
    RopeSpec,
)

CONFIG_DEFAULTS = {
    "vocab_size": 250_880,
    "max_position_embeddings": 2048,
    "layer_norm_epsilon": 1e-5,
    "apply_residual_connection_post_layernorm": False,
    "tie_word_embeddings": True,
}
KEYS = {
    "n_embed": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "seq_length": "max_position_embeddings",
}
NAMES = CheckpointNames(
    base="transformer.",
    layer="transformer.h.{layer}.",
    embedding="transformer.word_embeddings.weight",
    embedding_norm="transformer.word_embeddings_layernorm",
    final_norm="transformer.ln_f",
    output="self_attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the names and defaults of `BloomConfig`. The sizes that define a model are required."""
    config.does_not_matter(("pretraining_tp", "slow_but_exact"), because="they change the order of additions alone")
    return config.with_renamed(KEYS).with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_norm(config: ModelConfig) -> NormSpec:
    """LayerNorm with scale and bias."""
    return NormSpec(kind="layer", eps=config.positive_number("layer_norm_epsilon"), bias=True, scale_in_fp32=True)


@hookimpl
def ttpu_embedding(config: ModelConfig) -> EmbeddingSpec:
    """Tokens, behind a LayerNorm."""
    return replace(defaults.ttpu_embedding(config), norm=ttpu_norm(config))


@hookimpl
def ttpu_block(config: ModelConfig) -> BlockSpec:
    """Residuals start at the norms' outputs if the config says so."""
    return BlockSpec(normed_residual=config.flag("apply_residual_connection_post_layernorm"))


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """Attention with ALiBi and biases."""
    return replace(defaults.ttpu_attention(config), qkv_bias=True, output_bias=True, alibi=AlibiSpec())


@hookimpl
def ttpu_rope() -> RopeSpec:
    """None: ALiBi tells positions."""
    return NO_ROPE


@hookimpl
def ttpu_mlp(config: ModelConfig) -> MLPSpec:
    """A plain MLP with biases, four times as wide as the stream."""
    return MLPSpec(4 * config.positive_int("hidden_size"), ActivationSpec("gelu_tanh"), gated=False, bias=True)


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """Each head's query, key and value in one tensor."""
    rules = fused_qkv(spec, NAMES, "self_attention.query_key_value", by_group=True)
    return replace_rules(standard_mapping(spec, NAMES), rules)
