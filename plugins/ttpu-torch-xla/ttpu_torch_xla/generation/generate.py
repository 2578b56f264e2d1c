"""`generate` of a prepared model. In: transformers' own arguments; out: its own results. transformers checks and
prepares everything, on the host; only its loop is replaced, by the door that it has for that (`custom_generate`)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from transformers.generation import GenerationMode
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.utils import ModelOutput

from ttpu_core.errors import RequestError, UnsupportedError
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

OURS = "_ttpu_generate"
"""The attribute of an instance that its class's `generate` looks for."""

_warned: set[str] = set()


def install(model: Any, adapter: Adapter | None = None) -> None:
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
        model: a stock causal language model on the adapter's device.
        adapter: the runtime; this process's by default.
    """
    _look_for_ours(type(model))
    setattr(model, OURS, _Generate(adapter or current()))


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

    adapter: Adapter

    def __deepcopy__(self, memo: dict[int, Any]) -> _Generate:
        return self

    def __call__(
        self, model: Any, stock: Callable[..., Any], inputs: Any = None, generation_config: Any = None, **kwargs: Any
    ) -> Any:
        """`stock` is the class's own `generate`, to be called with the model first."""
        if model.device.type != self.adapter.device().type:
            return stock(model, inputs, generation_config, **kwargs)
        if model.training and getattr(model, "is_gradient_checkpointing", False):
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
        _refuse(config)
        reason = _needs_stock(model, config, model_inputs, kwargs)
        if reason is None:
            kwargs |= _stop_strings(config, kwargs) | {"custom_generate": self._loop(kwargs.get("streamer"))}
        else:
            _warn_once(type(model).__name__, reason)
            # On the host some of transformers' loops would join tensors of the host with the model's.
            inputs = _on(inputs, model.device)
            kwargs = {name: _on(value, model.device) for name, value in kwargs.items()}
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


def _refuse(config: Any) -> None:
    """What neither our loop nor transformers' own can do with tensors of torch_xla.

    Raises:
        UnsupportedError: always naming the argument, which the checkpoint's generation config may have given.
    """
    if config.prompt_lookup_num_tokens is not None:
        raise UnsupportedError(
            f"prompt_lookup_num_tokens={config.prompt_lookup_num_tokens} was asked for, but transformers' search for "
            "candidates in the prompt does not run on an XLA device: leave it out."
        )
    if str(config.cache_implementation).startswith("offloaded"):
        raise UnsupportedError(
            f"cache_implementation={config.cache_implementation!r} was asked for, but transformers offloads keys and "
            "values by CUDA streams, which an XLA device has not: leave it out."
        )


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


def _warn_once(kind: str, reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(
            f"{kind}.generate was called with {reason}, which the compiled decoding loop does not serve: transformers' "
            "own loop runs, and compiles a program for nearly every token.",
            UserWarning,
            stacklevel=5,
        )
