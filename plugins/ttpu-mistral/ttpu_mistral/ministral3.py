"""Ministral 3: mistral without windows, with queries that are scaled by position beyond yarn's original context. The
hooks answer for `model_type` "ministral3"."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.spec import AttentionSpec, QueryTemperature

CONFIG_DEFAULTS = {
    "vocab_size": 131_072,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `Ministral3Config`."""
    return with_usual_rope(config.with_defaults(CONFIG_DEFAULTS), CONFIG_DEFAULTS)


def with_usual_rope(config: ModelConfig, usual: Mapping[str, Any]) -> ModelConfig:
    """The config with the class's rope in place of a null, which the class treats as an absent key."""
    if "rope_parameters" in config or "rope_scaling" in config:
        return config
    return config.with_values({"rope_parameters": usual["rope_parameters"]})


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """Attention with a query temperature, and with a window on every layer if the config has one."""
    return replace(
        defaults.ttpu_attention(config),
        window=config.positive_int("sliding_window", default=None),
        query_temperature=query_temperature(config),
    )


def query_temperature(config: ModelConfig) -> QueryTemperature | None:
    """1 + β·log(1 + ⌊position / original context⌋), with β and the context from the rope parameters (llama 4's
    temperature; `get_llama_4_attn_scale` in transformers). None without a β."""
    rope = config.section("rope_scaling") or config.section("rope_parameters")
    if rope is None:
        return None
    rope.does_not_matter("max_position_embeddings", because="it repeats the config's own")
    beta = rope.number("llama_4_scaling_beta", default=0.0)
    context = config.positive_int("max_position_embeddings")
    period = rope.positive_int("original_max_position_embeddings", default=context)
    return QueryTemperature(scale=beta, period=float(period)) if beta else None
