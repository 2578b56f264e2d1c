"""The protocol of a runtime that puts torch tensors on a TPU: a device, a mesh, shardings, operations that torch does
not have, and counters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch

from ttpu_torch_xla.patches.patch import Patch

PartitionSpec = tuple[tuple[str, ...] | str | None, ...]
"""The mesh axes that shard each dimension of a tensor; None or () for one that is whole on every device."""

JaxOperation = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""A program of JAX as an operation on tensors of the device."""

Step = Callable[[list[torch.Tensor], dict[str, torch.Tensor]], tuple[list[torch.Tensor], None]]
"""One turn of a loop: (carry, the turn's part of what is stacked) → (carry, None)."""


@dataclass(frozen=True)
class Counters:
    """Counts since the last reset: programs compiled and run, wall-clock seconds of compiling, and operations without a
    TPU version, which ran on the host (`aten::name` → times)."""

    compiles: int = 0
    executions: int = 0
    compile_seconds: float = 0.0
    fallbacks: Mapping[str, int] = field(default_factory=dict)


class TorchRuntime(Protocol):
    """A runtime for torch tensors on TPUs.

    Attributes:
        name: of the runtime, as its entry point is called.
        device_type: `torch.device.type` of its tensors; known before anything is started.
        packages: top-level packages whose code is the runtime's own, and not the model's.
        patches: of the runtime's own library.
    """

    name: ClassVar[str]
    device_type: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]
    patches: ClassVar[tuple[Patch, ...]]

    @classmethod
    def start(cls) -> TorchRuntime:
        """The runtime of this process, which `ttpu launch` may have made one of several.

        Raises:
            MissingDependencyError: its library cannot be imported.
        """
        ...

    # Devices

    def device(self) -> torch.device:
        """The device of the model's tensors: one device, or all of them as one once `use_spmd` was called."""
        ...

    def platform(self) -> str:
        """tpu, cpu, or what else the runtime drives."""
        ...

    def device_kind(self) -> str:
        """The device's own name of its kind, as in `jax.Device.device_kind`: "TPU v5 lite"."""
        ...

    def num_devices(self) -> int:
        """Devices over which one program may be sharded, those of other processes included."""
        ...

    def chip(self) -> str | None:
        """The name of the TPU's chip in `ttpu_core.sharding.hardware` ("v5e"); None elsewhere."""
        ...

    def num_slices(self) -> int:
        """The number of slices that the devices belong to."""
        ...

    def process(self) -> tuple[int, int]:
        """The number of this process, and how many there are."""
        ...

    # Placement

    def is_spmd(self) -> bool:
        """Whether one program runs on all devices."""
        ...

    def use_spmd(self) -> None:
        """Run one program on all devices from now on. It must be called before the first tensor is put on a device."""
        ...

    def mesh(self, sizes: Mapping[str, int], dcn: Mapping[str, int] | None = None) -> Any:
        """The runtime's mesh of these axes, made the global one; `dcn` says how much of an axis lies between slices."""
        ...

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Move a tensor of any shape from the host to the device; the result has the same shape."""
        ...

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy whole tensors of any shapes to the host, in their order, without a program for each."""
        ...

    def shard(self, tensor: torch.Tensor, mesh: Any, partition_spec: PartitionSpec) -> None:
        """Shard a tensor of any shape along mesh axes."""
        ...

    def sharding_of(self, tensor: torch.Tensor) -> str:
        """Return the sharding of a tensor of any shape in XLA's notation; empty where it is not sharded."""
        ...

    def wrap_fsdp(self, layers: torch.nn.ModuleList, mesh: Any) -> None:
        """Wrap each layer, in place, so that the gradients of its sharded parameters are exchanged layer by layer."""
        ...

    # Operations

    def barrier(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the same tensors behind a barrier: the compiler does not merge computations after it with those
        before. Callers must use the returned tensors only."""
        ...

    def dot(
        self, x: torch.Tensor, w: torch.Tensor, contracted: tuple[Sequence[int], Sequence[int]], sums: torch.dtype
    ) -> torch.Tensor:
        """The product [..., n] of x [..., k] and w [k, n], or of what else is contracted over these dimensions of each,
        summed in the dtype `sums`."""
        ...

    def jax_operation(self, name: str, hlo_module: bytes) -> JaxOperation:
        """An operation from a serialized HLO module that JAX lowered, whose results are a tuple."""
        ...

    def scan(
        self, step: Step, carry: list[torch.Tensor], stacked: dict[str, torch.Tensor], *, recompute: bool
    ) -> list[torch.Tensor]:
        """The carry after one loop over the first dimension of all stacked tensors, with gradients.

        `recompute` says that a turn keeps little for the backward pass and computes the rest again."""
        ...

    # Training

    def differentiates(self) -> bool:
        """Whether torch can run a backward pass on the device in this process."""
        ...

    def random_state(self) -> int:
        """The state of the device's random numbers."""
        ...

    def use_random_state(self, state: int) -> AbstractContextManager[None]:
        """A context that draws random numbers from this state and restores the previous state at its end."""
        ...

    # Execution

    def sync(self, wait: bool = False) -> None:
        """Run the operations recorded so far."""
        ...

    def counters(self) -> Counters:
        """Return the counters since `reset_counters`."""
        ...

    def reset_counters(self) -> None:
        """Reset the counters to zero."""
        ...
