"""StarCoder and SantaCoder (`model_type` "gpt_bigcode"; arXiv 2305.06161): GPT-2 with one key/value head."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import CheckpointNames, fused_qkv, replace_rules, standard_mapping
from ttpu_core.spec import NO_ROPE, ArchitectureSpec, AttentionSpec, EmbeddingSpec, MLPSpec, NormSpec, RopeSpec

CONFIG_DEFAULTS = {
    "vocab_size": 50_257,
    "max_position_embeddings": 1024,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "scale_attn_weights": True,
    "multi_query": True,
}
KEYS = {
    "n_embd": "hidden_size",
    "n_positions": "max_position_embeddings",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
}
NAMES = CheckpointNames(
    base="transformer.",
    layer="transformer.h.{layer}.",
    embedding="transformer.wte.weight",
    positions="transformer.wpe.weight",
    final_norm="transformer.ln_f",
    input_norm="ln_1",
    mlp_norm="ln_2",
    output="attn.c_proj",
    up="mlp.c_fc",
    down="mlp.c_proj",
)


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `GPTBigCodeConfig`. `multi_query` decides the number of key/value heads, whatever
    the file says of them."""
    config = config.with_renamed(KEYS).with_defaults(CONFIG_DEFAULTS)
    heads = 1 if config.flag("multi_query") else config.positive_int("num_attention_heads")
    return config.with_values({"num_key_value_heads": heads})


@hookimpl
def ttpu_embedding(config: ModelConfig) -> EmbeddingSpec:
    """Tokens and learned positions."""
    return replace(defaults.ttpu_embedding(config), positions=config.positive_int("max_position_embeddings"))


@hookimpl
def ttpu_norm(config: ModelConfig) -> NormSpec:
    """LayerNorm with scale and bias."""
    return NormSpec(kind="layer", eps=config.positive_number("layer_norm_epsilon"), bias=True, scale_in_fp32=True)


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """Attention with biases, scaled unless the config says otherwise."""
    scale = None if config.flag("scale_attn_weights") else 1.0
    return replace(defaults.ttpu_attention(config), qkv_bias=True, output_bias=True, scale=scale)


@hookimpl
def ttpu_rope() -> RopeSpec:
    """None: positions are learned."""
    return NO_ROPE


@hookimpl
def ttpu_mlp(config: ModelConfig) -> MLPSpec:
    """A plain MLP with biases, four times as wide as the stream unless the config says otherwise."""
    inner = config.positive_int("n_inner", default=4 * config.positive_int("hidden_size"))
    return MLPSpec(inner, defaults.activation(config, "activation_function"), gated=False, bias=True)


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """Each key/value head's queries, key and value in one tensor."""
    return replace_rules(standard_mapping(spec, NAMES), fused_qkv(spec, NAMES, "attn.c_attn", by_group=True))
