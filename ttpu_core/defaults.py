"""The core's answers for hooks that a family leaves out: the commonest decoder (llama's), read from the usual config
keys. Families call these functions too, and replace the fields in which they differ."""

from __future__ import annotations

from ttpu_core.config import ModelConfig
from ttpu_core.errors import ConfigError
from ttpu_core.hookspecs import hookimpl
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import standard_mapping
from ttpu_core.spec import (
    ActivationSpec,
    ArchitectureSpec,
    AttentionSpec,
    BlockSpec,
    EmbeddingSpec,
    HeadSpec,
    MLPSpec,
    NormSpec,
)
from ttpu_core.spec.rope import RopeSpec, rope_from_config

ACTIVATIONS: dict[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
    "linear": "identity",
}


def activation(config: ModelConfig, key: str = "hidden_act", default: str = "silu") -> ActivationSpec:
    """The activation that a config names.

    Raises:
        ConfigError: no backend knows the name.
    """
    written = key in tuple(config)
    name = config.text(key) if written else default
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"{config.source} asks for the activation {name!r} under {key!r}, but the known ones are "
            f"{', '.join(ACTIVATIONS)}: correct it."
        )
    return ActivationSpec(ACTIVATIONS[name])


def layer_type(
    config: ModelConfig,
    layer: int,
    known: tuple[str, ...] = ("sliding_attention", "full_attention"),
    *,
    assumed: str | None = None,
) -> str:
    """A layer's entry in `layer_types`. `assumed` is returned if the config has no such list; if it is None, the
    list is required.

    Raises:
        ConfigError: the list has another length than the layers, or an entry is not among `known`.
    """
    if assumed is not None and config.get("layer_types") is None:
        return assumed
    types, layers = config.items("layer_types"), config.positive_int("num_hidden_layers")
    if len(types) != layers:
        raise ConfigError(
            f"{config.source} has {len(types)} entries in 'layer_types' for {layers} layers, but one for each is "
            "needed: correct `layer_types` or `num_hidden_layers`."
        )
    if types[layer] not in known:
        raise ConfigError(
            f"{config.source} has {types[layer]!r} for layer {layer} in 'layer_types', but the layers of "
            f"{config.model_type!r} are {' or '.join(map(repr, known))}: correct it."
        )
    return str(types[layer])


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config unchanged."""
    return config


@hookimpl
def ttpu_embedding(config: ModelConfig) -> EmbeddingSpec:
    """A plain embedding table."""
    return EmbeddingSpec(config.positive_int("vocab_size"), config.positive_int("hidden_size"))


@hookimpl
def ttpu_head(config: ModelConfig) -> HeadSpec:
    """A linear head, tied if the config says so."""
    return HeadSpec(tied=config.flag("tie_word_embeddings", default=False))


@hookimpl
def ttpu_norm(config: ModelConfig) -> NormSpec:
    """RMSNorm with a scale."""
    return NormSpec(eps=config.positive_number("rms_norm_eps", default=1e-6))


@hookimpl
def ttpu_block() -> BlockSpec:
    """Pre-norm placement."""
    return BlockSpec()


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """Grouped-query attention without windows.

    Raises:
        ConfigError: the head counts or the hidden size do not divide.
    """
    heads = config.positive_int("num_attention_heads")
    kv_heads = config.positive_int("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{config.source} has {heads} query heads for {kv_heads} key/value heads, but the first must be a multiple "
            "of the second: correct `num_attention_heads` or `num_key_value_heads`."
        )
    hidden = config.positive_int("hidden_size")
    if config.get("head_dim") is None and hidden % heads:
        raise ConfigError(
            f"{config.source} divides a hidden size of {hidden} among {heads} heads, which leaves a remainder: correct "
            "one of them, or give `head_dim`."
        )
    bias = config.flag("attention_bias", default=False)
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=config.positive_int("head_dim", default=hidden // heads),
        qkv_bias=bias,
        output_bias=bias,
    )


@hookimpl
def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:
    """Rope as described by the config's rope parameters."""
    return rope_from_config(config, head_dim=attention.head_dim)


@hookimpl
def ttpu_mixer() -> None:
    """None: every layer has attention."""


@hookimpl
def ttpu_mlp(config: ModelConfig) -> MLPSpec:
    """A gated MLP."""
    return MLPSpec(
        intermediate_size=config.positive_int("intermediate_size"),
        activation=activation(config),
        bias=config.flag("mlp_bias", default=False),
    )


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """The usual names, one tensor per projection."""
    return standard_mapping(spec)
