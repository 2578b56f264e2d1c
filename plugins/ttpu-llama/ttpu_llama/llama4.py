"""Llama 4's text model: chunked attention on layers with rope, full attention without rope on every fourth layer,
and a mixture of experts beside a shared expert. The hooks answer for `model_type` "llama4_text" and for the text
part of the multimodal "llama4"."""

from collections.abc import Iterable
from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.config.text_part import text_config
from ttpu_core.errors import ConfigError
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import CheckpointNames, replace_rules, stacked_experts, standard_mapping
from ttpu_core.mapping.text_part import text_mapping
from ttpu_core.spec import (
    ArchitectureSpec,
    AttentionSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
    QueryTemperature,
    RouterSpec,
    TorchPatch,
)
from ttpu_core.spec.rope import NO_ROPE, RopeSpec, rope_from_config

PARENT = "llama4"
CONFIG_DEFAULTS = {
    "model_type": "llama4_text",
    "vocab_size": 202_048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16_384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
    "attention_bias": False,
}

CHUNKED, FULL = "chunked_attention", "full_attention"

NAMES = CheckpointNames(
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
    router="feed_forward.router",
    shared_gate_up_down=(
        "feed_forward.shared_expert.gate_proj",
        "feed_forward.shared_expert.up_proj",
        "feed_forward.shared_expert.down_proj",
    ),
)


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The text part, with the defaults of `Llama4TextConfig`."""
    return text_config(config, ("llama4_text",), tied=False).with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_attention(config: ModelConfig, layer: int) -> AttentionSpec:
    """On layers with rope, queries and keys are normalised after it. On layers without rope, queries are scaled by
    position."""
    norm: NormSpec | None = None
    temperature: QueryTemperature | None = None
    normalised, tuned = config.flag("use_qk_norm"), config.flag("attn_temperature_tuning")
    unscaled = NormSpec(eps=config.positive_number("rms_norm_eps"), scale=False)
    steps = QueryTemperature(config.number("attn_scale"), config.number("floor_scale"), shift=1.0)
    if _has_rope(config, layer):
        norm = unscaled if normalised else None
    else:
        temperature = steps if tuned else None
    return replace(
        defaults.ttpu_attention(config),
        chunk=_chunk(config, layer),
        q_norm=norm,
        k_norm=norm,
        qk_norm_after_rope=True,
        query_temperature=temperature,
    )


@hookimpl
def ttpu_rope(config: ModelConfig, layer: int, attention: AttentionSpec) -> RopeSpec:
    """Rope over pairs of neighbouring features (transformers multiplies complex numbers, in float32)."""
    rope = rope_from_config(config, head_dim=attention.head_dim, theta=500_000.0, layout="interleaved", fp32=True)
    return rope if _has_rope(config, layer) else NO_ROPE


@hookimpl
def ttpu_mlp(config: ModelConfig, layer: int) -> MLPSpec | MoESpec:
    """Experts in the layers of `moe_layers`, or in every `interleave_moe_layer_step`-th layer. Other layers have a
    wider MLP."""
    activation, inner = defaults.activation(config), config.positive_int("intermediate_size")
    wide = config.positive_int("intermediate_size_mlp")
    step, chosen = config.positive_int("interleave_moe_layer_step"), config.int_list("moe_layers", default=None)
    moe = MoESpec(
        num_experts=config.positive_int("num_local_experts"),
        experts_per_token=config.positive_int("num_experts_per_tok"),
        intermediate_size=inner,
        activation=activation,
        router=RouterSpec(score="sigmoid", weight_on="input"),
        shared=MLPSpec(inner, activation),
    )
    has_experts = (layer + 1) % step == 0 if chosen is None else layer in chosen
    return moe if has_experts else MLPSpec(wide, activation)


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """All experts of a layer in one tensor, input features first. Names have the parent's prefix, and vision tensors
    are ignored."""
    below = ("model.", "lm_head")
    if spec.model_type == PARENT:
        below = ("language_model.model.", "language_model.lm_head")
    names = NAMES.below(*below)
    experts = stacked_experts(spec, names, "feed_forward.experts.", transposed=True)
    return text_mapping(replace_rules(standard_mapping(spec, names), experts), *below)


@hookimpl
def ttpu_torch_patches() -> Iterable[TorchPatch]:
    """Rope in real numbers. Both functions are replaced together, because one uses the other's result."""
    reason = "XLA devices have no torch.polar, so that it runs on the host and splits the program in two."
    for target, replacement in (("Llama4TextRotaryEmbedding.forward", "rotary"), ("apply_rotary_emb", "apply_rotary")):
        yield TorchPatch(
            f"transformers.models.llama4.modeling_llama4:{target}", f"ttpu_llama.torch.llama4:{replacement}", reason
        )


def _has_rope(config: ModelConfig, layer: int) -> bool:
    """Whether a layer has rope: `no_rope_layers` has a 1 for each layer with rope. An empty list, as published,
    counts as absent."""
    interval, layers = config.positive_int("no_rope_layer_interval"), config.positive_int("num_hidden_layers")
    listed = config.int_list("no_rope_layers", default=())
    if listed and len(listed) < layers:
        raise ConfigError(
            f"{config.source} has {len(listed)} entries in 'no_rope_layers' for {layers} layers, but one for each is "
            "needed: correct it, or leave it out."
        )
    return bool(listed[layer]) if listed else (layer + 1) % interval != 0


def _chunk(config: ModelConfig, layer: int) -> int | None:
    """The chunk size of a layer. Without `layer_types`, layers with rope attend in chunks."""
    size = config.positive_int("attention_chunk_size", default=None)
    chunked = _has_rope(config, layer)
    if config.get("layer_types") is not None:
        chunked = defaults.layer_type(config, layer, (CHUNKED, FULL)) == CHUNKED
    return size if chunked else None
