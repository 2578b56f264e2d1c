"""DeepSeek-V3, V3.1 and R1 (`model_type` "deepseek_v3"): latent attention, and experts chosen by corrected scores
within the best groups after the first dense layers. Youtu-LLM ("youtu") has the attention alone."""

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import standard_mapping, without_further_layers
from ttpu_core.spec import ArchitectureSpec, MixerSpec, MLPSpec, MoESpec, RouterSpec
from ttpu_core.spec.latent_attention import latent_attention, yarn_softmax_scale
from ttpu_core.spec.rope import rope_from_config

COMMON_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_interleave": True,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
MIXTURE_DEFAULTS = {
    "vocab_size": 129_280,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
}
YOUTU_DEFAULTS = {"vocab_size": 128_256, "max_position_embeddings": 131_072, "tie_word_embeddings": True}
RENAMED = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}
FOLLOWING = ("head_dim", "qk_head_dim", "num_key_value_heads")
OTHER_CODE = ("scoring_func", "topk_method", "moe_layer_freq", "ep_size", "aux_loss_alpha", "seq_aux", "auto_map")


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the names and defaults of `DeepseekV3Config` or `YoutuConfig`. The sizes that define a model are
    required."""
    config.does_not_matter(FOLLOWING, because="they follow from other keys")
    if config.model_type == "youtu":
        config.does_not_matter("embedding_initializer_range", because="only new weights are drawn with it")
        return config.with_defaults(COMMON_DEFAULTS | YOUTU_DEFAULTS)
    config.does_not_matter("intermediate_size", because="it is the size of dense layers, of which there may be none")
    config.does_not_matter(OTHER_CODE, because="the code that DeepSeek publishes reads them, and transformers does not")
    return config.with_renamed(RENAMED).with_defaults(COMMON_DEFAULTS | MIXTURE_DEFAULTS)


@hookimpl
def ttpu_mixer(config: ModelConfig) -> MixerSpec:
    """Latent attention, whose scores yarn sharpens."""
    return deepseek_attention(config, interleaved=config.flag("rope_interleave"))


@hookimpl
def ttpu_mlp(config: ModelConfig, layer: int) -> MLPSpec | MoESpec:
    """A dense MLP in the first layers, then experts with a shared one. Youtu's layers are dense."""
    if config.model_type == "youtu":
        return defaults.ttpu_mlp(config)
    experts = deepseek_experts(config)
    return defaults.ttpu_mlp(config) if layer < config.require("first_k_dense_replace", int) else experts


@hookimpl
def ttpu_flax_mapping(config: ModelConfig, spec: ArchitectureSpec) -> FlaxMapping:
    """The usual names. The layers that predict further tokens are left out."""
    further = 0 if config.model_type == "youtu" else config.require("num_nextn_predict_layers", int)
    return without_further_layers(standard_mapping(spec), spec, further)


def deepseek_attention(
    config: ModelConfig, *, interleaved: bool, query_scale: float = 1.0, latent_scale: float = 1.0
) -> MixerSpec:
    """The latent attention of DeepSeek's configs, with rotated features in pairs or in halves, and with factors on
    queries and on the latents of keys and values."""
    plain, rotated = config.positive_int("qk_nope_head_dim"), config.positive_int("qk_rope_head_dim")
    rope = rope_from_config(config, head_dim=rotated, layout="interleaved" if interleaved else "half")
    return latent_attention(
        hidden_size=config.positive_int("hidden_size"),
        num_heads=config.positive_int("num_attention_heads"),
        q_lora_rank=config.positive_int("q_lora_rank", default=None),
        kv_lora_rank=config.positive_int("kv_lora_rank"),
        qk_nope_head_dim=plain,
        qk_rope_head_dim=rotated,
        v_head_dim=config.positive_int("v_head_dim"),
        rope=rope,
        scale=yarn_softmax_scale(rope, plain + rotated) * query_scale,
        latent_scale=latent_scale,
        bias=config.flag("attention_bias"),
    )


def deepseek_experts(config: ModelConfig) -> MoESpec:
    """DeepSeek-V3's experts, with a shared one: sigmoid scores, and the choice corrected by a bias."""
    activation, inner = defaults.activation(config), config.positive_int("moe_intermediate_size")
    return MoESpec(
        num_experts=config.positive_int("n_routed_experts"),
        experts_per_token=config.positive_int("num_experts_per_tok"),
        intermediate_size=inner,
        activation=activation,
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
        shared=MLPSpec(inner * config.positive_int("n_shared_experts"), activation),
    )
