"""`generate` of a prepared model, with transformers' arguments and results. transformers checks and prepares everything
on the host; its `custom_generate` hook replaces only the decoding loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.utils import ModelOutput

from ttpu_core.errors import RequestError
from ttpu_torch_xla.generation.loop import Decoding
from ttpu_torch_xla.generation.placement import placement_of
from ttpu_torch_xla.generation.stock import EmptySums, inputs_device, needs_stock, refuse_offloading, warn_once
from ttpu_torch_xla.runtime import TorchRuntime, current

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

OURS = "_ttpu_generate"
"""The attribute of an instance that its class's `generate` looks for."""


def install(model: Any, runtime: TorchRuntime | None = None) -> None:
    """Replace `model.generate`, for this instance only, by one that compiles two programs for a whole generation.

    The same arguments give the same results, except that

    - sampling on the device draws other tokens than transformers does for the same seed (of the same distribution;
      `torch.manual_seed` repeats them, on any device);
    - `past_key_values` of an output object is None.

    Where the loop cannot serve, as with beams, an assistant, pictures, or a cache of the caller's, transformers' own
    loop runs after one warning: correct, but it compiles for nearly every token. A model that was moved to another
    device generates there as the stock one does.

    A method bound on the instance would be a cycle of references, and the model's memory on the device would be freed
    only by a garbage collection; so the class gets a `generate` that looks for this attribute of its instances, and
    those without it go straight through.

    Args:
        model: a stock causal language model on the runtime's device.
        runtime: the runtime; this process's by default.
    """
    _look_for_ours(type(model))
    setattr(model, OURS, _Generate(runtime or current()))


def uninstall(model: Any) -> None:
    """Give a model transformers' own `generate` back."""
    if hasattr(model, OURS):
        delattr(model, OURS)


def _look_for_ours(kind: Any) -> None:
    """Have `generate` of a class look for an instance's own; once, also where a class above it does already."""
    stock = kind.generate
    if getattr(stock, "looks_for_ours", False):
        return

    @wraps(stock)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = vars(self).get(OURS)
        return stock(self, *args, **kwargs) if ours is None else ours(self, stock, *args, **kwargs)

    generate.looks_for_ours = True  # type: ignore[attr-defined]
    kind.generate = generate


@dataclass(frozen=True)
class _Generate:
    """What `install` gives a model, and what its copies share."""

    runtime: TorchRuntime

    def __deepcopy__(self, memo: dict[int, Any]) -> _Generate:
        return self

    def __call__(
        self, model: Any, stock: Callable[..., Any], inputs: Any = None, generation_config: Any = None, **kwargs: Any
    ) -> Any:
        """`stock` is the class's own `generate`, to be called with the model first."""
        if model.device.type != self.runtime.device_type:
            return stock(model, inputs, generation_config, **kwargs)
        if model.training and any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
            raise RequestError(
                "generate was called while the model is in training mode with gradient checkpointing, in which "
                "transformers' layers keep no keys and values: call model.eval() first, and model.train() afterwards."
            )
        # torch_xla cannot run in inference mode, which spares little that no_grad does not.
        with torch.inference_mode(False), torch.no_grad():
            return self._on_device(model, stock, inputs, generation_config, kwargs)

    def _on_device(
        self, model: Any, stock: Callable[..., Any], inputs: Any, generation_config: Any, kwargs: dict[str, Any]
    ) -> Any:
        home = _home(model, inputs, kwargs)
        inputs, kwargs = _on_host(inputs), {name: _on_host(value) for name, value in kwargs.items()}
        for name in NONE_IF_ZERO & kwargs.keys():
            if isinstance(kwargs[name], torch.Tensor) and not kwargs[name].any():
                del kwargs[name]
        own = {name: value for name, value in kwargs.items() if name not in CALL}
        config, model_inputs = model._prepare_generation_config(generation_config, **own)
        refuse_offloading(config)
        reason = needs_stock(model, config, model_inputs, kwargs)
        if reason is None:
            kwargs |= _stop_strings(config, kwargs) | {"custom_generate": self._loop(kwargs.get("streamer"))}
            return _moved(stock(model, inputs, generation_config, **kwargs), home)
        warn_once(type(model).__name__, reason)
        device = inputs_device(model, config)
        inputs, kwargs = _on(inputs, device), {name: _on(value, device) for name, value in kwargs.items()}
        with EmptySums():
            return _moved(stock(model, inputs, generation_config, **kwargs), home)

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
                self.runtime,
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
    """A tensor on the host, and an ordinary one also where the caller made it in inference mode."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.cpu()
    return value.clone() if value.is_inference() else value


def _on(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


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
