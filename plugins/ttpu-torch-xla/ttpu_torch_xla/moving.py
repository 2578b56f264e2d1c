"""Moves a model's tensors to another device, one after another. Shared tensors stay shared, whereas `model.to(device)`
unties tied weights on XLA devices."""

from __future__ import annotations

from collections.abc import Callable

import torch

Put = Callable[[str, torch.Tensor], torch.Tensor]
"""(name, tensor of the host) → the tensor on the device."""


def move(model: torch.nn.Module, put: Put) -> None:
    """Put each parameter and buffer in its place."""
    moved: dict[int, torch.nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in moved:
                value = put(f"{prefix}.{name}".removeprefix("."), parameter.data)
                there = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
                there.__dict__.update(parameter.__dict__)
                moved[id(parameter)] = there
            module._parameters[name] = moved[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = put(f"{prefix}.{name}".removeprefix("."), buffer)
