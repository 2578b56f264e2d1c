"""The parts of a model. Operations bear the name of their part in the compiler's metadata, so that a report says where
a program's time goes; values and programs are the same with and without."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any

import jax

_MARK = "part="
_FOUND = re.compile(rf"{_MARK}([a-z_]+)")


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
