"""The memory that a training step holds for each parameter, the activations that it recomputes, and the settings of a
run that decide both. Backends' training steps, the trainer and the planner read these definitions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from ttpu_core.errors import RequestError
from ttpu_core.sharding.parallelism import Parallelism
from ttpu_core.sharding.shares import TILE_ROWS
from ttpu_core.spec.arithmetic import BITS

Optimizer = Literal["adamw", "adamw_8bit", "adafactor", "lion", "muon", "sgd"]
WITH_MOMENTUM: tuple[Optimizer, ...] = ("sgd", "muon")
"""Optimizers that have a momentum."""
Recomputation = Literal["full", "attention", "gate", "dots", "mlp", "none"]
Remat = Literal["auto", "full", "attention", "gate", "dots", "mlp", "none"]

REMATS: tuple[Recomputation, ...] = ("full", "attention", "gate", "dots", "mlp", "none")
"""What the backward pass computes again, the most first: all of a layer but its input; less the activations that
`SAVED` names; all but the products of weights (dots), attention's kernel among it; or nothing."""

ATTENTION, GATE, UP = "attention", "gate", "up"
"""Names of activations: the products of attention's projections, attention's result before the last of them and the
softmax statistics of its kernel; and the two products that a dense MLP begins with (a plain MLP has `UP` alone)."""

SAVED: Mapping[str, tuple[str, ...]] = {
    "attention": (ATTENTION,),
    "gate": (ATTENTION, GATE),
    "mlp": (ATTENTION, GATE, UP),
}
"""Remat → the names of what it keeps beside a layer's input."""


@dataclass(frozen=True, slots=True)
class TrainingState:
    """The usual setting is AdamW in float32: 16 bytes a parameter with the gradient that the optimizer is given.

    Args:
        master_dtype: of the weights that the optimizer updates; the model computes in the workload's dtype.
        moments: arrays of a parameter's shape that the optimizer keeps.
        moment_dtype: of the moments.
        gradient_dtype: of the gradients as the optimizer is given them.
        loss_tokens: tokens of a row whose logits exist at once: those of 4,096 tokens and 262,144 words take 4 GiB.
    """

    master_dtype: str = "float32"
    moments: int = 2
    moment_dtype: str = "float32"
    gradient_dtype: str = "float32"
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


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """What the memory of an update depends on beside the model, the mesh and the rows. The fields are those of
    `ttpu_train.arguments.TrainingArguments` with these names.

    Args:
        optim: the optimizer.
        momentum: of sgd; without it sgd keeps no state.
        gradient_accumulation_steps: parts that an update is computed in, one after the other.
        remat: what the backward pass computes again, one of `REMATS`; auto is the least that fits where memory is
            known, else full.
        zero_stage: what is divided over the devices that rows are divided over: 1 the optimizer's state, 2 gradients
            too, 3 weights too, 0 nothing; None is 3 on a mesh with an axis fsdp or expert, else 0.
        offload_optimizer: the optimizer's state lies in the host's memory.

    Raises:
        RequestError: a value out of range.
    """

    optim: str = "adamw"
    momentum: float = 0.0
    gradient_accumulation_steps: int = 1
    remat: str = "full"
    zero_stage: int | None = None
    offload_optimizer: bool = False

    def __post_init__(self) -> None:
        parts = self.gradient_accumulation_steps
        for name, value, holds, allowed in (
            ("optim", self.optim, self.optim in get_args(Optimizer), f"one of {', '.join(get_args(Optimizer))}"),
            ("momentum", self.momentum, 0 <= self.momentum < 1, "from 0 to below 1"),
            ("gradient_accumulation_steps", parts, isinstance(parts, int) and parts >= 1, "1 or more"),
            ("remat", self.remat, self.remat in get_args(Remat), f"one of {', '.join(get_args(Remat))}"),
            ("zero_stage", self.zero_stage, self.zero_stage in (None, 0, 1, 2, 3), "0, 1, 2, 3 or None"),
        ):
            if not holds:
                raise RequestError(
                    f"{name} {value!r} of a training step was asked for, but it is {allowed}: correct it."
                )
        if self.offload_optimizer and self.optim not in ELEMENTWISE:
            raise RequestError(
                f"offload_optimizer was asked for with optim={self.optim!r}, but only the state of "
                f"{', '.join(ELEMENTWISE)} can be brought to the devices layer by layer: use one of these, or leave "
                "offload_optimizer out."
            )


ELEMENTWISE = ("adamw", "lion", "sgd")
"""Optimizers that update each number by itself, so that padding changes nothing for the others."""


@dataclass(frozen=True, slots=True)
class PlannedUpdate:
    """What a plan says of the update that it was made for.

    Args:
        topology: name of the slices.
        parallelism: the mesh.
        rows: of an update, of all devices and parts.
        length: tokens of a row.
        settings: of the run; `zero_stage` is a number.
    """

    topology: str
    parallelism: Parallelism
    rows: int
    length: int
    settings: UpdateSettings


def fits_over(features: int, rows: int, tokens: int) -> bool:
    """Whether the gradients of a kernel [features, width] fit over activations [rows, tokens, width] of a device, an
    equal part over each row, in whole tiles."""
    each, left = divmod(features, rows)
    return not left and each % TILE_ROWS == 0 and each <= tokens
