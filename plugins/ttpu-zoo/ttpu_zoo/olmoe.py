"""OLMoE (`model_type` "olmoe"; arXiv 2409.02060): a mixture of experts in each layer, norms over all heads of queries
and of keys, and bounds on queries, keys and values."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.spec import AttentionSpec, MoESpec, RouterSpec

CONFIG_DEFAULTS = {
    "vocab_size": 50_304,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the names and defaults of `OlmoeConfig`. The sizes that define a model are required."""
    return config.with_renamed({"num_local_experts": "num_experts"}).with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """The norms see the whole projection, before it is split into heads; the bounds apply after them."""
    norm = defaults.ttpu_norm(config)
    bound = config.number("clip_qkv", default=None)
    return replace(defaults.ttpu_attention(config), q_norm=norm, k_norm=norm, qk_norm_scope="full", clip_qkv=bound)


@hookimpl
def ttpu_mlp(config: ModelConfig) -> MoESpec:
    """Experts whose weights are renormalised if the config says so."""
    return MoESpec(
        num_experts=config.positive_int("num_experts"),
        experts_per_token=config.positive_int("num_experts_per_tok"),
        intermediate_size=config.positive_int("intermediate_size"),
        activation=defaults.activation(config),
        router=RouterSpec(renormalize=config.flag("norm_topk_prob")),
    )
