"""How fast a run is: tokens per second and device, and the share of the devices' peak FLOPs (MFU)."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ttpu_core.spec import ArchitectureSpec
from ttpu_core.spec.arithmetic import attended_tokens, attention_flops, product_flops
from ttpu_core.spec.attention import AttentionSpec

FORWARD_AND_BACKWARD = 3
"""The backward pass multiplies each kernel twice: by the gradient for the inputs, and for the kernel itself."""


def training_flops(spec: ArchitectureSpec, length: int, *, head: bool = True) -> float:
    """FLOPs of one token in an update on rows of `length` tokens: three times those of a forward pass (Kaplan et al.,
    arXiv 2001.08361, table 1, with attention's own products; PaLM, arXiv 2204.02311, appendix B). Tokens attend to
    half of the row on average, or to their window. What is computed again in the backward pass is not counted, nor is
    the lookup of an embedding that is not the head too; `head` says whether logits are computed."""
    looked_up = 0 if spec.head.tied and head else spec.parameters["embed.embedding"].size
    forward = product_flops(spec.num_multiplied_parameters - looked_up, 1)
    for layer in spec.layers:
        if isinstance(layer.mixer, AttentionSpec):
            seen = attended_tokens(layer.mixer, length)
            pairs = seen - seen * (seen - 1) / (2 * length)  # the first tokens of a row see less than a window
            forward += attention_flops(layer.mixer.num_heads, layer.mixer, pairs)
    return FORWARD_AND_BACKWARD * forward


@dataclass
class Meter:
    """Counts tokens between two lines of the log.

    Attributes:
        flops_per_token: of an update; 0 where unknown.
        devices: of all processes.
        peak_flops: of one device, per second; None where unknown.
    """

    flops_per_token: float
    devices: int
    peak_flops: float | None
    tokens: float = 0.0
    updates: int = 0
    began: float = 0.0

    def start(self) -> None:
        """Begin to count."""
        self.tokens, self.updates, self.began = 0.0, 0, time.perf_counter()

    def add(self, tokens: float) -> None:
        """Count an update on this many tokens."""
        self.tokens += tokens
        self.updates += 1

    def figures(self) -> dict[str, float]:
        """Seconds an update, tokens per second and device, and MFU where the peak is known; counting begins anew."""
        seconds = max(time.perf_counter() - self.began, 1e-9)
        rate = self.tokens / seconds / self.devices
        figures = {
            "step_seconds": seconds / max(1, self.updates),
            "tokens_per_second_per_device": rate,
        }
        if self.peak_flops and self.flops_per_token:
            figures["mfu"] = rate * self.flops_per_token / self.peak_flops
        self.start()
        return figures
