"""What a program of a plan is predicted to take on each device: memory and time. A planner computes it."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on one device at the program's peak.

    Args:
        weights: as the program is given them.
        gradients: of the layers done by then, in the activations' dtype.
        optimizer: two moments in float32.
        cache: keys, values and the states of other mixers.
        activations: what a layer has at once, and in training what is kept of all layers.
        logits: of the last tokens; in training of one part of the tokens, with the head's gradient.
        temporaries: weights in another dtype or gathered from other devices, and the program's own.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    cache: int = 0
    activations: int = 0
    logits: int = 0
    temporaries: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(asdict(self).values())

    def parts(self) -> dict[str, int]:
        """By name, what there is none of left out."""
        return {name: size for name, size in asdict(self).items() if size}


@dataclass(frozen=True, slots=True)
class TimeEstimate:
    """Seconds of one execution on every device at once. The first four are each resource's own time; `seconds` is less
    than their sum, because they overlap. `bound` is the resource that takes longest."""

    compute: float
    hbm: float
    ici: float
    dcn: float
    seconds: float

    @property
    def bound(self) -> str:
        """compute, hbm, ici or dcn."""
        return max(("compute", "hbm", "ici", "dcn"), key=lambda name: getattr(self, name))
