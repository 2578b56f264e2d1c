"""Falcon (`model_type` "falcon"; arXiv 2311.16867): Falcon-RW with ALiBi, Falcon-7B with one key-value head, and the
new decoder of Falcon-40B and 180B with several."""

from collections.abc import Iterable
from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import CheckpointNames, fused_qkv, replace_rules, standard_mapping
from ttpu_core.spec import (
    NO_ROPE,
    AlibiSpec,
    ArchitectureSpec,
    AttentionSpec,
    BlockSpec,
    KernelChoice,
    MLPSpec,
    NormSpec,
    Placement,
    RopeSpec,
)
from ttpu_core.spec.rope import rope_from_config

CONFIG_DEFAULTS = {
    "vocab_size": 65_024,
    "max_position_embeddings": 2048,
    "layer_norm_epsilon": 1e-5,
    "activation": "gelu",
    "alibi": False,
    "bias": False,
    "multi_query": True,
    "parallel_attn": True,
    "new_decoder_architecture": False,
    "tie_word_embeddings": True,
}
KEYS = {"n_embed": "hidden_size", "ffn_hidden_size": "intermediate_size"}
NAMES = CheckpointNames(
    base="transformer.",
    layer="transformer.h.{layer}.",
    embedding="transformer.word_embeddings.weight",
    final_norm="transformer.ln_f",
    output="self_attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)
TWO_NORMS = replace(NAMES, input_norm="ln_attn", mlp_norm="ln_mlp")


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the names and defaults of `FalconConfig`. The sizes that define a model are required."""
    return config.with_renamed(KEYS).with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_norm(config: ModelConfig) -> NormSpec:
    """LayerNorm with scale and bias."""
    return NormSpec(kind="layer", eps=config.positive_number("layer_norm_epsilon"), bias=True, scale_in_fp32=True)


@hookimpl
def ttpu_block(config: ModelConfig) -> BlockSpec:
    """Attention and MLP beside each other, behind one norm or behind two; one after the other in Falcon-RW."""
    norms = config.positive_int("num_ln_in_parallel_attn", default=None)
    new, parallel = config.flag("new_decoder_architecture"), config.flag("parallel_attn")
    placement: Placement = "parallel" if new or parallel else "pre"
    return BlockSpec("parallel_two_norms" if new and norms in (None, 2) else placement)


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """Attention with as many key-value heads as the decoder's kind has, and with ALiBi in Falcon-RW."""
    heads = config.positive_int("num_attention_heads")
    asked, multi_query = config.positive_int("num_kv_heads", default=heads), config.flag("multi_query")
    kv = asked if config.flag("new_decoder_architecture") else 1 if multi_query else heads
    bias = config.flag("bias")
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=config.positive_int("hidden_size") // heads,
        qkv_bias=bias,
        output_bias=bias,
        alibi=AlibiSpec(scaled=True, bfloat16=True) if config.flag("alibi") else None,
    )


@hookimpl
def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:
    """Rope on whole heads, unless ALiBi tells positions."""
    rope = rope_from_config(config, head_dim=attention.head_dim)
    return rope if attention.alibi is None else NO_ROPE


@hookimpl
def ttpu_mlp(config: ModelConfig) -> MLPSpec:
    """A plain MLP, four times as wide as the stream unless the config says otherwise."""
    inner = config.positive_int("intermediate_size", default=4 * config.positive_int("hidden_size"))
    return MLPSpec(inner, defaults.activation(config, "activation"), gated=False, bias=config.flag("bias"))


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """Each key-value head's queries, key and value in one tensor."""
    names = TWO_NORMS if spec.layers[0].block.placement == "parallel_two_norms" else NAMES
    rules = fused_qkv(spec, names, "self_attention.query_key_value", by_group=True)
    return replace_rules(standard_mapping(spec, names), rules)


@hookimpl
def ttpu_kernels(config: ModelConfig) -> Iterable[KernelChoice]:
    """For ALiBi, torch_xla's model has transformers' sdpa attention, since its eager one adds the biases twice."""
    if config.flag("alibi"):
        yield KernelChoice("attention", "sdpa", "torch_xla", "ttpu-zoo", "eager attention adds ALiBi twice")
