"""Compares logits. Errors are shares of the reference's scale, its largest absolute value; this module also derives
their tolerances."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ttpu_conformance.errors import fail

FLOAT32 = 2e-5
"""Of the logits' scale. float32 rounds by 6e-8; a tiny model adds some 10**4 products one after another, in another
order than the reference, whose roundings add up like a random walk to 6e-6. What is found is near 1e-6, and 9e-6 for
gemma4, whose reference is 8e-6 from its own float64 logits; the smallest mistakes in an architecture (the other gelu,
an epsilon) give 1e-4 and more."""

BFLOAT16_SHARE = 1.5
"""Our error in bfloat16 over transformers' own: the same products in another order and fusion round differently, but
not systematically worse."""

BFLOAT16_FLOOR = 1e-3
"""Of the logits' scale: a quarter of bfloat16's rounding step (2**-8), for references that happen to round well."""


@dataclass(frozen=True)
class Measured:
    """The measurement of a check: the error must not exceed the tolerance. `details` are plain values for the report.
    """

    error: float | None = None
    tolerance: float | None = None
    note: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the largest difference as a share of the reference's scale; infinite where our logits are not finite.

    Args:
        ours: [batch, seq, vocab].
        theirs: [batch, seq, vocab], the reference.

    Raises:
        CheckFailure: the shapes differ.
    """
    if ours.shape != theirs.shape:
        fail(f"our logits have the shape {ours.shape}, but the reference's have {theirs.shape}.")
    if not np.isfinite(ours).all():
        return float("inf")
    return float(np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1e-30))


def typical_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the median over tokens of each token's largest difference, as a share of the reference's scale.

    It is a median because in low precision a router may choose another expert for a few tokens, on either side. It is
    infinite where our logits are not finite.

    Args:
        ours: [batch, seq, vocab].
        theirs: [batch, seq, vocab], the reference.
    """
    if not np.isfinite(ours).all():
        return float("inf")
    per_token = np.abs(ours - theirs).max(axis=-1)
    return float(np.median(per_token) / max(np.abs(theirs).max(), 1e-30))


def hold(error: float, tolerance: float, sentence: str) -> Measured:
    """Return the measurement if it is within its tolerance.

    Raises:
        CheckFailure: it is not; the message says what differs.
    """
    if not error <= tolerance:
        fail(
            f"{sentence} by {error:.1e} of their scale, where {tolerance:.1e} is allowed.",
            error=error,
            tolerance=tolerance,
        )
    return Measured(error, tolerance)
