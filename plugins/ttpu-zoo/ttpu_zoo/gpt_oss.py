"""GPT-OSS (`model_type` "gpt_oss"): attention with sinks, in every second layer within a window, and experts with
biases and a clamped SwiGLU."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.mapping import Expression, FlaxMapping, Tensor
from ttpu_core.mapping.layout import CheckpointNames, replace_rules, standard_mapping
from ttpu_core.spec import ActivationSpec, ArchitectureSpec, AttentionSpec, MoESpec, NormSpec, RouterSpec
from ttpu_core.spec.rope import RopeSpec, rope_from_config

CONFIG_DEFAULTS = {
    "vocab_size": 201_088,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": True,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
SLIDING, FULL = "sliding_attention", "full_attention"
OTHER_CODE = ("experts_per_token", "initial_context_length")


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the names and defaults of `GptOssConfig`. The sizes that define a model are required."""
    config.does_not_matter("hidden_act", because="experts have a clamped SwiGLU")
    config.does_not_matter(OTHER_CODE, because="the code that OpenAI publishes reads them, and transformers does not")
    config = config.with_renamed({"num_experts": "num_local_experts"}).with_defaults(CONFIG_DEFAULTS)
    if config.section("rope_parameters") is None and config.section("rope_scaling") is None:
        config = config.with_values({"rope_parameters": ROPE})
    return config


@hookimpl
def ttpu_norm(config: ModelConfig) -> NormSpec:
    """RMSNorm that is scaled in float32."""
    return replace(defaults.ttpu_norm(config), scale_in_fp32=True)


@hookimpl
def ttpu_attention(config: ModelConfig, layer: int) -> AttentionSpec:
    """Attention with a sink for each head, and a window in sliding layers: every second, unless `layer_types` says
    otherwise."""
    kind = defaults.layer_type(config, layer, assumed=FULL if layer % 2 else SLIDING)
    window = config.positive_int("sliding_window", default=None)
    return replace(defaults.ttpu_attention(config), sinks=True, window=window if kind == SLIDING else None)


@hookimpl
def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:
    """Rope with a base of 150,000 where the config names none."""
    return rope_from_config(config, head_dim=attention.head_dim, theta=150_000.0)


@hookimpl
def ttpu_mlp(config: ModelConfig) -> MoESpec:
    """Experts with biases. The weights are the softmax of the chosen logits."""
    return MoESpec(
        num_experts=config.positive_int("num_local_experts"),
        experts_per_token=config.positive_int("num_experts_per_tok"),
        intermediate_size=config.positive_int("intermediate_size"),
        activation=ActivationSpec(
            "clamped_swiglu", alpha=config.number("swiglu_alpha"), limit=config.positive_number("swiglu_limit")
        ),
        router=RouterSpec(score="topk_softmax", bias=True),
        expert_bias=True,
    )


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """Experts are in stacked tensors, inputs before outputs, with gate and up interleaved."""
    rules: dict[str, Expression | None] = {}
    names = replace(CheckpointNames(), router="mlp.router")
    for index, layer in enumerate(spec.layers):
        assert isinstance(layer.mlp, MoESpec)
        experts, inner, hidden = layer.mlp.num_experts, layer.mlp.intermediate_size, spec.hidden_size
        tensor, path = names.layer.format(layer=index) + "mlp.experts.", f"layers.{index}.moe.experts."
        gate_up = Tensor(tensor + "gate_up_proj", (experts, hidden, 2 * inner)).reshape(experts, hidden, inner, 2)
        gate_up_bias = Tensor(tensor + "gate_up_proj_bias", (experts, 2 * inner)).reshape(experts, inner, 2)
        rules[path + "gate_up.kernel"] = gate_up.transpose(0, 3, 2, 1)
        rules[path + "gate_up.bias"] = gate_up_bias.transpose(0, 2, 1)
        rules[path + "down.kernel"] = Tensor(tensor + "down_proj", (experts, inner, hidden)).transpose(0, 2, 1)
        rules[path + "down.bias"] = Tensor(tensor + "down_proj_bias", (experts, hidden))
    return replace_rules(standard_mapping(spec, names), rules)
