"""DeepSeek-V3 as a third party would describe it: the core has latent attention and the mixture of experts."""

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.spec import MixerSpec, MLPSpec, MoESpec, RouterSpec
from ttpu_core.spec.latent_attention import latent_attention, yarn_softmax_scale
from ttpu_core.spec.rope import rope_from_config


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """Keys that follow from others."""
    for key in ("head_dim", "qk_head_dim", "num_key_value_heads", "num_mtp_layers", "num_nextn_predict_layers"):
        config.get(key)
    return config


@hookimpl
def ttpu_mixer(config: ModelConfig) -> MixerSpec:
    """`DeepseekV3Attention`."""
    plain, rotated = config.positive_int("qk_nope_head_dim"), config.positive_int("qk_rope_head_dim")
    layout = "interleaved" if config.flag("rope_interleave", default=True) else "half"
    rope = rope_from_config(config, head_dim=rotated, layout=layout)
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
        bias=config.flag("attention_bias", default=False),
    )


@hookimpl
def ttpu_mlp(config: ModelConfig, layer: int) -> MLPSpec | MoESpec:
    """`DeepseekV3MLP`, then `DeepseekV3MoE`."""
    if layer < config.require("first_k_dense_replace", int):
        return defaults.ttpu_mlp(config)
    inner = config.positive_int("moe_intermediate_size")
    return MoESpec(
        num_experts=config.positive_int("n_routed_experts"),
        experts_per_token=config.positive_int("num_experts_per_tok"),
        intermediate_size=inner,
        router=RouterSpec(
            score="sigmoid",
            correction_bias=True,
            renormalize=config.flag("norm_topk_prob"),
            renormalize_eps=1e-20,
            groups=config.positive_int("n_group"),
            top_groups=config.positive_int("topk_group"),
            group_score="top2_sum",
            scaling_factor=config.number("routed_scaling_factor"),
        ),
        shared=MLPSpec(inner * config.positive_int("n_shared_experts")),
    )
