"""Leaves batches of the host where they are. A loader with `pin_memory=True` would lock their pages for a GPU, and asks
the XLA device for that, which cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def pin_memory(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.utils.data`'s function where there is a GPU; the data [any shape] themselves elsewhere."""

    def pinned(data: Any, device: Any = None) -> Any:
        return original(data, device) if torch.cuda.is_available() else data

    return pinned


pin_memory.wraps_original = True  # type: ignore[attr-defined]
