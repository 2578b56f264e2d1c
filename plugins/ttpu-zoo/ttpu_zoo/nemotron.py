"""Nemotron 3 and 4, and Minitron (`model_type` "nemotron"; arXiv 2402.16819): LayerNorm with a scale of 1 + w, a plain
MLP of squared ReLU, and a rope on half of each head."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.spec import AttentionSpec, MLPSpec, NormSpec
from ttpu_core.spec.rope import RopeSpec, rope_from_config

CONFIG_DEFAULTS = {
    "vocab_size": 256_000,
    "max_position_embeddings": 4096,
    "norm_eps": 1e-5,
    "hidden_act": "relu2",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 0.5,
}


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `NemotronConfig`. The sizes that define a model are required."""
    return config.with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_norm(config: ModelConfig) -> NormSpec:
    """`NemotronLayerNorm1P`: LayerNorm with a scale of 1 + w, which is rounded to the weights' dtype, and a bias."""
    eps = config.positive_number("norm_eps")
    return NormSpec(kind="layer", eps=eps, bias=True, offset=1.0, scale_in_fp32=True, offset_in_fp32=False)


@hookimpl
def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:
    """Rope on the first part of each head."""
    return rope_from_config(config, head_dim=attention.head_dim, partial=True)


@hookimpl
def ttpu_mlp(config: ModelConfig) -> MLPSpec:
    """A plain MLP."""
    return replace(defaults.ttpu_mlp(config), gated=False)
