"""StarCoder 2 (`model_type` "starcoder2"; arXiv 2402.19173): LayerNorm, a plain MLP, biases everywhere, and a window on
every layer if the config has one."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import CheckpointNames, standard_mapping
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, MLPSpec, NormSpec

CONFIG_DEFAULTS = {
    "vocab_size": 49_152,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "norm_epsilon": 1e-5,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "use_bias": True,
}


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `Starcoder2Config`. The sizes that define a model are required."""
    return config.with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_norm(config: ModelConfig) -> NormSpec:
    """LayerNorm with scale and bias."""
    return NormSpec(kind="layer", eps=config.positive_number("norm_epsilon"), bias=True, scale_in_fp32=True)


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """Attention with biases, and with a window if the config has one."""
    bias, window = config.flag("use_bias"), config.positive_int("sliding_window", default=None)
    return replace(defaults.ttpu_attention(config), qkv_bias=bias, output_bias=bias, window=window)


@hookimpl
def ttpu_mlp(config: ModelConfig) -> MLPSpec:
    """A plain MLP."""
    return replace(defaults.ttpu_mlp(config), gated=False, bias=config.flag("use_bias"))


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """The usual names but for the MLP's."""
    return standard_mapping(spec, CheckpointNames(up="mlp.c_fc", down="mlp.c_proj"))
