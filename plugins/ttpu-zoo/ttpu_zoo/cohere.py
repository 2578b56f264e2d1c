"""Command R (`model_type` "cohere"): attention and MLP on one LayerNorm without bias, neighbouring features turned by
rope, and scaled logits."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.mapping import Expression, FlaxMapping, Tensor
from ttpu_core.mapping.layout import replace_rules, standard_mapping
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, BlockSpec, HeadSpec, NormSpec
from ttpu_core.spec.rope import RopeSpec, rope_from_config

CONFIG_DEFAULTS = {
    "vocab_size": 256_000,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "logit_scale": 0.0625,
}


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `CohereConfig`. The sizes that define a model are required."""
    return config.with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_norm(config: ModelConfig) -> NormSpec:
    """LayerNorm without a bias."""
    return NormSpec(kind="layer", eps=config.positive_number("layer_norm_eps"), scale_in_fp32=True)


@hookimpl
def ttpu_block() -> BlockSpec:
    """Attention and MLP beside each other, on the same norm."""
    return BlockSpec(placement="parallel")


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """Optional norms for each head of queries and keys, each with a scale of its own."""
    norm = ttpu_norm(config) if config.flag("use_qk_norm", default=False) else None
    return replace(defaults.ttpu_attention(config), q_norm=norm, k_norm=norm, qk_norm_scope="per_head")


@hookimpl
def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:
    """Rope that turns neighbouring features, with the class's base."""
    return rope_from_config(config, head_dim=attention.head_dim, theta=500_000.0, layout="interleaved")


@hookimpl
def ttpu_head(config: ModelConfig) -> HeadSpec:
    """Logits times `logit_scale`."""
    return replace(defaults.ttpu_head(config), multiplier=config.number("logit_scale"))


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """The usual names; the norms of all heads are one tensor [heads, head_dim]."""
    rules: dict[str, Expression | None] = {}
    for path, parameter in spec.parameters.items():
        if path.endswith(("q_norm.scale", "k_norm.scale")):
            _, layer, _, norm, _ = path.split(".")
            dim = parameter.shape[-1]
            tensor = Tensor(f"model.layers.{layer}.self_attn.{norm}.weight", (parameter.size // dim, dim))
            rules[path] = tensor.reshape(*parameter.shape)
    return replace_rules(standard_mapping(spec), rules)
