"""BitNet b1.58 (`model_type` "bitnet"), with weights that are not packed: llama with squared ReLU, and norms before the
last product of attention and of the MLP."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.spec import AttentionSpec, MLPSpec
from ttpu_core.spec.rope import RopeSpec, rope_from_config

CONFIG_DEFAULTS = {
    "vocab_size": 128_256,
    "num_key_value_heads": 5,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "relu2",
    "tie_word_embeddings": False,
    "attention_bias": False,
}


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `BitNetConfig`. The sizes that define a model are required."""
    return config.with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """A norm over all heads before the output projection."""
    return replace(defaults.ttpu_attention(config), output_norm=defaults.ttpu_norm(config))


@hookimpl
def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:
    """Rope with a base of 500,000 where the config names none."""
    return rope_from_config(config, head_dim=attention.head_dim, theta=500_000.0)


@hookimpl
def ttpu_mlp(config: ModelConfig) -> MLPSpec:
    """A norm before the down projection, and no biases."""
    return replace(defaults.ttpu_mlp(config), inner_norm=defaults.ttpu_norm(config))
