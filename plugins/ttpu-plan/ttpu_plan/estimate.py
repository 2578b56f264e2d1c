"""Predicted memory and time of a plan's program on each device. """

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on one device at the program's peak.

    Args:
        weights: the program's input weights.
        gradients: gradients of the layers finished by then, in the activations' dtype.
        optimizer: two moments in float32.
        cache: keys, values and the states of other mixers.
        activations: activations of one layer, and in training the activations saved for all layers.
        logits: logits of the last tokens; in training, of one chunk of the tokens, with the head's gradient.
        temporaries: weights converted to another dtype or gathered from other devices, and the program's own
            buffers.
        sampling: what an engine keeps on the device beside a step's program: sampling state, the results of the step
            before, and what the sampler's program takes beyond the step's.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    cache: int = 0
    activations: int = 0
    logits: int = 0
    temporaries: int = 0
    sampling: int = 0

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(asdict(self).values())

    @property
    def of_program(self) -> int:
        """Memory of the program alone, which a compiler can confirm."""
        return self.total - self.sampling

    def parts(self) -> dict[str, int]:
        """The non-zero parts by name."""
        return {name: size for name, size in asdict(self).items() if size}


@dataclass(frozen=True, slots=True)
class TimeEstimate:
    """Seconds of one execution; all devices work at the same time. `compute`, `hbm`, `ici`, `dcn` and `host` (the bus
    to the host's memory) are the times of each resource alone. `seconds` is less than their sum, because they overlap.
    """

    compute: float
    hbm: float
    ici: float
    dcn: float
    seconds: float
    host: float = 0.0  # plans that were saved before have none

    @property
    def bound(self) -> str:
        """The resource that takes longest: compute, hbm, ici, dcn or host."""
        return max(("compute", "hbm", "ici", "dcn", "host"), key=lambda name: getattr(self, name))
