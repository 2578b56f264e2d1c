"""The memory that a training step holds for each parameter, and the activations that it recomputes. Backends' training
steps and the planner both read this one definition."""

from __future__ import annotations

from dataclasses import dataclass

from ttpu_core.spec.arithmetic import BITS


@dataclass(frozen=True, slots=True)
class TrainingState:
    """The usual setting is AdamW in float32: 16 bytes a parameter with the gradient.

    Args:
        master_dtype: of the weights that the optimizer updates; the model computes in the workload's dtype.
        moments: arrays of a parameter's shape that the optimizer keeps.
        moment_dtype: of the moments.
        gradient_dtype: of the gradients as the optimizer is given them.
        remat: each layer's activations are computed again for its gradient instead of being kept.
        loss_tokens: tokens of a row whose logits exist at once: those of 4,096 tokens and 262,144 words take 4 GiB.
    """

    master_dtype: str = "float32"
    moments: int = 2
    moment_dtype: str = "float32"
    gradient_dtype: str = "float32"
    remat: bool = True
    loss_tokens: int = 512

    @property
    def held_bytes(self) -> int:
        """The bytes of one parameter between two steps: its master weight and its moments."""
        return (BITS[self.master_dtype] + self.moments * BITS[self.moment_dtype]) // 8

    @property
    def bytes_per_parameter(self) -> int:
        """The bytes of one parameter while the optimizer runs: master weight, moments and gradient."""
        return self.held_bytes + BITS[self.gradient_dtype] // 8


ADAMW = TrainingState()
"""What the training step holds unless it is told otherwise."""
