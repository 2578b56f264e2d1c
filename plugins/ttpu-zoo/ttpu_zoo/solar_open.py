"""Solar Open (`model_type` "solar_open"): experts in each layer, chosen as in DeepSeek-V3, with a shared one."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.spec import AttentionSpec, MoESpec
from ttpu_core.spec.rope import RopeSpec, rope_from_config
from ttpu_zoo.deepseek_v3 import deepseek_experts

CONFIG_DEFAULTS = {
    "vocab_size": 196_608,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "moe_intermediate_size": 1280,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the names and defaults of `SolarOpenConfig`. The sizes that define a model are required."""
    return config.with_renamed({"num_local_experts": "n_routed_experts"}).with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """Biases on queries, keys and values only."""
    return replace(defaults.ttpu_attention(config), output_bias=False)


@hookimpl
def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:
    """Rope with a base of a million where the config names none."""
    return rope_from_config(config, head_dim=attention.head_dim, theta=1_000_000.0)


@hookimpl
def ttpu_mlp(config: ModelConfig) -> MoESpec:
    """DeepSeek-V3's experts."""
    return deepseek_experts(config)
