"""InternLM3 and IQuest-Coder (`model_type` "internlm3" and "iquestcoder"): llama with heads of a size of their own."""

from ttpu_core import ModelConfig, hookimpl

COMMON_DEFAULTS = {
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
CONFIG_DEFAULTS = {
    "internlm3": {"vocab_size": 128_512, "num_key_value_heads": 2, "max_position_embeddings": 32_768},
    "iquestcoder": {"vocab_size": 76_800, "num_key_value_heads": 8, "max_position_embeddings": 131_072},
}
RENAMED = {"internlm3": {"qkv_bias": "attention_bias", "bias": "mlp_bias"}, "iquestcoder": {}}


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the names and defaults of the types' config classes. The sizes that define a model are
    required."""
    own = COMMON_DEFAULTS | CONFIG_DEFAULTS[config.model_type]
    return config.with_renamed(RENAMED[config.model_type]).with_defaults(own)
