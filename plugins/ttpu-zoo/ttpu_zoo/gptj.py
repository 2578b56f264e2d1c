"""GPT-J (`model_type` "gptj"): attention and MLP beside each other on one LayerNorm, a rope that turns neighbouring
features in a part of each head, and biases in MLP and head."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.errors import ConfigError
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import CheckpointNames, standard_mapping
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, BlockSpec, HeadSpec, MLPSpec, NormSpec, RopeSpec

CONFIG_DEFAULTS = {
    "vocab_size": 50_400,
    "max_position_embeddings": 2048,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "tie_word_embeddings": False,
    "rotary_dim": 64,
}
KEYS = {
    "n_embd": "hidden_size",
    "n_positions": "max_position_embeddings",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
}
NAMES = CheckpointNames(
    base="transformer.",
    layer="transformer.h.{layer}.",
    embedding="transformer.wte.weight",
    final_norm="transformer.ln_f",
    input_norm="ln_1",
    query="attn.q_proj",
    key="attn.k_proj",
    value="attn.v_proj",
    output="attn.out_proj",
    up="mlp.fc_in",
    down="mlp.fc_out",
)


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `GPTJConfig`. The sizes that define a model are required."""
    return config.with_renamed(KEYS).with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_norm(config: ModelConfig) -> NormSpec:
    """LayerNorm with scale and bias."""
    return NormSpec(kind="layer", eps=config.positive_number("layer_norm_epsilon"), bias=True, scale_in_fp32=True)


@hookimpl
def ttpu_block() -> BlockSpec:
    """Attention and MLP beside each other, on the same norm."""
    return BlockSpec(placement="parallel")


@hookimpl
def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:
    """Rope that turns neighbouring features, among the first `rotary_dim` of each head.

    Raises:
        ConfigError: `rotary_dim` is odd, or more than a head has.
    """
    turned = config.positive_int("rotary_dim")
    if turned % 2 or turned > attention.head_dim:
        raise ConfigError(
            f"{config.source} rotates {turned} of {attention.head_dim} features per head, but an even number of "
            "them is needed: correct `rotary_dim`, or `n_embd` and `n_head`."
        )
    context = config.positive_int("max_position_embeddings")
    return RopeSpec(rotary_dim=turned, layout="interleaved", max_position_embeddings=context)


@hookimpl
def ttpu_mlp(config: ModelConfig) -> MLPSpec:
    """A plain MLP with biases, four times as wide as the stream unless the config says otherwise."""
    inner = config.positive_int("n_inner", default=4 * config.positive_int("hidden_size"))
    return MLPSpec(inner, defaults.activation(config, "activation_function"), gated=False, bias=True)


@hookimpl
def ttpu_head(config: ModelConfig) -> HeadSpec:
    """A head with a bias."""
    return replace(defaults.ttpu_head(config), bias=True)


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """GPT-2's names, one tensor per projection; published checkpoints hold masks."""
    usual = standard_mapping(spec, NAMES)
    return replace(usual, ignored=(*usual.ignored, r".*\.attn\.bias"))
