"""OPT (`model_type` "opt"; arXiv 2205.01068): learned positions from the third row of their table on, LayerNorm, a
plain MLP, and biases everywhere. The layout of OPT-350M is refused."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.errors import ConfigError
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import CheckpointNames, standard_mapping
from ttpu_core.spec import NO_ROPE, ArchitectureSpec, AttentionSpec, EmbeddingSpec, MLPSpec, NormSpec, RopeSpec

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
    final_norm="model.decoder.final_layer_norm",
    input_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    output="self_attn.out_proj",
    up="fc1",
    down="fc2",
)


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `OPTConfig`. The sizes that define a model are required.

    Raises:
        ConfigError: norms follow attention and MLP, or tokens have fewer features than the stream (OPT-350M).
    """
    config = config.with_defaults(CONFIG_DEFAULTS)
    features = config.positive_int("word_embed_proj_dim", default=config.positive_int("hidden_size"))
    if not config.flag("do_layer_norm_before") or features != config.positive_int("hidden_size"):
        raise ConfigError(
            f"{config.source} has 'do_layer_norm_before' {config.flag('do_layer_norm_before')} and "
            f"'word_embed_proj_dim' {features} for a hidden size of {config.positive_int('hidden_size')}, but only OPT "
            "with norms before attention and MLP and without projections is described: set TTPU_DISABLE_PLUGINS=opt so "
            "that ttpu-any runs transformers' own code, or take another size than 350M."
        )
    return config


@hookimpl
def ttpu_embedding(config: ModelConfig) -> EmbeddingSpec:
    """Tokens and learned positions, of which the first two rows are unused."""
    positions = config.positive_int("max_position_embeddings")
    return replace(defaults.ttpu_embedding(config), positions=positions, position_offset=2)


@hookimpl
def ttpu_norm(config: ModelConfig) -> NormSpec:
    """LayerNorm, with scale and bias unless the config says otherwise."""
    learned = config.flag("layer_norm_elementwise_affine")
    return NormSpec(kind="layer", eps=1e-5, scale=learned, bias=learned, scale_in_fp32=True)


@hookimpl
def ttpu_final_norm(config: ModelConfig) -> NormSpec:
    """The same before the head, which models fine-tuned with old versions of transformers do without."""
    return NormSpec(kind="none") if config.flag("_remove_final_layer_norm") else ttpu_norm(config)


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
