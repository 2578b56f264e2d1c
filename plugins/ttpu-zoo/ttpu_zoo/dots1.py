"""dots.llm1 (`model_type` "dots1"; arXiv 2506.05767): DeepSeek-V3's mixture of experts after the first dense layers, a
norm on each head of queries and keys, and windows in the last layers if the config asks for them."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.spec import AttentionSpec
from ttpu_zoo import glm4_moe

SLIDING, FULL = "sliding_attention", "full_attention"
CONFIG_DEFAULTS = {
    "vocab_size": 152_064,
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "moe_intermediate_size": 1408,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "norm_topk_prob": False,
    "sliding_window": 4096,
    "max_window_layers": 62,
}

ttpu_mlp = glm4_moe.ttpu_mlp  # a hook of this module too


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the names and defaults of `Dots1Config`. The sizes that define a model are required."""
    config.get("intermediate_size")  # size of dense layers; there may be none
    return config.with_renamed({"num_local_experts": "n_routed_experts"}).with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_attention(config: ModelConfig, layer: int) -> AttentionSpec:
    """Attention with a norm for each head, and with a window in sliding layers. Older files write only from which layer
    on they are sliding."""
    norm, windows = defaults.ttpu_norm(config), "sliding_window" in config
    assumed = SLIDING if windows and layer >= config.require("max_window_layers", int) else FULL
    sliding = defaults.layer_type(config, layer, assumed=assumed) == SLIDING
    window = config.positive_int("sliding_window") if sliding else None
    return replace(defaults.ttpu_attention(config), q_norm=norm, k_norm=norm, window=window)
