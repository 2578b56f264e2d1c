"""`save_pretrained` for a model on XLA devices. In: a stock model; out: the same model, which writes a checkpoint that
transformers loads: safetensors can write tensors of the host only, and whole ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def install(model: Any) -> None:
    """Replace the instance's `save_pretrained`; same arguments as transformers' own."""
    original = model.save_pretrained

    def save_pretrained(
        save_directory: Any, *args: Any, state_dict: Mapping[str, torch.Tensor] | None = None, **options: Any
    ) -> Any:
        held = model.state_dict(keep_vars=True) if state_dict is None else state_dict
        return original(save_directory, *args, state_dict=on_host(held), **options)

    model.save_pretrained = save_pretrained


def on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as whole ones of the host; those that share their values still do."""
    moved: dict[int, torch.Tensor] = {}
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.device.type == "cpu":
            result[name] = tensor
            continue
        if id(tensor) not in moved:
            moved[id(tensor)] = tensor.detach().cpu().contiguous()
        result[name] = moved[id(tensor)]
    return result
