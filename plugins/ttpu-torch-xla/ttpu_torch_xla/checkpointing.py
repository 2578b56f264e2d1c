"""Activation checkpointing that XLA does not optimize away. The layers of a stock model keep only their inputs for the
backward pass and recompute everything else (Chen et al., arXiv 1604.06174)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from ttpu_core.errors import UnsupportedError
from ttpu_torch_xla.runtime import current, device_type, is_device


def checkpoint_layers(model: Any) -> None:
    """Recompute each decoder layer in the backward pass, while the model is in training mode.

    `model.gradient_checkpointing_enable()` does the same where the backend's patches are applied, and
    `model.gradient_checkpointing_disable()` undoes both.

    Raises:
        UnsupportedError: transformers has no checkpointing for this model.
    """
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise UnsupportedError(
            f"gradient_checkpointing=True was asked for, but transformers does not support it for "
            f"{type(model).__name__}: leave it out."
        )
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=recomputed)
    model.enable_input_require_grads()  # or nothing below frozen embeddings would get a gradient


def checkpoint_or_recompute(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.utils.checkpoint.checkpoint` for tensors elsewhere, `recomputed` for those on the runtime's device."""

    def checkpoint(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if any(isinstance(one, torch.Tensor) and is_device(one) for one in args):
            return recomputed(function, *args)
        return original(function, *args, **options)

    return checkpoint


checkpoint_or_recompute.wraps_original = True  # type: ignore[attr-defined]


def recomputed(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function(*args)` and keep only the arguments for the backward pass.

    torch's own version without re-entry asks for a module `torch.xla`, which there is not, and has no barrier, so that
    XLA would find the second computation equal to the first and keep the first. torch_xla's version runs the function
    without gradients first, which loses those of what layers hand each other by the side (shared keys and values).
    """
    if not torch.is_grad_enabled():
        return function(*args)
    frame = _Frame(function, args)
    with saved_tensors_hooks(frame.keep, frame.fetch):
        return function(*args)


class _Frame:
    """One call of a layer, and what it saves for the backward pass."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._function, self._args = function, args
        self._kept = 0
        self._again: dict[int, torch.Tensor] = {}
        self._random = current().random_state()
        self._autocast: dict[str, Any] = {
            "enabled": torch.is_autocast_enabled(device_type()),
            "dtype": torch.get_autocast_dtype(device_type()),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }

    def keep(self, tensor: torch.Tensor) -> int:
        """In place of a tensor, its number among those that are saved."""
        self._kept += 1
        return self._kept - 1

    def fetch(self, number: int) -> torch.Tensor:
        """The tensor, computed again with all others when the first of them is asked for."""
        if number not in self._again:
            self._recompute()
        return self._again.pop(number)

    def _recompute(self) -> None:
        runtime = current()
        flat, structure = tree_flatten(self._args)
        fresh = iter(runtime.barrier([_copy(one) for one in flat if isinstance(one, torch.Tensor)]))
        args = tree_unflatten([next(fresh) if isinstance(one, torch.Tensor) else one for one in flat], structure)
        self._again.clear()

        def collect(tensor: torch.Tensor) -> None:
            self._again[len(self._again)] = tensor.detach()

        def refuse(_: Any) -> torch.Tensor:
            raise AssertionError("nothing runs backward through the second computation")

        with (
            torch.enable_grad(),
            torch.autocast(device_type(), **self._autocast),
            runtime.use_random_state(self._random),
            saved_tensors_hooks(collect, refuse),
        ):
            self._function(*args)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
