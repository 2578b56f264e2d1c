"""OLMo (`model_type` "olmo"; arXiv 2402.00838): llama whose norms have no parameters, and whose queries, keys and
values may be clipped."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.spec import AttentionSpec, NormSpec
from ttpu_core.spec.rope import RopeSpec, rope_from_config

CONFIG_DEFAULTS = {
    "vocab_size": 50_304,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
}


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `OlmoConfig`. The sizes that define a model are required."""
    return config.with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_norm() -> NormSpec:
    """`OlmoLayerNorm` has neither weight nor bias, and an epsilon of its own."""
    return NormSpec(kind="layer", eps=1e-5, scale=False)


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """Queries, keys and values stay within `clip_qkv`."""
    return replace(defaults.ttpu_attention(config), clip_qkv=config.number("clip_qkv", default=None))


@hookimpl
def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:
    """`OlmoRotaryEmbedding` leaves cos and sin in float32."""
    return rope_from_config(config, head_dim=attention.head_dim, fp32=True)
