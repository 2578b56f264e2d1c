"""AFM-4.5B (`model_type` "arcee"): llama with a plain MLP of squared ReLU."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.spec import MLPSpec

CONFIG_DEFAULTS = {
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "relu2",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `ArceeConfig`. The sizes that define a model are required."""
    return config.with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_mlp(config: ModelConfig) -> MLPSpec:
    """A plain MLP."""
    return replace(defaults.ttpu_mlp(config), gated=False)
