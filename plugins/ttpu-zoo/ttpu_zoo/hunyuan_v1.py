"""Hunyuan dense and Hunyuan-A13B (`model_type` "hunyuan_v1_dense" and "hunyuan_v1_moe"): llama with norms on the
rotated heads of queries and keys; the second has experts in each layer beside an MLP that all tokens share."""

from dataclasses import replace
from typing import Any

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.errors import ConfigError
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import CheckpointNames, standard_mapping
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, MLPSpec, MoESpec, RouterSpec
from ttpu_core.spec.rope import RopeSpec, rope_from_config

CONFIG_DEFAULTS = {
    "vocab_size": 290_943,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
}
MIXTURE_DEFAULTS = {"num_experts": 1, "moe_topk": 1}
NAMES = CheckpointNames(
    q_norm="self_attn.query_layernorm",
    k_norm="self_attn.key_layernorm",
    router="mlp.gate.wg",
    shared_gate_up_down=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj", "mlp.shared_mlp.down_proj"),
)


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the names and defaults of the types' config classes. The sizes that define a model are
    required."""
    config.does_not_matter(("eod_token_id", "sep_token_id"), because="they are ids of the tokenizer")
    config.does_not_matter(("use_qk_norm",), because="transformers norms the heads of queries and keys always")
    config = config.with_defaults(CONFIG_DEFAULTS)
    if config.model_type == "hunyuan_v1_dense":
        return config
    renamed = config.with_renamed({"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"})
    return renamed.with_defaults(MIXTURE_DEFAULTS)


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """One norm for the heads of queries and one for those of keys, after rope."""
    norm = defaults.ttpu_norm(config)
    return replace(defaults.ttpu_attention(config), q_norm=norm, k_norm=norm, qk_norm_after_rope=True)


@hookimpl
def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:
    """Rope. "dynamic" with an `alpha` is a larger base, whatever the length: theta * alpha ** (dim / (dim - 2))."""
    dim = attention.head_dim
    scaling = config.section("rope_parameters") or config.section("rope_scaling")
    alpha = None if scaling is None else scaling.number("alpha", default=None)
    kind = None if scaling is None else scaling.get("rope_type", scaling.get("type"))
    if not alpha or kind != "dynamic" or scaling is None:
        return rope_from_config(config, head_dim=dim)
    scaling.does_not_matter("factor", because="a rope with an alpha does not read it")
    theta = scaling.number("rope_theta", default=config.number("rope_theta", default=10_000.0))
    return RopeSpec(
        theta=theta * alpha ** (dim / (dim - 2)),
        rotary_dim=dim,
        max_position_embeddings=config.positive_int("max_position_embeddings"),
    )


@hookimpl
def ttpu_mlp(config: ModelConfig, layer: int) -> MLPSpec | MoESpec:
    """A dense MLP, or experts by softmax whose weights are renormalised, beside a shared MLP of the same size."""
    if config.model_type == "hunyuan_v1_dense":
        return defaults.ttpu_mlp(config)
    dense = defaults.ttpu_mlp(config)
    return MoESpec(
        num_experts=_of_layer(config, "num_experts", layer),
        experts_per_token=_of_layer(config, "moe_topk", layer),
        intermediate_size=dense.intermediate_size,
        activation=dense.activation,
        router=RouterSpec(renormalize=True, fp32=True),
        shared=dense,
    )


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """The usual names but those of the norms, the router and the shared MLP."""
    return standard_mapping(spec, NAMES)


def _of_layer(config: ModelConfig, key: str, layer: int) -> int:
    """A number for all layers, or a list with one for each.

    Raises:
        ConfigError: the list has other entries, or fewer than layers.
    """
    value: Any = config.get(key)
    if not isinstance(value, tuple):
        return config.positive_int(key)
    if len(value) <= layer or not isinstance(value[layer], int) or value[layer] < 1:
        raise ConfigError(
            f"{config.source} has {list(value)} under {key!r}, but a positive integer for each of "
            f"{config.positive_int('num_hidden_layers')} layers is needed: correct it, or write one number for all."
        )
    return int(value[layer])
