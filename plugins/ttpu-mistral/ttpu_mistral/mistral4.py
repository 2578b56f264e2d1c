"""Mistral Small 4's text model: latent attention with queries that are scaled by position, and a mixture of experts
after the first dense layers. The hooks answer for `model_type` "mistral4"."""

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import replace_rules, stacked_experts, standard_mapping, with_alternative
from ttpu_core.spec import ArchitectureSpec, MixerSpec, MLPSpec, MoESpec, RouterSpec
from ttpu_core.spec.latent_attention import latent_attention, yarn_softmax_scale
from ttpu_core.spec.rope import RopeSpec, rope_from_config
from ttpu_mistral.ministral3 import query_temperature, with_usual_rope

CONFIG_DEFAULTS = {
    "vocab_size": 131_072,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 64,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 0,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "max_position_embeddings": 1_048_576,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_interleave": True,
    "attention_bias": False,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `Mistral4Config`, which knows the number of experts by two names."""
    config.does_not_matter(("head_dim", "qk_head_dim", "num_key_value_heads"), because="they follow from other keys")
    config.does_not_matter("intermediate_size", because="it is the size of dense layers, of which there may be none")
    config = config.with_renamed({"num_local_experts": "n_routed_experts"})
    return with_usual_rope(config.with_defaults(CONFIG_DEFAULTS), CONFIG_DEFAULTS)


@hookimpl
def ttpu_mixer(config: ModelConfig) -> MixerSpec:
    """Latent attention as in `Mistral4Attention`."""
    rope = _rope(config)
    plain, rotated = config.positive_int("qk_nope_head_dim"), config.positive_int("qk_rope_head_dim")
    return latent_attention(
        hidden_size=config.positive_int("hidden_size"),
        num_heads=config.positive_int("num_attention_heads"),
        q_lora_rank=config.positive_int("q_lora_rank", default=None),
        kv_lora_rank=config.positive_int("kv_lora_rank"),
        qk_nope_head_dim=plain,
        qk_rope_head_dim=rotated,
        v_head_dim=config.positive_int("v_head_dim"),
        rope=rope,
        scale=yarn_softmax_scale(rope, plain + rotated),
        bias=config.flag("attention_bias"),
        query_temperature=query_temperature(config),
    )


@hookimpl
def ttpu_mlp(config: ModelConfig, layer: int) -> MLPSpec | MoESpec:
    """A dense MLP in the first layers, then experts chosen within the best groups, with shared experts."""
    if layer < config.require("first_k_dense_replace", int):
        return defaults.ttpu_mlp(config)
    activation, inner = defaults.activation(config), config.positive_int("moe_intermediate_size")
    return MoESpec(
        num_experts=config.positive_int("n_routed_experts"),
        experts_per_token=config.positive_int("num_experts_per_tok"),
        intermediate_size=inner,
        activation=activation,
        router=RouterSpec(
            renormalize=config.flag("norm_topk_prob"),
            renormalize_eps=1e-20,
            groups=config.positive_int("n_group"),
            top_groups=config.positive_int("topk_group"),
            group_score="top2_sum",
            scaling_factor=config.number("routed_scaling_factor"),
        ),
        shared=MLPSpec(inner * config.positive_int("n_shared_experts"), activation),
    )


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """DeepSeek's names. Experts are stored in stacked tensors per layer, or one by one."""
    usual, stacked = standard_mapping(spec), stacked_experts(spec)
    return with_alternative(replace_rules(usual, stacked), {path: usual[path] for path in stacked})


def _rope(config: ModelConfig) -> RopeSpec:
    """Rope of the rotated features. `partial_rotary_factor`, if present, is their share of a whole head."""
    head_dim = config.positive_int("qk_rope_head_dim")
    sections = (config, config.section("rope_scaling"), config.section("rope_parameters"))
    if any(section is not None and "partial_rotary_factor" in section for section in sections):
        head_dim += config.positive_int("qk_nope_head_dim")
    layout = "interleaved" if config.flag("rope_interleave") else "half"
    return rope_from_config(config, head_dim=head_dim, layout=layout, partial=True)
