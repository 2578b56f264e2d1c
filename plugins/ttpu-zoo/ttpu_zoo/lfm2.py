"""LFM2 (`model_type` "lfm2"; arXiv 2511.23404): gated short convolutions in most layers, and attention with norms on
heads in the others."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import CheckpointNames, standard_mapping
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, MixerSpec, MLPSpec, NormSpec
from ttpu_core.spec.rope import RopeSpec, rope_from_config
from ttpu_core.spec.short_convolution import short_convolution

CONFIG_DEFAULTS = {
    "vocab_size": 65_536,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}
RENAMED = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
OTHER_CODE = ("block_dim", "block_norm_eps", "block_use_swiglu", "conv_dim", "conv_dim_out", "num_heads", "theta",
              "use_pos_enc", "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init",
              "conv_use_xavier_init")  # fmt: skip
NAMES = CheckpointNames(
    final_norm="model.embedding_norm",
    output="self_attn.out_proj",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    input_norm="operator_norm",
    mlp_norm="ffn_norm",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
)
FULL, CONVOLUTION = "full_attention", "conv"


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the names and defaults of `Lfm2Config`. The sizes that define a model are required."""
    config.does_not_matter(OTHER_CODE, because="the code that LiquidAI publishes reads them, and transformers does not")
    return config.with_renamed(RENAMED).with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_norm(config: ModelConfig) -> NormSpec:
    """RMSNorm, whose epsilon has a name of its own."""
    return NormSpec(eps=config.positive_number("norm_eps"))


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """Attention without biases, with norms on heads."""
    norm = ttpu_norm(config)
    return replace(defaults.ttpu_attention(config), qkv_bias=False, output_bias=False, q_norm=norm, k_norm=norm)


@hookimpl
def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:
    """Rope with a base of a million where the config names none."""
    return rope_from_config(config, head_dim=attention.head_dim, theta=1_000_000.0)


@hookimpl
def ttpu_mixer(config: ModelConfig, layer: int) -> MixerSpec | None:
    """A short convolution in layers of the type "conv". Without `layer_types`, attention is in the layers of
    `full_attn_idxs`, or in all."""
    ttpu_attention(config)  # reads its keys for a model without attention, too
    indices = config.int_list("full_attn_idxs", default=None)
    assumed = FULL if indices is None or layer in indices else CONVOLUTION
    mixer = short_convolution(
        hidden_size=config.positive_int("hidden_size"),
        kernel=config.positive_int("conv_L_cache"),
        bias=config.flag("conv_bias"),
    )
    return mixer if defaults.layer_type(config, layer, (FULL, CONVOLUTION), assumed=assumed) == CONVOLUTION else None


@hookimpl
def ttpu_mlp(config: ModelConfig) -> MLPSpec:
    """A gated MLP, of two thirds of the size that the config names unless it says otherwise, rounded up."""
    size, factor = config.positive_int("intermediate_size"), config.number("block_ffn_dim_multiplier")
    multiple = config.positive_int("block_multiple_of")
    if config.flag("block_auto_adjust_ff_dim"):
        size = -(-int(factor * int(2 * size / 3)) // multiple) * multiple
    return MLPSpec(size)


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """Names of its own."""
    return standard_mapping(spec, NAMES)
