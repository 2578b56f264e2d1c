"""Makes tiny random reference models: transformers models on torch whose every weight, norm, bias and saved buffer is
random, so that a forgotten tensor always changes the logits."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

from ttpu_conformance.declaration import NULL, Declaration, Variant
from ttpu_conformance.errors import DeclarationError, NoReference

SEQUENCE = 40
"""Tokens of a test sequence: longer than the tiny windows, chunks and original contexts below."""

# Sizes differ from each other wherever they can, so that swapped axes show.
SIZES: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# Only where the class's own default is not None, which would say that the feature is off or follows from others.
SIZES_WHERE_ON: dict[str, Any] = {"head_dim": 24, "sliding_window": 13, "attention_chunk_size": 16}

# Keys that are no fields of a config class, yet every class takes them.
_ALWAYS_KNOWN = frozenset(
    {
        "rope_theta", "rope_scaling", "tie_word_embeddings", "partial_rotary_factor", "model_type", "head_dim",
        "per_layer_config",
    }
)  # fmt: skip
NOISE = 0.3  # standard deviation of what is added to norms, biases and buffers


def reference_class(declaration: Declaration) -> Any:
    """The transformers class of the reference model.

    Raises:
        DeclarationError: transformers has no such class.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = declaration.transformers or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(declaration.model_type)
    if name is None:
        raise DeclarationError(
            f"transformers {transformers.__version__} has no causal language model of type "
            f'{declaration.model_type!r}: name a class with transformers = "…" under [{declaration.model_type}] in '
            f"conformance.toml."
        )
    module, _, attribute = name.rpartition(":")
    try:
        return getattr(import_module(module), attribute) if module else getattr(transformers, name)
    except (ImportError, AttributeError) as error:
        raise DeclarationError(
            f"{declaration.source} names the class {name!r} for {declaration.model_type!r}, but transformers "
            f"{transformers.__version__} has none of that name: correct it, or write package.module:Class."
        ) from error


def config_class(declaration: Declaration) -> Any:
    """Return the transformers class that reads configs of a model type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = declaration.model_type in CONFIG_MAPPING
    return CONFIG_MAPPING[declaration.model_type] if known else reference_class(declaration).config_class


def given_values(declaration: Declaration, variant: Variant) -> dict[str, Any]:
    """Return what the config class is given: the kit's sizes, then the declared base, then the variant."""
    sizes = _sizes(config_class(declaration))
    return _merged(sizes, _merged(_nulls(declaration.base), _nulls(variant.keys)))


def tiny_config(declaration: Declaration, variant: Variant) -> Any:
    """Make a transformers config: the kit's sizes, then the declared base, then the variant.

    Raises:
        DeclarationError: a declared key that the config class does not know, or values that it refuses.
    """
    kind, values = config_class(declaration), given_values(declaration, variant)
    where = f"{declaration.source} ({declaration.model_type}, variant {variant.name})"
    _refuse_unknown(kind, values, where)
    try:
        return kind(**values)
    except Exception as error:  # config classes validate with errors of many kinds
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise DeclarationError(f"{where} gives values that {kind.__name__} refuses ({reason}).") from error


def written_config(declaration: Declaration, variant: Variant) -> dict[str, Any]:
    """config.json as `save_pretrained` of the reference model writes it, without making that model."""
    config = tiny_config(declaration, variant)
    config.architectures, config.dtype = [reference_class(declaration).__name__], "float32"
    return dict(json.loads(config.to_json_string()))


def random_model(declaration: Declaration, variant: Variant) -> Any:
    """Make a float32 torch model in evaluation mode with eager attention; equal in every process.

    Raises:
        NoReference: a library that its class needs is not installed.
    """
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    config = tiny_config(declaration, variant)
    torch.manual_seed(0)
    try:
        kind = reference_class(declaration)
        model = kind._from_config(config, attn_implementation=declaration.attention).eval().float()
    except ImportError as error:  # as for the pictures of a multimodal model
        why = " ".join(str(error).split())
        raise NoReference(f"transformers cannot make the reference model here: {why}") from error
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in filter(torch.numel, _random_tensors(model, declaration)):
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.ndim <= 1 or bool((tensor == tensor.flatten()[0]).all()):
                tensor.add_(NOISE * noise)  # norms stay around 1, or around 0 where the model uses 1 + w
            else:
                tensor.copy_(tensor.shape[-1] ** -0.5 * noise)  # keeps activations and logits of order one
    return model


def _random_tensors(model: Any, declaration: Declaration) -> list[Any]:
    """Parameters once each (tied ones are one tensor), then the buffers that checkpoints hold and that do not follow
    from the config.

    Raises:
        DeclarationError: a declared pattern of such buffers matches none, or one that holds a single number.
    """
    saved = model.state_dict().keys()
    buffers = {name: one for name, one in model.named_buffers() if name in saved and one.is_floating_point()}
    derived = {name: one for name, one in buffers.items() if declaration.is_derived(name)}
    for pattern in declaration.derived_buffers:
        if not any(re.fullmatch(pattern, name) for name in derived):
            raise DeclarationError(
                f"{declaration.source} declares {pattern!r} of {declaration.model_type!r} under derived_buffers, but "
                f"the reference model saves no such buffer (it saves {', '.join(sorted(buffers)[:4]) or 'none'}): "
                "correct the pattern, or leave it out."
            )
    for name, one in derived.items():
        if bool((one == one.flatten()[0]).all()):
            raise DeclarationError(
                f"{declaration.source} declares {name!r} of {declaration.model_type!r} under derived_buffers, but it "
                f"holds the number {float(one.flatten()[0]):g} alone, as a buffer does that is trained or loaded: map "
                "it in `ttpu_flax_mapping`."
            )
    return [*model.parameters(), *(one for name, one in buffers.items() if name not in derived)]


def _sizes(kind: Any) -> dict[str, Any]:
    """The kit's sizes for the keys that a config class knows, in its text part where it has one. A class may have its
    own names for the usual ones, as GPT-2's n_embd for hidden_size: transformers lists them in `attribute_map`."""
    parts = getattr(kind, "sub_configs", None) or {}
    if "text_config" in parts:  # of any type, where the class is AutoConfig: then the declaration gives all sizes
        return {"text_config": _sizes(parts["text_config"]) if is_dataclass(parts["text_config"]) else {}}
    defaults = {field.name: field.default for field in fields(kind)}
    sizes = {kind.attribute_map.get(key, key): value for key, value in SIZES.items()}
    sizes = {key: value for key, value in sizes.items() if key in defaults}
    return sizes | {key: value for key, value in SIZES_WHERE_ON.items() if defaults.get(key) is not None}


def _refuse_unknown(kind: Any, values: Mapping[str, Any], where: str) -> None:
    parts = getattr(kind, "sub_configs", None) or {}
    known = {field.name for field in fields(kind)} | set(kind.attribute_map) | _ALWAYS_KNOWN | set(parts)
    for key, value in values.items():
        if key not in known:
            raise DeclarationError(
                f"{where} sets {key!r}, but {kind.__name__} has no such key: correct it, or leave it out."
            )
        if key == "text_config" and isinstance(value, Mapping) and hasattr(parts.get(key), "attribute_map"):
            _refuse_unknown(parts[key], value, where)


def _nulls(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys, with those listed under `null` set to None."""
    values = {key: _nulls(value) if isinstance(value, Mapping) else value for key, value in keys.items() if key != NULL}
    return values | dict.fromkeys(keys.get(NULL, ()))


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Two nested tables, the second winning; rope parameters are replaced whole, since their keys belong together."""
    merged = dict(below)
    for key, value in above.items():
        nested = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if nested and not key.startswith("rope") else value
    return merged
