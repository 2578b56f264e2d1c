"""What the core answers when a family does not: the commonest decoder (llama's), read from the usual config keys.
Families call these functions too, and replace the fields in which they differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ttpu_core.config import ModelConfig
from ttpu_core.errors import ConfigError, UnsupportedError
from ttpu_core.hookspecs import hookimpl
from ttpu_core.mapping import Concat, Expression, FlaxMapping, Stack, Tensor
from ttpu_core.parameters import fused_slots, norm_names
from ttpu_core.rope import RopeSpec, rope_from_config
from ttpu_core.spec import (
    ActivationSpec,
    ArchitectureSpec,
    AttentionSpec,
    BlockSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    MLPSpec,
    NormSpec,
)

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
        ConfigError: a name that no backend knows.
    """
    name = config.text(key, default=default)
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"{config.source} asks for the activation {name!r} under {key!r}, but the known ones are "
            f"{', '.join(ACTIVATIONS)}: correct it."
        )
    return ActivationSpec(ACTIVATIONS[name])


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config as it is."""
    return config


@hookimpl
def ttpu_embedding(config: ModelConfig) -> EmbeddingSpec:
    """A plain table."""
    return EmbeddingSpec(config.positive_int("vocab_size"), config.positive_int("hidden_size"))


@hookimpl
def ttpu_head(config: ModelConfig) -> HeadSpec:
    """A linear head, tied if the config says so."""
    return HeadSpec(tied=config.flag("tie_word_embeddings", default=False))


@hookimpl
def ttpu_norm(config: ModelConfig) -> NormSpec:
    """RMSNorm with a scale."""
    return NormSpec(eps=config.number("rms_norm_eps", default=1e-6))


@hookimpl
def ttpu_block() -> BlockSpec:
    """Norms before the sub-layers."""
    return BlockSpec()


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """Grouped-query attention without windows."""
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
    """Rope as the config's rope parameters say."""
    return rope_from_config(config, head_dim=attention.head_dim)


@hookimpl
def ttpu_mixer() -> None:
    """Attention."""


@hookimpl
def ttpu_mlp(config: ModelConfig) -> MLPSpec:
    """A gated MLP."""
    return MLPSpec(
        intermediate_size=config.positive_int("intermediate_size"),
        activation=activation(config),
        bias=config.flag("mlp_bias", default=False),
    )


@dataclass(frozen=True)
class CheckpointNames:
    """Where a checkpoint in the usual layout keeps each role; `{layer}` is the layer's number."""

    layer: str = "model.layers.{layer}."
    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    output: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    input_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    post_attention_norm: str = "post_attention_layernorm"
    post_mlp_norm: str = "post_feedforward_layernorm"


IGNORED_TENSORS: tuple[str, ...] = (r".*rotary_emb\.(inv_freq|cos_cached|sin_cached)", r".*\.masked_bias")
"""Buffers that old checkpoints carry and that follow from the config."""

BASE_MODEL_PREFIXES: tuple[tuple[str, str], ...] = (("", "model."),)
"""A checkpoint of the base model alone has no `model.` before its names."""


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """The usual names, one tensor per projection."""
    return standard_mapping(spec)


def standard_mapping(spec: ArchitectureSpec, names: CheckpointNames | None = None) -> FlaxMapping:
    """The mapping of a checkpoint in the usual layout; a family passes other `names`, or replaces rules of it."""
    names = names or CheckpointNames()
    hidden, vocab = spec.hidden_size, spec.vocab_size
    rules: list[tuple[str, Expression]] = [("embed.embedding", Tensor(names.embedding, (vocab, hidden)))]
    for index, layer in enumerate(spec.layers):
        prefix = names.layer.format(layer=index)
        rules += [(f"layers.{index}.{path}", rule) for path, rule in _layer_rules(layer, hidden, names, prefix)]
    if spec.final_norm is not None:
        rules += _norm_rules("final_norm", spec.final_norm, names.final_norm, hidden)
    if not spec.head.tied:
        rules.append(("head.kernel", Tensor(f"{names.head}.weight", (vocab, hidden))))
    if spec.head.bias:
        rules.append(("head.bias", Tensor(f"{names.head}.bias", (vocab,))))
    tied = (f"{names.head}.weight",) if spec.head.tied else ()
    return FlaxMapping(tuple(rules), tied=tied, ignored=IGNORED_TENSORS, prefixes=BASE_MODEL_PREFIXES)


def _layer_rules(
    layer: LayerSpec, hidden: int, names: CheckpointNames, prefix: str
) -> Iterator[tuple[str, Expression]]:
    for name in norm_names(layer):
        yield from _norm_rules(name, layer.norm, prefix + getattr(names, name), hidden)
    if isinstance(layer.mixer, AttentionSpec):
        yield from attention_rules(layer.mixer, hidden, names, prefix)
    if isinstance(layer.mlp, MLPSpec):
        yield from mlp_rules("mlp", layer.mlp, hidden, (prefix + names.gate, prefix + names.up, prefix + names.down))
    elif layer.mlp is not None:
        raise UnsupportedError(
            "the standard mapping has no rules for a mixture of experts: answer `ttpu_flax_mapping` in the family "
            "plugin."
        )


def attention_rules(
    spec: AttentionSpec, hidden: int, names: CheckpointNames, prefix: str
) -> Iterator[tuple[str, Expression]]:
    """Rules for separate query, key, value and output projections, fused by KV head."""
    kv, dim, value_dim = spec.num_kv_heads, spec.head_dim, spec.value_dim
    slots = [
        (name, count)
        for name, count in zip((names.query, names.key, names.value), fused_slots(spec), strict=True)
        if count
    ]
    kernels = [Tensor(f"{prefix}{n}.weight", (kv * c * dim, hidden)).reshape(kv, c, dim, hidden) for n, c in slots]
    yield "attention.qkv.kernel", Concat(tuple(kernels), axis=1)
    if spec.qkv_bias:
        biases = [Tensor(f"{prefix}{n}.bias", (kv * c * dim,)).reshape(kv, c, dim) for n, c in slots]
        yield "attention.qkv.bias", Concat(tuple(biases), axis=1)
    own_keys = spec.kv_from_layer is None
    if own_keys and not spec.value_is_key and value_dim != dim:
        value = f"{prefix}{names.value}"
        kernel = Tensor(f"{value}.weight", (kv * value_dim, hidden))
        yield "attention.value.kernel", kernel.reshape(kv, value_dim, hidden)
        if spec.qkv_bias:
            yield "attention.value.bias", Tensor(f"{value}.bias", (kv * value_dim,)).reshape(kv, value_dim)
    for role, name, norm, heads in (
        ("q_norm", names.q_norm, spec.q_norm, (kv, spec.q_per_kv, dim)),
        ("k_norm", names.k_norm, spec.k_norm if own_keys else None, (kv, dim)),
    ):
        if norm is not None and norm.scale:
            if spec.qk_norm_scope == "head":
                yield f"attention.{role}.scale", Tensor(f"{prefix}{name}.weight", (dim,))
            else:
                flat: Any = 1
                for size in heads:
                    flat *= size
                yield f"attention.{role}.scale", Tensor(f"{prefix}{name}.weight", (flat,)).reshape(*heads)
    yield "attention.output.kernel", Tensor(f"{prefix}{names.output}.weight", (hidden, spec.num_heads * value_dim))
    if spec.output_bias:
        yield "attention.output.bias", Tensor(f"{prefix}{names.output}.bias", (hidden,))


def mlp_rules(
    path: str, spec: MLPSpec, hidden: int, tensors: tuple[str, str, str]
) -> Iterator[tuple[str, Expression]]:
    """Rules for a dense MLP whose gate, up and down projections are separate tensors."""
    gate, up, down = tensors
    inner = spec.intermediate_size
    if spec.gated:
        pair = tuple(Tensor(f"{name}.weight", (inner, hidden)) for name in (gate, up))
        yield f"{path}.gate_up.kernel", Stack(pair)
        if spec.bias:
            yield f"{path}.gate_up.bias", Stack(tuple(Tensor(f"{name}.bias", (inner,)) for name in (gate, up)))
    else:
        yield f"{path}.up.kernel", Tensor(f"{up}.weight", (inner, hidden))
        if spec.bias:
            yield f"{path}.up.bias", Tensor(f"{up}.bias", (inner,))
    yield f"{path}.down.kernel", Tensor(f"{down}.weight", (hidden, inner))
    if spec.bias:
        yield f"{path}.down.bias", Tensor(f"{down}.bias", (hidden,))


def _norm_rules(path: str, norm: NormSpec, name: str, size: int) -> list[tuple[str, Expression]]:
    rules: list[tuple[str, Expression]] = []
    if norm.kind == "none":
        return rules
    if norm.scale:
        rules.append((f"{path}.scale", Tensor(f"{name}.weight", (size,))))
    if norm.bias:
        rules.append((f"{path}.bias", Tensor(f"{name}.bias", (size,))))
    return rules


def replace_rules(mapping: FlaxMapping, rules: dict[str, Expression]) -> FlaxMapping:
    """The mapping with some rules replaced or added, by Flax path."""
    kept = [(path, rules.get(path, rule)) for path, rule in mapping.rules]
    known = {path for path, _ in mapping.rules}
    added = [(path, rule) for path, rule in rules.items() if path not in known]
    return replace(mapping, rules=(*kept, *added))
