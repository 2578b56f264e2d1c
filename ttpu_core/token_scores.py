"""What a model says of the tokens of a text: the value that a backend with the capability `Scores` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class TokenScores:
    """Scores of predicted tokens, each an array [batch, seq] on the host.

    Attributes:
        loss: float32, minus the natural logarithm of the probability of the target.
        is_best: bool, whether the target is the likeliest token.
        divergence: float32, the Kullback-Leibler divergence of the model's next-token distribution from the
            reference's, KL(reference || model), in nats; None without a reference.
        agrees: bool, whether the likeliest token is the reference's; None without a reference.
    """

    loss: Array
    is_best: Array
    divergence: Array | None = None
    agrees: Array | None = None
