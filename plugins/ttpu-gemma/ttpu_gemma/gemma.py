"""Gemma 1: llama's layout with a scaled embedding, norms that multiply by 1 + w, and a tanh-approximated GELU. The
model type also covers CodeGemma."""

from __future__ import annotations

from dataclasses import replace

from ttpu_core import ModelConfig, hookimpl
from ttpu_core.defaults import activation
from ttpu_core.spec import MLPSpec
from ttpu_gemma.common import refuse_bidirectional, ttpu_embedding, ttpu_head, ttpu_norm

__all__ = ["ttpu_config", "ttpu_embedding", "ttpu_head", "ttpu_mlp", "ttpu_norm"]

CONFIG_DEFAULTS = {
    "vocab_size": 256_000,
    "hidden_size": 3072,
    "intermediate_size": 24_576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """A gemma config with the class's defaults."""
    refuse_bidirectional(config)
    return config.with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_mlp(config: ModelConfig) -> MLPSpec:
    """A gated MLP. The first files write "gelu" for its tanh approximation."""
    config.does_not_matter("hidden_activation", because="transformers 4 added it, and transformers reads hidden_act")
    act = activation(config)
    if act.name == "gelu":
        act = replace(act, name="gelu_tanh")
    return MLPSpec(config.positive_int("intermediate_size"), act)
