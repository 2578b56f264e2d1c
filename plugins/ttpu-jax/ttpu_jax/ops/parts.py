"""The parts of a model. Operations bear the name of their part in the compiler's metadata, so that a report says where
a program's time goes; values and programs are the same with and without."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any

import jax

_MARK = "part="
_FOUND = re.compile(rf"{_MARK}([a-z_]+)")
_FILLED = re.compile(r"filled=([\d.]+)")


class Part(StrEnum):
    """A part of a model, or of a training step."""

    EMBEDDING = "embedding"
    NORM = "norm"
    PROJECTIONS = "attention_projections"
    ROPE = "rope"
    CACHE = "cache_write"
    ATTENTION = "attention"
    MIXER = "mixer"
    MLP = "mlp"
    EXPERTS = "experts"
    RESIDUAL = "residual"
    HEAD = "head"
    SAMPLING = "sampling"
    LOSS = "loss"
    OPTIMIZER = "optimizer"


OTHER = "other"
OVERFLOW = "overflow"
"""The scope of loops that run only where a buffer is too small for a step's rows. Reports count them as no time."""


def part(name: Part) -> Any:
    """A context manager and decorator: operations in it belong to a part, unless to one within it."""
    return jax.named_scope(f"{_MARK}{name}")


def part_of(operation: str) -> str:
    """The innermost part of an operation's name in the compiler's metadata; `OTHER` where there is none. Operations of
    a backward pass have " (backward)" after it."""
    found = _FOUND.findall(operation)
    if not found:
        return OTHER
    return f"{found[-1]} (backward)" if "transpose(" in operation else str(found[-1])


def filled(share: float) -> Any:
    """A context manager: kernels in it have rows in this share of the room that they have for them, on average. Reports
    count so much of the FLOPs that they state."""
    return jax.named_scope(f"filled={share:.4f}")


def filled_share(operation: str) -> float:
    """The share in an operation's name in the compiler's metadata; 1 where there is none."""
    found = _FILLED.findall(operation)
    return float(found[-1]) if found else 1.0
