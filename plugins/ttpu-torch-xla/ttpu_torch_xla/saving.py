"""Patches transformers' `save_pretrained` for models on the device, because safetensors can only write whole tensors on
the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch

from ttpu_torch_xla.runtime import current, device_type, is_device


def save_pretrained(original: Callable[..., Any]) -> Callable[..., Any]:
    """Run `PreTrainedModel.save_pretrained` with the same arguments, after copying tensors from the runtime's device to
    the host."""

    @wraps(original)
    def save(
        self: Any, save_directory: Any, *args: Any, state_dict: Mapping[str, torch.Tensor] | None = None, **options: Any
    ) -> Any:
        if self.device.type == device_type():
            state_dict = on_host(self.state_dict(keep_vars=True) if state_dict is None else state_dict)
        return original(self, save_directory, *args, state_dict=state_dict, **options)

    return save


save_pretrained.wraps_original = True  # type: ignore[attr-defined]


def find_shared_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    """safetensors' search for tensors that share storage, among those that have any."""

    def find(tensors: Mapping[str, torch.Tensor]) -> Any:
        return original({name: one for name, one in tensors.items() if not is_device(one)})

    return find


find_shared_tensors.wraps_original = True  # type: ignore[attr-defined]


def on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors whole on the host. Tensors that share their values still do."""
    there = {id(tensor): tensor for tensor in tensors.values() if is_device(tensor)}
    moved = dict(zip(there, current().fetch(list(there.values())), strict=True)) if there else {}
    return {name: moved.get(id(tensor), tensor) for name, tensor in tensors.items()}
