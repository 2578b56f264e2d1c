"""Mamba (`model_type` "mamba"; arXiv 2312.00752) and Falcon Mamba ("falcon_mamba"): a selective scan in every layer,
without attention and without MLPs. In Falcon Mamba norms without scales follow the selection."""

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.mapping import FlaxMapping, Tensor
from ttpu_core.mapping.layout import standard_mapping, with_alternative
from ttpu_core.spec import ArchitectureSpec, MixerSpec
from ttpu_core.spec.selective_scan import selective_scan
from ttpu_zoo import mamba2

CONFIG_DEFAULTS = {
    "vocab_size": 50_280,
    "state_size": 16,
    "layer_norm_epsilon": 1e-5,
    "expand": 2,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "mixer_rms_eps": 1e-6,
    "max_position_embeddings": 262_144,  # of nothing: the states have one size whatever the length
}
NEW_WEIGHTS = (*mamba2.NEW_WEIGHTS, "time_step_scale", "time_step_init_scheme")
FORMS = ("use_mambapy", "use_falcon_mambapy", "use_associative_scan")
OTHER_CODE = ("d_inner", "d_model", "n_layer", "ssm_cfg", "rms_norm", "fused_add_norm", "pad_vocab_size_multiple")

ttpu_norm, ttpu_mlp = mamba2.ttpu_norm, mamba2.ttpu_mlp  # hooks of this module too


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `MambaConfig` or `FalconMambaConfig`. The sizes that define a model are
    required."""
    config.does_not_matter("intermediate_size", because="it is the hidden size times expand")
    config.does_not_matter("residual_in_fp32", because="the residual stream has the dtype of the activations")
    config.does_not_matter(FORMS, because="they choose among forms of one computation")
    config.does_not_matter(NEW_WEIGHTS, because="only new weights are drawn with them")
    config.does_not_matter(OTHER_CODE, because="older code reads them, and transformers does not")
    if config.model_type == "mamba":
        config.does_not_matter("mixer_rms_eps", because="only Falcon Mamba has norms there")
    return config.with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_mixer(config: ModelConfig) -> MixerSpec:
    """A selective scan."""
    hidden = config.positive_int("hidden_size")
    return selective_scan(
        hidden_size=hidden,
        channels=config.positive_int("expand") * hidden,
        state_size=config.positive_int("state_size"),
        dt_rank=dt_rank(config, "time_step_rank"),
        conv_kernel=config.positive_int("conv_kernel"),
        activation=defaults.activation(config).name,
        norm="plain" if config.model_type == "falcon_mamba" else "none",
        norm_eps=config.positive_number("mixer_rms_eps"),
        bias=config.flag("use_bias"),
        conv_bias=config.flag("use_conv_bias"),
    )


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """Names of its own. Older checkpoints name the embedding otherwise."""
    table = Tensor("backbone.embedding.weight", (spec.vocab_size, spec.hidden_size))
    return with_alternative(standard_mapping(spec, mamba2.NAMES), {"embed.embedding": table})


def dt_rank(config: ModelConfig, key: str) -> int:
    """The features of the steps: a sixteenth of the hidden size, rounded up, unless the config has a number."""
    automatic = config.get(key, "auto") == "auto"
    return -(-config.positive_int("hidden_size") // 16) if automatic else config.positive_int(key)
