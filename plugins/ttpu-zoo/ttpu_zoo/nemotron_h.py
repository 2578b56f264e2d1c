"""Nemotron-H, Nemotron Nano 2 and 3 (`model_type` "nemotron_h"; arXiv 2504.03624): each layer is one of Mamba-2's state
spaces, attention without positions, an MLP with squared ReLUs, or a mixture of such."""

import math
from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.errors import ConfigError
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import CheckpointNames, standard_mapping
from ttpu_core.spec import (
    NO_MIXER,
    NO_MLP,
    NO_ROPE,
    ArchitectureSpec,
    AttentionSpec,
    HeadSpec,
    MixerSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
    RouterSpec,
)  # fmt: skip
from ttpu_core.spec.rope import RopeSpec
from ttpu_core.spec.state_space import state_space

MAMBA, FULL, MLP, EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
LETTERS = {"M": MAMBA, "*": FULL, "-": MLP, "E": EXPERTS}
OLDER = {"mamba": MAMBA, "attention": FULL}
RENAMED = {
    "layers_block_type": "layer_types", "num_local_experts": "n_routed_experts", "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel", "mamba_dt_min": "time_step_min", "mamba_conv_bias": "use_conv_bias",
}  # fmt: skip
CONFIG_DEFAULTS = {
    "vocab_size": 131_072, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
    "mlp_hidden_act": "relu2", "mlp_bias": False, "ssm_state_size": 128,
    "mamba_num_heads": 128, "mamba_head_dim": 64, "mamba_hidden_act": "silu", "n_groups": 8, "conv_kernel": 4,
    "time_step_min": 0.001, "use_conv_bias": True, "n_routed_experts": 8, "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688, "num_experts_per_tok": 2, "routed_scaling_factor": 1.0,
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "use_bias": False, "layer_norm_epsilon": 1e-5,
}  # fmt: skip
UNREAD = ("attention_bias", "sliding_window", "expand", "mamba_expand", "time_step_limit", "mamba_dt_limit",
          "mamba_proj_bias", "n_shared_experts", "moe_shared_expert_overlap", "residual_in_fp32", "num_logits_to_keep",
          "rescale_prenorm_residual", "time_step_max", "time_step_floor", "mamba_dt_max", "mamba_dt_init_floor",
          "chunk_size", "mamba_chunk_size", "mamba_ssm_cache_dtype", "use_mamba_kernels", "hidden_dropout",
          "rms_norm_eps", "norm_eps", "num_nextn_predict_layers", "mtp_layers_block_type",
          "mtp_hybrid_override_pattern", "num_hidden_layers")  # fmt: skip
NAMES = CheckpointNames(
    state_space="mixer.", query="mixer.q_proj", key="mixer.k_proj", value="mixer.v_proj", output="mixer.o_proj",
    up="mixer.up_proj", down="mixer.down_proj", router="mixer.gate", expert_up="mixer.experts.{expert}.up_proj",
    correction_bias="mixer.gate.e_score_correction_bias", expert_down="mixer.experts.{expert}.down_proj",
    shared_gate_up_down=("", "mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj"),
    input_norm="norm", mlp_norm="norm", base="backbone.",
).below("backbone.")  # fmt: skip
NAMES = replace(NAMES, embedding="backbone.embeddings.weight", final_norm="backbone.norm_f")


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the names and defaults of `NemotronHConfig`, and with the layers' kinds as a list."""
    config.does_not_matter(UNREAD, because="transformers does not read it, or it does not change the results")
    config.does_not_matter("tie_word_embeddings", because="transformers never ties the head of this type")
    config.does_not_matter("intermediate_size", because="it is the size of MLP layers, of which there may be none")
    pattern = config.text("hybrid_override_pattern", default=None)
    config = config.with_renamed(RENAMED).with_defaults(CONFIG_DEFAULTS)
    kinds = config.items("layer_types", default=(MAMBA, EXPERTS, FULL, MLP) if pattern is None else tuple(pattern))
    kinds = tuple(LETTERS.get(kind, OLDER.get(kind, kind)) for kind in kinds)
    return config.with_values({"layer_types": list(kinds), "num_hidden_layers": len(kinds)})


@hookimpl
def ttpu_head() -> HeadSpec:
    """A head of its own."""
    return HeadSpec()


@hookimpl
def ttpu_norm(config: ModelConfig) -> NormSpec:
    """RMSNorm that is scaled in float32."""
    return NormSpec(eps=config.positive_number("layer_norm_epsilon"), scale_in_fp32=True)


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """Attention without biases."""
    return replace(defaults.ttpu_attention(config), qkv_bias=False, output_bias=False)


@hookimpl
def ttpu_rope() -> RopeSpec:
    """None: the state spaces know the order of tokens."""
    return NO_ROPE


@hookimpl
def ttpu_mixer(config: ModelConfig, layer: int) -> MixerSpec | None:
    """A state space, None for attention, or no mixer in layers that are an MLP."""
    ttpu_attention(config)  # reads its keys for a model without attention, too
    mixer = state_space(
        hidden_size=config.positive_int("hidden_size"),
        num_heads=config.positive_int("mamba_num_heads"),
        head_dim=config.positive_int("mamba_head_dim"),
        state_size=config.positive_int("ssm_state_size"),
        groups=config.positive_int("n_groups"),
        conv_kernel=config.positive_int("conv_kernel"),
        activation=defaults.activation(config, "mamba_hidden_act").name,
        norm_eps=config.positive_number("layer_norm_epsilon"),
        bias=config.flag("use_bias"),
        conv_bias=config.flag("use_conv_bias"),
        dt_limits=(config.number("time_step_min"), math.inf),
    )
    return {MAMBA: mixer, FULL: None}.get(_kind(config, layer), NO_MIXER)


@hookimpl
def ttpu_mlp(config: ModelConfig, layer: int) -> MLPSpec | MoESpec:
    """An MLP, experts with a shared one, or none.

    Raises:
        ConfigError: experts of a latent.
    """
    if config.get("moe_latent_size") is not None:
        raise ConfigError(
            f"{config.source} sets 'moe_latent_size', but experts that read a latent are not described by this plugin: "
            "use backend='torch_xla'."
        )
    activation, bias = defaults.activation(config, "mlp_hidden_act"), config.flag("mlp_bias")
    experts = MoESpec(
        num_experts=config.positive_int("n_routed_experts"),
        experts_per_token=config.positive_int("num_experts_per_tok"),
        intermediate_size=config.positive_int("moe_intermediate_size"),
        activation=activation,
        gated=False,
        router=RouterSpec(
            score="sigmoid",
            fp32=True,
            correction_bias=True,
            renormalize=config.flag("norm_topk_prob"),
            renormalize_eps=1e-20,
            groups=config.positive_int("n_group"),
            top_groups=config.positive_int("topk_group"),
            group_score="top2_sum",
            scaling_factor=config.number("routed_scaling_factor"),
        ),
        shared=MLPSpec(config.positive_int("moe_shared_expert_intermediate_size"), activation, gated=False, bias=bias),
    )
    kind = _kind(config, layer)
    if kind == MLP:
        return MLPSpec(config.positive_int("intermediate_size"), activation, gated=False, bias=bias)
    return experts if kind == EXPERTS else NO_MLP


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """Names of its own. What predicts further tokens is left out."""
    mapping = standard_mapping(spec, NAMES)
    return replace(mapping, ignored=(*mapping.ignored, r"mtp\..*"))


def _kind(config: ModelConfig, layer: int) -> str:
    return defaults.layer_type(config, layer, (MAMBA, FULL, MLP, EXPERTS))
