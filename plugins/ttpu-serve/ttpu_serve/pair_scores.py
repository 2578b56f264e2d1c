"""Scores of pairs of texts: the cosine of their embeddings, where the model makes embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ttpu_core.errors import RequestError

NO_CLASSES = (
    "classes were asked for, but this engine computes hidden states and logits of tokens, and no classifier's head, so "
    "that checkpoints of classifiers are not served either: use embeddings with a classifier of your own, or generate "
    "with guided decoding (choice)."
)


def check_embeds(core: Any, pooling: str | None) -> None:
    """Check that embeddings of this model can be compared.

    Args:
        core: the engine's core.
        pooling: what the request says of it; None says nothing.

    Raises:
        RequestError: the model makes text, and no pooling was asked for.
    """
    if pooling is None and not core.embeds:
        raise RequestError(
            "scores were asked for, which are cosines of embeddings here, but this model is no embedding model: its "
            "checkpoint declares no pooling (modules.json), and it is no encoder. Serve one that is, or pass pooling "
            "(last, mean or cls) to compare this model's hidden states."
        )


def paired(first: int, second: int) -> list[tuple[int, int]]:
    """Return which of `first` texts is compared with which of `second`: one with each, or each with its own.

    Raises:
        RequestError: the numbers do not go together.
    """
    if first == second and first:
        return [(index, index) for index in range(first)]
    if first == 1 and second:
        return [(0, index) for index in range(second)]
    raise RequestError(
        f"{first} texts were to be compared with {second}, but one is compared with each of several, or as many with "
        "as many: pass such."
    )


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    """Return the cosine of two embeddings, from -1 to 1.

    Args:
        first: [hidden], of unit length.
        second: [hidden], of unit length.
    """
    return float(np.clip(np.dot(first, second), -1.0, 1.0))


def ranked(scores: Sequence[float], most: int | None) -> list[int]:
    """Return the places of the `most` highest scores (None: of all), the highest first, equal ones in their order."""
    order = sorted(range(len(scores)), key=lambda place: -scores[place])
    return order if not most else order[:most]
