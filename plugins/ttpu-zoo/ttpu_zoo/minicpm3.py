"""MiniCPM3 (`model_type` "minicpm3"): latent attention; embeddings, sub-layer outputs and logits are scaled."""

from dataclasses import replace
from math import sqrt

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.spec import BlockSpec, EmbeddingSpec, HeadSpec, MixerSpec
from ttpu_zoo.deepseek_v3 import FOLLOWING, deepseek_attention

CONFIG_DEFAULTS = {
    "vocab_size": 73_448,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "kv_lora_rank": 256,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": None,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
}


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `MiniCPM3Config`. The sizes that define a model are required."""
    config.does_not_matter(FOLLOWING, because="they follow from other keys")
    config = config.with_defaults(CONFIG_DEFAULTS)
    share = config.positive_int("hidden_size") // config.positive_int("num_attention_heads")
    return config.with_values({"v_head_dim": config.positive_int("v_head_dim", default=share)})


@hookimpl
def ttpu_embedding(config: ModelConfig) -> EmbeddingSpec:
    """Embeddings times `scale_emb`."""
    return replace(defaults.ttpu_embedding(config), scale=config.number("scale_emb"))


@hookimpl
def ttpu_mixer(config: ModelConfig) -> MixerSpec:
    """DeepSeek-V2's latent attention, whose rotated features are halves."""
    return deepseek_attention(config, interleaved=False)


@hookimpl
def ttpu_block(config: ModelConfig) -> BlockSpec:
    """Sub-layer outputs times `scale_depth` / sqrt(layers); null is no scaling."""
    layers = sqrt(config.positive_int("num_hidden_layers"))
    return BlockSpec(residual_multiplier=config.number("scale_depth", default=layers) / layers)


@hookimpl
def ttpu_head(config: ModelConfig) -> HeadSpec:
    """Logits times `dim_model_base` / hidden size; null is no scaling."""
    hidden = config.positive_int("hidden_size")
    base = config.positive_int("dim_model_base", default=hidden)
    return replace(defaults.ttpu_head(config), multiplier=base / hidden)
