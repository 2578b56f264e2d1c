"""FlexOlmo (`model_type` "flex_olmo"; arXiv 2507.07024): OLMo 2 with OLMoE's experts."""

from ttpu_core import ModelConfig, hookimpl
from ttpu_core.spec import AttentionSpec
from ttpu_core.spec.rope import RopeSpec, rope_from_config
from ttpu_zoo import olmo2, olmoe

CONFIG_DEFAULTS = {
    "vocab_size": 100_352,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "num_experts": 7,
    "num_experts_per_tok": 5,
    "norm_topk_prob": False,
}

ttpu_norm, ttpu_block, ttpu_attention = olmo2.ttpu_norm, olmo2.ttpu_block, olmo2.ttpu_attention  # hooks of this module
ttpu_mlp = olmoe.ttpu_mlp


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the names and defaults of `FlexOlmoConfig`. The sizes that define a model are required."""
    return config.with_renamed({"num_local_experts": "num_experts"}).with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:
    """OLMo 2's rope, with a base of 500,000 where the config names none."""
    return rope_from_config(config, head_dim=attention.head_dim, fp32=True, theta=500_000.0)
