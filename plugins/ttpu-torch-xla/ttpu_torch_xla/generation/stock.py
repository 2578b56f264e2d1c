"""Generation by transformers' own loop, for calls that our loop cannot serve. This module says why it cannot, refuses
options that transformers' loop cannot serve either, and adapts the rest to torch_xla."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers.generation import GenerationMode

from ttpu_core.errors import UnsupportedError
from ttpu_core.spec import AttentionSpec, MixerSpec
from ttpu_torch_xla.generation.cache import unknown_layers

TEXT = frozenset({"input_ids", "attention_mask", "position_ids", "use_cache", "logits_to_keep"})
"""Inputs of the model that our loop understands; where others are given, transformers' own loop runs."""

_warned: set[str] = set()


UNGUIDED = (None, 1, 1.0)


def needs_stock(model: Any, config: Any, model_inputs: Mapping[str, Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return why our loop cannot serve a call, or None."""
    if kwargs.get("custom_generate") is not None:
        return "a custom_generate"
    mode = config.get_generation_mode(kwargs.get("assistant_model"))
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        return f"the generation mode {mode.value}"
    if config.guidance_scale not in UNGUIDED:
        return f"guidance_scale={config.guidance_scale}"
    if config.cache_implementation not in (None, "dynamic", "static"):
        return f"cache_implementation={config.cache_implementation!r}"
    others = sorted(name for name, value in model_inputs.items() if value is not None and name not in TEXT)
    if others:
        return f"the input {others[0]}"
    if getattr(config, "is_assistant", None):
        return "the role of an assistant"
    if not model._supports_default_dynamic_cache():
        return "a cache of the model's own"
    mixers = _mixers(model)
    if any(isinstance(mixer, AttentionSpec) and mixer.alibi for mixer in mixers):
        return "ALiBi, whose positions transformers counts in a mask of two dimensions"
    layers = unknown_layers(model.config)
    return f"layers of type {layers[0]}" if layers else None


def _mixers(model: Any) -> tuple[AttentionSpec | MixerSpec, ...]:
    """What mixes tokens in each layer of a model that a plugin describes; nothing for another."""
    handle = getattr(model, "ttpu", None)
    architecture = getattr(handle, "architecture", None)
    return () if architecture is None else tuple(layer.mixer for layer in architecture.spec.layers)


def refuse_offloading(config: Any) -> None:
    """Refuse caches that neither our loop nor transformers' own supports.

    Raises:
        UnsupportedError: the caller, or the checkpoint's generation config, asks for one.
    """
    if str(config.cache_implementation).startswith("offloaded"):
        raise UnsupportedError(
            f"cache_implementation={config.cache_implementation!r} was asked for, but transformers offloads keys and "
            "values by CUDA streams, which an XLA device has not: leave it out."
        )


def inputs_device(model: Any, config: Any) -> torch.device:
    """Return the device of the inputs of transformers' loop: the model's, because most loops join tensors of both; the
    host for beam search, which would otherwise compile as many programs again as the model does."""
    device: torch.device = model.device
    beams = (config.num_beams or 1) > 1 and config.guidance_scale in UNGUIDED
    return torch.device("cpu") if beams else device


class EmptySums(TorchFunctionMode):
    """A context in which prefix sums of empty tensors are empty. torch_xla cannot lower them, and assisted decoding
    computes one whenever there is no candidate, as before the last token."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """`func(*args, **kwargs)`."""
        if func is torch.Tensor.cumsum and args[0].numel() == 0:
            return torch.empty_like(args[0], dtype=torch.long)
        return func(*args, **(kwargs or {}))


def warn_once(kind: str, reason: str) -> None:
    """Warn once per process for each reason."""
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(
            f"{kind}.generate was called with {reason}, which the compiled decoding loop does not serve: transformers' "
            "own loop runs, and compiles a program for nearly every token.",
            UserWarning,
            stacklevel=5,
        )
