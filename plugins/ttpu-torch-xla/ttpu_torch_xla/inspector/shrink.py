"""Makes a model's config small enough to run anywhere: a few narrow layers, with everything kept that decides which
code runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ttpu_core.architecture import Architecture
from ttpu_core.errors import UnsupportedError
from ttpu_core.spec import AttentionSpec, LayerSpec, MLPSpec

MOST_LAYERS = 8
SMALL: Mapping[str, int] = {
    "vocab_size": 256,
    "vocab_size_per_layer_input": 256,
    "hidden_size": 64,
    "hidden_size_per_layer_input": 16,
    "intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "rotary_dim": 8,
    "v_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "laurel_rank": 8,
    "sliding_window": 16,
    "attention_chunk_size": 16,
    "max_position_embeddings": 256,
}
"""Sizes that are lowered to these. What is smaller already, or not listed, stays."""

COMMON = ("num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings")
"""Sizes that every config has, some under names of their own (GPT-2's `n_layer`)."""

HEADS = 4
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
LAYER_NUMBERS = ("mlp_only_layers", "moe_layers")
"""Lists of the numbers of layers."""


def small_config(config: Any, architecture: Architecture) -> Any:
    """A copy of a transformers text config with few and narrow layers, of each kind that the model has.

    Raises:
        UnsupportedError: transformers refuses such a config.
    """
    names = getattr(config, "attribute_map", {})
    own_names = {names[name]: name for name in COMMON if name in names}
    values = {own_names.get(name, name): value for name, value in config.to_dict().items()}
    kept = layers_kept(architecture)
    before = dict(values)
    layers = int(values["num_hidden_layers"])
    for name, value in before.items():
        if name in LAYER_NUMBERS and isinstance(value, list):
            values[name] = [new for new, old in enumerate(kept) if old in value]
        elif isinstance(value, list) and len(value) == layers:
            values[name] = [_small(name, value[old]) for old in kept]
        else:
            values[name] = _small(name, value)
    values["num_hidden_layers"] = len(kept)
    heads = int(values["num_attention_heads"])
    values["num_attention_heads"] = min(heads, HEADS)
    if "num_key_value_heads" in values:
        kv = int(values["num_key_value_heads"] or heads)
        values["num_key_value_heads"] = max(1, values["num_attention_heads"] * kv // heads)
    values.update({name: None for name in TOKENS if name in values})
    if values.get("num_kv_shared_layers"):
        values["num_kv_shared_layers"] = sum(_reads_other_keys(architecture.spec.layers[old]) for old in kept)
    if values.get("per_layer_config"):
        own = {int(number): changes for number, changes in values["per_layer_config"].items()}
        values["per_layer_config"] = {
            new: {name: _in_proportion(value, before.get(name), values.get(name)) for name, value in own[old].items()}
            for new, old in enumerate(kept)
            if old in own
        }
    try:
        return type(config).from_dict(values)
    except Exception as error:  # config classes raise many kinds for values that do not fit together
        raise UnsupportedError(
            f"a small model of type {config.model_type!r} was to be made for the inspection, but transformers refuses "
            f"its config ({type(error).__name__}: {' '.join(str(error).split())[:200]}): pass a small checkpoint of "
            "this type with --as-it-is."
        ) from error


def small_stock_config(config: Any) -> Any:
    """A copy of a transformers text config that no plugin describes, with few and narrow layers: as many as there are
    kinds in its `layer_types`, or two.

    Raises:
        UnsupportedError: transformers refuses such a config.
    """
    values, names = config.to_dict(), getattr(config, "attribute_map", {})
    number = names.get("num_hidden_layers", "num_hidden_layers")
    kinds = values.get("layer_types") or ()
    kept = min(int(values.get(number) or 2), max(2, max((kinds.index(kind) + 1 for kind in set(kinds)), default=2)))
    layers = values.get(number)
    for name, value in values.items():
        if isinstance(value, list) and len(value) == layers:
            values[name] = value[:kept]
    for name, most in {**SMALL, "num_attention_heads": HEADS, "num_key_value_heads": HEADS}.items():
        own = names.get(name, name)
        values[own] = _small(name, values[own]) if name in SMALL and own in values else values.get(own)
        if name not in SMALL and isinstance(values[own], int):
            values[own] = min(values[own], most)
    values = {name: value for name, value in values.items() if name in config.to_dict()}
    values.update({number: kept, **{name: None for name in TOKENS if name in values}})
    try:
        return type(config).from_dict(values)
    except Exception as error:  # config classes raise many kinds for values that do not fit together
        raise UnsupportedError(
            f"a small model of type {config.model_type!r} was to be made for the inspection, but transformers refuses "
            f"its config ({type(error).__name__}: {' '.join(str(error).split())[:200]}): pass a small checkpoint of "
            "this type with --as-it-is."
        ) from error


def layers_kept(architecture: Architecture) -> tuple[int, ...]:
    """The fewest first layers among which every kind of layer is found, up to `MOST_LAYERS`. Where the last layers read
    the keys and values of earlier ones: the first layer of each kind that has its own, and the last of each that reads,
    so that those stay the last, with one to read from before them."""
    kinds = [_kind(layer) for layer in architecture.spec.layers]
    reads = [_reads_other_keys(layer) for layer in architecture.spec.layers]
    first = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    if not any(reads):
        return tuple(range(min(max(first.values()) + 1, MOST_LAYERS)))
    last = {kind: index for index, kind in enumerate(kinds)}
    return tuple(sorted({(last if reading else first)[kind] for kind, reading in zip(kinds, reads, strict=True)}))


def _kind(layer: LayerSpec) -> LayerSpec:
    """A layer, but for what does not decide which code runs: how wide it is, and which layer's keys it reads."""
    mixer, mlp = layer.mixer, layer.mlp
    if isinstance(mixer, AttentionSpec) and mixer.kv_from_layer is not None:
        mixer = replace(mixer, kv_from_layer=0)
    if isinstance(mlp, MLPSpec):
        mlp = replace(mlp, intermediate_size=1)
    return replace(layer, mixer=mixer, mlp=mlp)


def _reads_other_keys(layer: LayerSpec) -> bool:
    return isinstance(layer.mixer, AttentionSpec) and layer.mixer.kv_from_layer is not None


def _small(name: str, value: Any) -> Any:
    if name in SMALL and isinstance(value, int) and not isinstance(value, bool):
        return min(value, SMALL[name])
    return value


def _in_proportion(value: Any, before: Any, after: Any) -> Any:
    """A layer's own size, made smaller as the size of the other layers was, so that the two still differ."""
    sizes = [isinstance(each, int) and not isinstance(each, bool) for each in (value, before, after)]
    return max(1, value * after // before) if all(sizes) and before else value
