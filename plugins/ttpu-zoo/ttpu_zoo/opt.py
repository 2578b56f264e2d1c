"""OPT (`model_type` "opt"; arXiv 2205.01068): learned positions from the third row of their table on, LayerNorm, a
plain MLP, and biases everywhere. OPT-350M norms the stream after each sub-layer, and has fewer features in its token
table than in the stream."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import CheckpointNames, standard_mapping
from ttpu_core.spec import (
    NO_ROPE,
    ArchitectureSpec,
    AttentionSpec,
    BlockSpec,
    EmbeddingSpec,
    MLPSpec,
    NormSpec,
    RopeSpec,
)

CONFIG_DEFAULTS = {
    "vocab_size": 50_272,
    "max_position_embeddings": 2048,
    "ffn_dim": 3072,
    "activation_function": "relu",
    "tie_word_embeddings": True,
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
}
NAMES = CheckpointNames(
    layer="model.decoder.layers.{layer}.",
    embedding="model.decoder.embed_tokens.weight",
    positions="model.decoder.embed_positions.weight",
    embedding_projection="model.decoder.project_in",
    final_norm="model.decoder.final_layer_norm",
    final_projection="model.decoder.project_out",
    input_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    output="self_attn.out_proj",
    post_attention_norm="self_attn_layer_norm",
    post_mlp_norm="final_layer_norm",
    up="fc1",
    down="fc2",
)


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `OPTConfig`. The sizes that define a model are required."""
    return config.with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_embedding(config: ModelConfig) -> EmbeddingSpec:
    """Tokens and learned positions, of which the first two rows are unused. `word_embed_proj_dim` counts the features
    of the token table."""
    embedding = defaults.ttpu_embedding(config)
    features = config.positive_int("word_embed_proj_dim", default=embedding.hidden_size)
    return replace(
        embedding,
        positions=config.positive_int("max_position_embeddings"),
        position_offset=2,
        table_features=None if features == embedding.hidden_size else features,
    )


@hookimpl
def ttpu_norm(config: ModelConfig) -> NormSpec:
    """LayerNorm, with scale and bias unless the config says otherwise."""
    learned = config.flag("layer_norm_elementwise_affine")
    return NormSpec(kind="layer", eps=1e-5, scale=learned, bias=learned, scale_in_fp32=True)


@hookimpl
def ttpu_final_norm(config: ModelConfig) -> NormSpec:
    """The same before the head, unless norms follow the sub-layers. Models that were fine-tuned with old versions of
    transformers do without."""
    absent = config.flag("_remove_final_layer_norm") or not config.flag("do_layer_norm_before")
    return NormSpec(kind="none") if absent else ttpu_norm(config)


@hookimpl
def ttpu_block(config: ModelConfig) -> BlockSpec:
    """Norms before each sub-layer, or of the stream after it (OPT-350M)."""
    return BlockSpec("pre" if config.flag("do_layer_norm_before") else "post_residual")


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """Attention with biases unless the config says otherwise."""
    bias = config.flag("enable_bias")
    return replace(defaults.ttpu_attention(config), qkv_bias=bias, output_bias=bias)


@hookimpl
def ttpu_rope() -> RopeSpec:
    """None: positions are learned."""
    return NO_ROPE


@hookimpl
def ttpu_mlp(config: ModelConfig) -> MLPSpec:
    """A plain MLP."""
    activation = defaults.activation(config, "activation_function")
    return MLPSpec(config.positive_int("ffn_dim"), activation, gated=False, bias=config.flag("enable_bias"))


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """OPT's names."""
    return standard_mapping(spec, NAMES)
