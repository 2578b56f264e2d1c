"""Mamba-2 and Codestral Mamba (`model_type` "mamba2"; arXiv 2405.21060): a state space in every layer, without
attention and without MLPs."""

import math
from dataclasses import replace

from ttpu_core import ModelConfig, hookimpl
from ttpu_core import defaults as core
from ttpu_core.mapping import FlaxMapping, Tensor
from ttpu_core.mapping.layout import CheckpointNames, standard_mapping, with_alternative
from ttpu_core.spec import NO_MLP, ArchitectureSpec, MixerSpec, MLPSpec, NormSpec
from ttpu_core.spec.state_space import state_space

CONFIG_DEFAULTS = {
    "vocab_size": 32_768,
    "num_heads": 128,
    "head_dim": 64,
    "state_size": 128,
    "layer_norm_epsilon": 1e-5,
    "conv_kernel": 4,
    "n_groups": 8,
    "use_bias": False,
    "use_conv_bias": True,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "max_position_embeddings": 262_144,  # of nothing: the states have one size whatever the length
}
NAMES = CheckpointNames(base="backbone.", state_space="mixer.", input_norm="norm").below("backbone.")
NAMES = replace(NAMES, embedding="backbone.embeddings.weight", final_norm="backbone.norm_f")
OTHER_CODE = ("chunk_size", "time_step_rank", "rms_norm", "norm_before_gate", "fused_add_norm")
NEW_WEIGHTS = ("time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual")


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `Mamba2Config`. The sizes that define a model are required."""
    config.does_not_matter("expand", because="it is the heads' number and size, divided by the hidden size")
    config.does_not_matter(OTHER_CODE, because="transformers does not read it, or it does not change the results")
    config.does_not_matter("residual_in_fp32", because="the residual stream has the dtype of the activations")
    config.does_not_matter(NEW_WEIGHTS, because="only new weights are drawn with them")
    return config.with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_norm(config: ModelConfig) -> NormSpec:
    """RMSNorm, whose epsilon has a name of its own."""
    return NormSpec(eps=config.positive_number("layer_norm_epsilon"))


@hookimpl
def ttpu_mixer(config: ModelConfig) -> MixerSpec:
    """A state space."""
    return state_space(
        hidden_size=config.positive_int("hidden_size"),
        num_heads=config.positive_int("num_heads"),
        head_dim=config.positive_int("head_dim"),
        state_size=config.positive_int("state_size"),
        groups=config.positive_int("n_groups"),
        conv_kernel=config.positive_int("conv_kernel"),
        activation=core.activation(config).name,
        norm_eps=config.positive_number("layer_norm_epsilon"),
        bias=config.flag("use_bias"),
        conv_bias=config.flag("use_conv_bias"),
        dt_limits=dt_limits(config),
    )


@hookimpl
def ttpu_mlp() -> MLPSpec:
    """None."""
    return NO_MLP


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """Names of its own. Older checkpoints name the embedding otherwise."""
    table = Tensor("backbone.embedding.weight", (spec.vocab_size, spec.hidden_size))
    return with_alternative(standard_mapping(spec, NAMES), {"embed.embedding": table})


def dt_limits(config: ModelConfig) -> tuple[float, float]:
    """The least and the greatest step. JSON has no infinity, for which transformers writes an object."""
    wanted = "a list of the least and the greatest step"
    return config.converted("time_step_limit", wanted, _limits, default=(0.0, math.inf))


def _limits(written: object) -> tuple[float, float]:
    ends = written if isinstance(written, tuple) else ()
    found = [end.get("__float__") if isinstance(end, ModelConfig) else end for end in ends]
    numbers = [float(end) for end in found if isinstance(end, int | float | str) and not isinstance(end, bool)]
    if len(ends) != 2 or len(numbers) != 2 or not numbers[0] <= numbers[1]:
        raise ValueError
    return numbers[0], numbers[1]
