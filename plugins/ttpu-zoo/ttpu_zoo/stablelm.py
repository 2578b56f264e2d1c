"""StableLM (`model_type` "stablelm"): llama with LayerNorm, a rope on a quarter of each head, and optionally a norm for
each head of queries and keys, and attention beside the MLP."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.mapping import Expression, FlaxMapping, Stack, Tensor
from ttpu_core.mapping.layout import replace_rules, standard_mapping
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, BlockSpec, NormSpec
from ttpu_core.spec.rope import RopeSpec, rope_from_config

CONFIG_DEFAULTS = {
    "vocab_size": 50_304,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "layer_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "use_qkv_bias": False,
    "qk_layernorm": False,
    "use_parallel_residual": False,
    "partial_rotary_factor": 0.25,
}


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `StableLmConfig`. The sizes that define a model are required."""
    return config.with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_norm(config: ModelConfig) -> NormSpec:
    """LayerNorm with scale and bias."""
    return NormSpec(kind="layer", eps=config.positive_number("layer_norm_eps"), bias=True, scale_in_fp32=True)


@hookimpl
def ttpu_block(config: ModelConfig) -> BlockSpec:
    """Attention and MLP after each other, or both on the same norm."""
    return BlockSpec(placement="parallel" if config.flag("use_parallel_residual") else "pre")


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """Biases on queries, keys and values only; each head's norm has a scale of its own and no bias."""
    norm = replace(ttpu_norm(config), bias=False) if config.flag("qk_layernorm") else None
    bias = config.flag("use_qkv_bias")
    usual = replace(defaults.ttpu_attention(config), qkv_bias=bias, output_bias=False)
    return replace(usual, q_norm=norm, k_norm=norm, qk_norm_scope="per_head")


@hookimpl
def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:
    """Rope on the first features of each head."""
    return rope_from_config(config, head_dim=attention.head_dim, partial=True)


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """The usual names; each head's norm is a tensor of its own."""
    rules: dict[str, Expression | None] = {}
    for path, parameter in spec.parameters.items():
        if path.endswith(("q_norm.scale", "k_norm.scale")):
            _, layer, _, norm, _ = path.split(".")
            *heads, dim = parameter.shape
            name = f"model.layers.{layer}.self_attn.{norm[0]}_layernorm.norms"
            rules[path] = _stacked(name, tuple(heads), dim)
    return replace_rules(standard_mapping(spec), rules)


def _stacked(name: str, heads: tuple[int, ...], dim: int, first: int = 0) -> Expression:
    """The norms of `heads` heads from `first` on, stacked as [*heads, dim]."""
    if not heads:
        return Tensor(f"{name}.{first}.weight", (dim,))
    count, *rest = heads
    each = rest[0] if rest else 1
    return Stack(tuple(_stacked(name, tuple(rest), dim, first + index * each) for index in range(count)))
