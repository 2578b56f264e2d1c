"""A model's config made small enough to run anywhere, with everything kept that decides which code runs. In: the
checkpoint's config and architecture; out: a transformers config of a few narrow layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ttpu_core.architecture import Architecture
from ttpu_core.errors import UnsupportedError

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
    "global_head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
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

HEADS = 4
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def small_config(config: Any, architecture: Architecture) -> Any:
    """A copy of a transformers text config with few and narrow layers.

    As many layers are kept as it takes to have each kind once: a window here, a mixture of experts there.
    """
    values = config.to_dict()
    layers = layers_needed(architecture)
    before = int(values["num_hidden_layers"])
    for name, value in list(values.items()):
        if isinstance(value, bool):
            continue
        if isinstance(value, int) and name in SMALL:
            values[name] = min(value, SMALL[name])
        elif isinstance(value, list) and len(value) == before:  # one entry per layer
            values[name] = [min(v, SMALL[name]) if name in SMALL else v for v in value[:layers]]
        elif isinstance(value, list) and name in ("mlp_only_layers", "no_rope_layers"):
            values[name] = [index for index in value if index < layers]
    values["num_hidden_layers"] = layers
    heads = int(values["num_attention_heads"])
    kv = int(values.get("num_key_value_heads") or heads)
    values["num_attention_heads"] = min(heads, HEADS)
    if "num_key_value_heads" in values:
        values["num_key_value_heads"] = max(1, values["num_attention_heads"] * kv // heads)
    for name in ("num_global_key_value_heads",):
        if isinstance(values.get(name), int):
            values[name] = max(1, min(values[name], values["num_attention_heads"]))
    for name in TOKENS:
        if values.get(name) is not None:
            values[name] = None
    shared = values.get("num_kv_shared_layers")
    if isinstance(shared, int) and shared:
        values["num_kv_shared_layers"] = min(shared, layers // 2)
    try:
        return type(config).from_dict(values)
    except Exception as error:  # config classes raise many kinds for values that do not fit together
        raise UnsupportedError(
            f"a small model of type {config.model_type!r} was to be made for the inspection, but transformers refuses "
            f"its config ({type(error).__name__}: {' '.join(str(error).split())[:200]}): pass a small checkpoint of "
            "this type with --as-it-is."
        ) from error


def layers_needed(architecture: Architecture) -> int:
    """The fewest first layers among which every kind of layer is found, up to `MOST_LAYERS`."""
    seen: set[Any] = set()
    needed = 1
    for index, layer in enumerate(architecture.spec.layers):
        if layer not in seen:
            seen.add(layer)
            needed = index + 1
    return min(needed, MOST_LAYERS, architecture.spec.num_layers)
