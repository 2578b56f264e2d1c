"""OLMo 2 (`model_type` "olmo2"; arXiv 2501.00656): llama with norms after the sub-layers, and norms over all heads of
queries and of keys."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.spec import AttentionSpec, BlockSpec, NormSpec
from ttpu_core.spec.rope import RopeSpec, rope_from_config

CONFIG_DEFAULTS = {
    "vocab_size": 50_304,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
}


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `Olmo2Config`. The sizes that define a model are required."""
    return config.with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_norm(config: ModelConfig) -> NormSpec:
    """`Olmo2RMSNorm` multiplies by its weight before the cast back to the activations' dtype."""
    return NormSpec(eps=config.positive_number("rms_norm_eps"), scale_in_fp32=True)


@hookimpl
def ttpu_block() -> BlockSpec:
    """A norm after attention and after the MLP, and none before them."""
    return BlockSpec(placement="post")


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """The norms see the whole projection, before it is split into heads."""
    norm = ttpu_norm(config)
    return replace(defaults.ttpu_attention(config), q_norm=norm, k_norm=norm, qk_norm_scope="full")


@hookimpl
def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:
    """`Olmo2RotaryEmbedding` leaves cos and sin in float32."""
    return rope_from_config(config, head_dim=attention.head_dim, fp32=True)
