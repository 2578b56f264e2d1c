"""Replaces transformers' `is_tracing` by one that is also true for tensors on the device. Mask code then never reads
the values of a lazy tensor, which would compile and run everything recorded so far."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ttpu_torch_xla.runtime import is_device


def is_tracing(original: Callable[..., bool]) -> Callable[..., bool]:
    """`original(tensor)`, or whether the tensor is lazy."""

    def traced(tensor: Any = None) -> bool:
        return original(tensor) or (isinstance(tensor, torch.Tensor) and is_device(tensor))

    return traced


is_tracing.wraps_original = True  # type: ignore[attr-defined]
