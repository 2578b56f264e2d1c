"""What a norm is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NormKind = Literal["rms", "layer", "none"]


@dataclass(frozen=True)
class NormSpec:
    """A normalisation. Kind "none" leaves its input unchanged.

    `offset` is added to the scale (1 for gemma's `1 + w`). `scale_in_fp32` multiplies by the scale before the cast
    back to the activations' dtype (olmo2, gemma) instead of after it (llama). Where `offset_in_fp32` is false
    the offset is added in the weight's dtype, which rounds the sum (nemotron)."""

    kind: NormKind = "rms"
    eps: float = 1e-6
    scale: bool = True
    bias: bool = False
    offset: float = 0.0
    scale_in_fp32: bool = False
    offset_in_fp32: bool = True
