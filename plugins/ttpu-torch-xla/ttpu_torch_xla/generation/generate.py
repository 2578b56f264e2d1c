"""`generate` of a prepared model. In: transformers' own arguments; out: its own results. transformers checks and
prepares everything, on the host; only its loop is replaced, by the door that it has for that (`custom_generate`)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from transformers.generation import GenerationMode
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.utils import ModelOutput

from ttpu_torch_xla.adapter import Adapter, current
from ttpu_torch_xla.generation.cache import unknown_layers
from ttpu_torch_xla.generation.loop import Decoding
from ttpu_torch_xla.generation.placement import placement_of

TEXT = frozenset({"input_ids", "attention_mask", "position_ids", "use_cache", "logits_to_keep"})
"""Inputs of the model that our loop understands; where others are given, transformers' own loop runs."""

NONE_IF_ZERO = frozenset({"token_type_ids", "mm_token_type_ids"})
"""Inputs that say which tokens are of a picture; processors give them for mere text too, where they are zero."""

CALL = frozenset(
    {
        "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus", "assistant_model",
        "streamer", "negative_prompt_ids", "negative_prompt_attention_mask", "custom_generate", "tokenizer",
        "assistant_tokenizer", "trust_remote_code",
    }
)  # fmt: skip
"""Arguments of `generate` itself, which reach neither the generation config nor the model."""

_warned: set[str] = set()


def install(model: Any, adapter: Adapter | None = None) -> None:
    """Replace `model.generate`, for this instance only, by one that compiles two programs for a whole generation.

    The same arguments give the same results, except that

    - sampling on the device draws other tokens than transformers does for the same seed (of the same distribution;
      `torch.manual_seed` repeats them, on any device);
    - `past_key_values` of an output object is None.

    Where the loop cannot serve, as with beams, an assistant, pictures, or a cache of the caller's, transformers' own
    loop runs after one warning: correct, but it compiles for nearly every token.

    Args:
        model: a stock causal language model on the adapter's device.
        adapter: the runtime; this process's by default.
    """
    model.generate = MethodType(_Generate(adapter or current()), model)


@dataclass(frozen=True)
class _Generate:
    """What `install` binds to a model; a copy of the model has it bound to the copy."""

    adapter: Adapter

    def __call__(self, model: Any, inputs: Any = None, generation_config: Any = None, **kwargs: Any) -> Any:
        home = _home(model, inputs, kwargs)
        inputs, kwargs = _on_host(inputs), {name: _on_host(value) for name, value in kwargs.items()}
        for name in NONE_IF_ZERO & kwargs.keys():
            if isinstance(kwargs[name], torch.Tensor) and not kwargs[name].any():
                del kwargs[name]
        own = {name: value for name, value in kwargs.items() if name not in CALL}
        config, model_inputs = model._prepare_generation_config(generation_config, **own)
        reason = _needs_stock(model, config, model_inputs, kwargs)
        if reason is None:
            kwargs |= _stop_strings(config, kwargs) | {"custom_generate": self._loop(kwargs.get("streamer"))}
        else:
            _warn_once(type(model).__name__, reason)
        return _moved(type(model).generate(model, inputs, generation_config, **kwargs), home)

    def _loop(self, streamer: Any) -> Callable[..., Any]:
        """What transformers calls in the place of its own loop."""

        def decode(
            model: Any,
            input_ids: torch.Tensor,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: Any,
            **model_kwargs: Any,
        ) -> Any:
            return Decoding(
                model,
                self.adapter,
                input_ids.cpu(),
                logits_processor,
                stopping_criteria,
                generation_config,
                attention_mask=_on_host(model_kwargs.get("attention_mask")),
                position_ids=_on_host(model_kwargs.get("position_ids")),
                streamer=streamer,
                placement=placement_of(model),
                **{name: model_kwargs[name] for name in ("logits_to_keep",) if name in model_kwargs},
            ).run()

        return decode


def _needs_stock(model: Any, config: Any, model_inputs: Mapping[str, Any], kwargs: Mapping[str, Any]) -> str | None:
    """Why our loop cannot serve a call, or None."""
    if kwargs.get("custom_generate") is not None:
        return "a custom_generate"
    mode = config.get_generation_mode(kwargs.get("assistant_model"))
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        return f"the generation mode {mode.value}"
    if config.guidance_scale not in (None, 1, 1.0):
        return f"guidance_scale={config.guidance_scale}"
    if config.cache_implementation not in (None, "dynamic", "static"):
        return f"cache_implementation={config.cache_implementation!r}"
    others = sorted(name for name, value in model_inputs.items() if value is not None and name not in TEXT)
    if others:
        return f"the input {others[0]}"
    layers = unknown_layers(model.config)
    return f"layers of type {layers[0]}" if layers else None


def _stop_strings(config: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Changed arguments, where strings end a sequence: transformers makes no criterion of them for a loop that is not
    its own, as it drops the tokenizer before."""
    tokenizer = kwargs.get("tokenizer")
    if not config.stop_strings or tokenizer is None:
        return {}
    criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
    criteria.append(StopStringCriteria(stop_strings=config.stop_strings, tokenizer=tokenizer))
    return {"stopping_criteria": criteria, "stop_strings": None}


def _home(model: Any, inputs: Any, kwargs: Mapping[str, Any]) -> torch.device:
    """Where the caller's prompt is, and so the results."""
    for value in (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds")):
        if isinstance(value, torch.Tensor):
            return value.device
    device: torch.device = model.device
    return device


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _moved(result: Any, device: torch.device) -> Any:
    """A tensor, or the tensors of an output object, on a device."""
    if isinstance(result, torch.Tensor):
        return result.to(device)
    if isinstance(result, tuple):
        return tuple(_moved(one, device) for one in result)
    if isinstance(result, ModelOutput):
        for name, value in list(result.items()):
            result[name] = _moved(value, device)
    return result


def _warn_once(kind: str, reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(
            f"{kind}.generate was called with {reason}, which the compiled decoding loop does not serve: transformers' "
            "own loop runs, and compiles a program for nearly every token.",
            UserWarning,
            stacklevel=3,
        )
