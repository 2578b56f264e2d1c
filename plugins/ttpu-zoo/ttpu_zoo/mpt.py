"""MPT (`model_type` "mpt"): ALiBi instead of rope, LayerNorm and kernels without biases."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import CheckpointNames, fused_qkv, replace_rules, standard_mapping
from ttpu_core.spec import (
    NO_ROPE,
    ActivationSpec,
    AlibiSpec,
    ArchitectureSpec,
    AttentionSpec,
    MLPSpec,
    NormSpec,
    RopeSpec,
)

CONFIG_DEFAULTS = {
    "vocab_size": 50_368,
    "max_position_embeddings": 2048,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "attn_config": {},
}
KEYS = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "max_seq_len": "max_position_embeddings",
}
UNREAD = ("expansion_ratio", "learned_pos_emb", "logit_scale", "no_bias", "norm_type", "embedding_fraction", "verbose",
          "emb_pdrop", "init_device")  # fmt: skip
UNREAD_OF_ATTENTION = ("alibi", "alibi_bias_max", "attn_type", "attn_impl", "prefix_lm", "qk_ln",
                       "attn_uses_sequence_id", "model_type")  # fmt: skip
NAMES = CheckpointNames(
    base="transformer.",
    layer="transformer.blocks.{layer}.",
    embedding="transformer.wte.weight",
    final_norm="transformer.norm_f",
    input_norm="norm_1",
    mlp_norm="norm_2",
    output="attn.out_proj",
    up="ffn.up_proj",
    down="ffn.down_proj",
)


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the names and defaults of `MptConfig`. The sizes that define a model are required."""
    config.does_not_matter(UNREAD, because="transformers keeps them for old files and does not use them")
    config.does_not_matter(
        [f"attn_config.{key}" for key in UNREAD_OF_ATTENTION],
        because="transformers keeps them for old files and does not use them",
    )
    return config.with_renamed(KEYS).with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_norm(config: ModelConfig) -> NormSpec:
    """LayerNorm with a scale and no bias."""
    return NormSpec(kind="layer", eps=config.positive_number("layer_norm_epsilon"), scale_in_fp32=True)


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """Attention with ALiBi; bounds and scale are keys of `attn_config`."""
    own = config.section("attn_config") or ModelConfig.from_dict({})
    return replace(
        defaults.ttpu_attention(config),
        alibi=AlibiSpec(),
        clip_qkv=own.number("clip_qkv", default=None) or None,
        scale=own.number("softmax_scale", default=None),
    )


@hookimpl
def ttpu_rope() -> RopeSpec:
    """None: ALiBi tells positions."""
    return NO_ROPE


@hookimpl
def ttpu_mlp(config: ModelConfig) -> MLPSpec:
    """A plain MLP, four times as wide as the stream."""
    return MLPSpec(4 * config.positive_int("hidden_size"), ActivationSpec("gelu"), gated=False)


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """All queries, then all keys, then all values in one tensor."""
    return replace_rules(standard_mapping(spec, NAMES), fused_qkv(spec, NAMES, "attn.Wqkv"))
