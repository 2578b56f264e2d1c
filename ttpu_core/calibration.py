"""What the inputs of a layer's products are like on a text: the values that a backend with the capability `Calibrates`
returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class InputStatistics:
    """Sums over the tokens that reach a kernel; `lead` is [experts] for experts, each with its own tokens, else [].

    Attributes:
        tokens: [*lead], how many there were.
        products: float32 [*lead, in, in], the sum of x xᵀ.
        magnitude: float32 [*lead, in], the sum of |x|.
        largest: float32 [*lead, in], the largest |x|. Where a device mesh shards tokens among the devices of an expert,
            the sum of the devices' largest.
    """

    tokens: Array
    products: Array
    magnitude: Array
    largest: Array
