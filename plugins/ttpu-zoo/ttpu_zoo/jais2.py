"""Jais 2 (`model_type` "jais2"): llama with LayerNorm, biases and a plain MLP of squared ReLUs."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.spec import MLPSpec, NormSpec

CONFIG_DEFAULTS = {
    "vocab_size": 150_272,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "hidden_act": "relu2",
    "tie_word_embeddings": False,
    "attention_bias": True,
    "mlp_bias": True,
}


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `Jais2Config`. The sizes that define a model are required."""
    return config.with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_norm(config: ModelConfig) -> NormSpec:
    """LayerNorm with scale and bias."""
    return NormSpec(kind="layer", eps=config.positive_number("layer_norm_eps"), bias=True, scale_in_fp32=True)


@hookimpl
def ttpu_mlp(config: ModelConfig) -> MLPSpec:
    """A plain MLP."""
    return replace(defaults.ttpu_mlp(config), gated=False)
