"""The program that torch_xla has recorded for some tensors, and arguments without values. `aot` compiles such programs
for TPUs that need not be there."""

from __future__ import annotations

import torch

Argument = tuple[int, tuple[int, ...]]
"""Which tensor an argument of a program is, and its shape."""


def placeholder(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Make a program argument of the same shape, without values."""
    import torch_xla.core.xla_builder as builder

    tensor: torch.Tensor = builder.create_placeholder_tensor(shape, dtype)
    return tensor


def argument_of(tensor: torch.Tensor) -> int:
    """Return torch_xla's number of an argument, a tensor of any shape."""
    import torch_xla

    return int(torch_xla._XLAC._xla_get_tensor_id(tensor))


def replace_value(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Let `tensor`, of any shape, stand for the value of `value`, of the same shape, from now on, also where autograd
    refers to it."""
    import torch_xla

    torch_xla._XLAC._replace_xla_tensor(tensor, value)


def stablehlo(tensors: list[torch.Tensor]) -> tuple[str, list[Argument]]:
    """The recorded program that computes these tensors, and which tensor each of its arguments is."""
    import torch_xla
    import torch_xla.core.xla_model as model

    text = model.get_stablehlo(tensors)
    identifiers, values = torch_xla._XLAC._get_tensors_xla_device_data_node(tensors)
    return text, [(one, tuple(value.shape)) for one, value in zip(identifiers, values, strict=True)]
