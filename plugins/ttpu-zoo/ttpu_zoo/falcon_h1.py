"""Falcon-H1 (`model_type` "falcon_h1"; arXiv 2507.22448): in each layer a state space beside attention, and multipliers
in many places."""

from dataclasses import replace
from typing import Any

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.config.kinds import numbers
from ttpu_core.errors import ConfigError
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import standard_mapping
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, BlockSpec, EmbeddingSpec, HeadSpec, MixerSpec, MLPSpec
from ttpu_core.spec.state_space import SECTIONS, state_space
from ttpu_zoo import bamba
from ttpu_zoo.mamba2 import dt_limits

CONFIG_DEFAULTS = bamba.MAMBA_DEFAULTS | {
    "vocab_size": 128_000,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "projectors_bias": False,
    "mamba_norm_before_gate": True,
    "mamba_rms_norm": False,
    "mlp_multipliers": [1.0, 1.0],
    "ssm_multipliers": [1.0] * 5,
}
MULTIPLIERS = ("lm_head", "embedding", "key", "attention_out", "attention_in", "ssm_in", "ssm_out")
UNREAD = ("mamba_chunk_size", "num_logits_to_keep", "attn_layer_indices", "layers_block_type", "mamba_use_mlp")


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `FalconH1Config`. The sizes that define a model are required."""
    config.does_not_matter(UNREAD, because="transformers does not read it, or it does not change the results")
    config.does_not_matter("mamba_expand", because="it is for configs without mamba_d_ssm")
    config.does_not_matter("mamba_norm_before_gate", because="it is for models with mamba_rms_norm")
    ones = {f"{name}_multiplier": 1.0 for name in MULTIPLIERS}
    if "mamba_d_ssm" not in tuple(config):
        config = config.with_values({"mamba_d_ssm": 1024})
    return config.with_defaults(CONFIG_DEFAULTS | ones)


@hookimpl
def ttpu_embedding(config: ModelConfig) -> EmbeddingSpec:
    """Embeddings times a number."""
    return replace(defaults.ttpu_embedding(config), scale=config.number("embedding_multiplier"))


@hookimpl
def ttpu_head(config: ModelConfig) -> HeadSpec:
    """Logits times a number."""
    return replace(defaults.ttpu_head(config), multiplier=config.number("lm_head_multiplier"))


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """Attention whose input, keys and output are scaled, which is a scale of its scores and one of its values.

    Raises:
        ConfigError: there are biases too, which scales of scores and values would change.
    """
    usual = defaults.ttpu_attention(config)
    before, keys, after = (config.number(f"{name}_multiplier") for name in ("attention_in", "key", "attention_out"))
    if usual.qkv_bias and (before, after) != (1.0, 1.0):
        raise ConfigError(
            f"{config.source} has both biases and multipliers of its attention ('attention_in_multiplier' {before:g}, "
            f"'attention_out_multiplier' {after:g}), which this plugin cannot describe: set the multipliers to 1, or "
            "use backend='torch_xla'."
        )
    return replace(usual, scale=usual.softmax_scale * before**2 * keys, value_scale=before * after)


@hookimpl
def ttpu_block(config: ModelConfig) -> BlockSpec:
    """A state space beside attention. The MLP's output is scaled."""
    return BlockSpec(beside=_mixer(config), mlp_residual_multiplier=_multipliers(config, "mlp_multipliers", 2)[1])


@hookimpl
def ttpu_mlp(config: ModelConfig) -> MLPSpec:
    """A gated MLP whose gates are scaled."""
    return replace(defaults.ttpu_mlp(config), gate_multiplier=_multipliers(config, "mlp_multipliers", 2)[0])


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """Bamba's names."""
    return standard_mapping(spec, bamba.NAMES)


def _mixer(config: ModelConfig) -> MixerSpec:
    hidden, heads = config.positive_int("hidden_size"), config.positive_int("mamba_n_heads")
    inner = config.positive_int("mamba_d_ssm", default=None) or config.positive_int("mamba_expand") * hidden
    automatic = config.get("mamba_d_head", "auto") == "auto"
    order = "before_gate" if config.flag("mamba_norm_before_gate") else "after_gate"
    factors = dict(zip(SECTIONS, _multipliers(config, "ssm_multipliers", len(SECTIONS)), strict=True))
    factors |= {"input": config.number("ssm_in_multiplier"), "output": config.number("ssm_out_multiplier")}
    return state_space(
        hidden_size=hidden,
        num_heads=heads,
        head_dim=inner // heads if automatic else config.positive_int("mamba_d_head"),
        state_size=config.positive_int("mamba_d_state"),
        groups=config.positive_int("mamba_n_groups"),
        conv_kernel=config.positive_int("mamba_d_conv"),
        activation=defaults.activation(config).name,
        norm=order if config.flag("mamba_rms_norm") else "none",  # type: ignore[arg-type]
        norm_eps=config.positive_number("rms_norm_eps"),
        bias=config.flag("mamba_proj_bias"),
        output_bias=config.flag("projectors_bias"),
        conv_bias=config.flag("mamba_conv_bias"),
        dt_limits=dt_limits(config),
        scales=tuple(factors.items()),
    )


def _multipliers(config: ModelConfig, key: str, count: int) -> tuple[float, ...]:
    def convert(value: Any) -> tuple[float, ...]:
        found = numbers(value)
        if len(found) != count:
            raise ValueError
        return found

    return config.converted(key, f"a list of {count} numbers", convert)
