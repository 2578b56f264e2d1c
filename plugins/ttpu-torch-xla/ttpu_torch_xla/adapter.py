"""What the backend asks of the runtime that puts torch tensors on a TPU: a device, a mesh, cuts, and counters of what
it did. `TorchXla` answers for torch_xla; another runtime is added by another class with these methods."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any, Protocol

import torch

from ttpu_core.errors import MissingDependencyError, UnsupportedError
from ttpu_core.sharding.links import slice_axes
from ttpu_torch_xla.distributed import after_start, before_start

Cut = tuple[str, ...] | str | None
"""The mesh axes that cut one dimension of a tensor; None or () where it is whole on every device."""


@dataclass(frozen=True)
class Counters:
    """What the runtime did since the last reset: programs compiled and run, wall-clock seconds of compiling, and
    operations that it had no TPU version of, so that they ran on the host (`aten::name` → times)."""

    compiles: int = 0
    executions: int = 0
    compile_seconds: float = 0.0
    fallbacks: Mapping[str, int] = field(default_factory=dict)


class Adapter(Protocol):
    """A runtime for torch tensors on TPUs."""

    name: str

    def device(self) -> torch.device:
        """Where the model's tensors live: one device, or all of them as one once `use_spmd` was called."""
        ...

    def platform(self) -> str:
        """tpu, cpu, or what else the runtime drives."""
        ...

    def num_devices(self) -> int:
        """Devices over which one program may be cut, those of other processes included."""
        ...

    def chip(self) -> str | None:
        """The generation of TPU, as its maker or Google Cloud names it ("v5litepod-8"); None elsewhere."""
        ...

    def num_slices(self) -> int:
        """Slices that the devices are of."""
        ...

    def process(self) -> tuple[int, int]:
        """The number of this process, and how many there are."""
        ...

    def is_spmd(self) -> bool:
        """Whether one program runs on all devices."""
        ...

    def use_spmd(self) -> None:
        """From now on one program runs on all devices; must come before the first tensor is put on one."""
        ...

    def mesh(self, sizes: Mapping[str, int], dcn: Mapping[str, int] | None = None) -> Any:
        """The runtime's mesh of these axes, made the global one; `dcn` says how much of an axis lies between slices."""
        ...

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the host on the device."""
        ...

    def shard(self, tensor: torch.Tensor, mesh: Any, cut: tuple[Cut, ...]) -> None:
        """Cut a tensor along mesh axes, one entry per dimension."""
        ...

    def sharding_of(self, tensor: torch.Tensor) -> str:
        """How a tensor is cut, as XLA writes it; empty where it is not."""
        ...

    def barrier(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep the compiler from merging what is computed from these tensors hereafter with what was before."""
        ...

    def differentiates(self) -> bool:
        """Whether torch can run a backward pass on the device in this process."""
        ...

    def random_state(self) -> int:
        """The state of the device's random numbers."""
        ...

    def use_random_state(self, state: int) -> AbstractContextManager[None]:
        """Draw from this state inside, and go on as if nothing had been drawn behind it."""
        ...

    def sync(self, wait: bool = False) -> None:
        """Run what was recorded so far."""
        ...

    def counters(self) -> Counters:
        """What was done since `reset_counters`."""
        ...

    def reset_counters(self) -> None:
        """Count from zero."""
        ...


class TorchXla:
    """torch_xla: operations are recorded lazily and compiled by XLA when something asks for their values."""

    name = "torch_xla"

    def __init__(self) -> None:
        # What torch_xla does by itself where there is no TPU, less its warning: the CPU runs the same programs.
        if not os.environ.get("PJRT_DEVICE") and not _has_tpu():
            os.environ["PJRT_DEVICE"] = "CPU"
        try:
            import torch_xla
        except ImportError as error:
            reason = " ".join(str(error).split())[:160]
            raise MissingDependencyError(
                f"the torch_xla backend was asked for, but torch_xla cannot be imported ({reason}): "
                '`pip install "ttpu-core[torch-xla]"` brings torch 2.9 and the torch_xla 2.9 that was built for it.'
            ) from error
        self._xla = torch_xla
        self._runtime = torch_xla.runtime

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """A model that is saved whole refers to the runtime of the process that opens it."""
        return current, ()

    def device(self) -> torch.device:
        """The XLA device; asking for it starts the runtime."""
        device: torch.device = self._xla.device()
        return device

    def platform(self) -> str:
        """tpu or cpu."""
        return str(self._runtime.device_type() or "cpu").lower()

    def num_devices(self) -> int:
        """Devices in all; several CPU devices are simulated by the environment variable CPU_NUM_DEVICES."""
        return int(self._runtime.global_runtime_device_count())

    def chip(self) -> str | None:
        """From the TPU VM's own description of itself."""
        if self.platform() != "tpu":
            return None
        from torch_xla._internal import tpu

        return str(tpu.get_tpu_env()["ACCELERATOR_TYPE"])

    def num_slices(self) -> int:
        """From the attributes of the devices; one where they know of none."""
        return len({each.get("slice_index", 0) for each in self._runtime.global_runtime_device_attributes()})

    def process(self) -> tuple[int, int]:
        """Asking starts the runtime."""
        return int(self._runtime.process_index()), int(self._runtime.process_count())

    def is_spmd(self) -> bool:
        """Whether `use_spmd` was called."""
        return bool(self._runtime.is_spmd())

    def use_spmd(self) -> None:
        """One program over all devices (GSPMD, arXiv 2105.04663)."""
        if not self._runtime.is_spmd():
            self._runtime.use_spmd()

    def mesh(self, sizes: Mapping[str, int], dcn: Mapping[str, int] | None = None) -> Any:
        """An `xs.Mesh`, or a `HybridMesh` where slices are joined.

        Raises:
            UnsupportedError: the mesh has not as many devices as there are (every device runs the program), or is of
                another number of slices.
        """
        import numpy as np
        import torch_xla.distributed.spmd as xs

        self.use_spmd()
        there = self.num_devices()
        if prod(sizes.values()) != there:
            raise UnsupportedError(
                f"a mesh of {prod(sizes.values())} devices ({', '.join(f'{a}={n}' for a, n in sizes.items())}) was "
                f"asked for, but torch_xla runs its program on all {there} devices that there are: use all of them (on "
                "a CPU, CPU_NUM_DEVICES says how many are simulated)."
            )
        names, slices = tuple(sizes), self.num_slices()
        if slices > 1 and not dcn:
            dcn = slice_axes(sizes, slices)
        between = tuple((dcn or {}).get(axis, 1) for axis in names)
        inside = tuple(size // outer for size, outer in zip(sizes.values(), between, strict=True))
        mesh: xs.Mesh
        if prod(between) > 1 and slices > 1:
            if prod(between) != slices:
                raise UnsupportedError(
                    f"a mesh over {prod(between)} slices was asked for, but the devices are of {slices}: write as many "
                    "slices as there are behind 'dcn.', or leave that out."
                )
            mesh = xs.HybridMesh(ici_mesh_shape=inside, dcn_mesh_shape=between, axis_names=names)
        else:  # devices that know no slices, such as a CPU's, are taken to be of equal ones in their order
            rank = len(names)
            pairs = [place for axis in range(rank) for place in (axis, rank + axis)]
            ids = np.arange(there).reshape(*between, *inside).transpose(pairs).reshape(-1)
            mesh = xs.Mesh(ids, tuple(sizes.values()), names)
        xs.set_global_mesh(mesh)
        return mesh

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy; torch_xla sends the values when a program needs them."""
        return tensor.to(self.device())

    def shard(self, tensor: torch.Tensor, mesh: Any, cut: tuple[Cut, ...]) -> None:
        """`xs.mark_sharding`, which annotates the tensor in place."""
        import torch_xla.distributed.spmd as xs

        spec = tuple(
            None if not axes else axes if isinstance(axes, str) else axes[0] if len(axes) == 1 else axes for axes in cut
        )
        xs.mark_sharding(tensor, mesh, spec)

    def sharding_of(self, tensor: torch.Tensor) -> str:
        """XLA's notation, such as {devices=[4,2]0,1,2,3,4,5,6,7}."""
        return str(self._xla._XLAC._get_xla_sharding_spec(tensor))

    def barrier(self, tensors: Sequence[torch.Tensor]) -> None:
        """XLA's optimization barrier, in place."""
        import torch_xla.core.xla_model as xm

        xm.optimization_barrier_(list(tensors))

    def differentiates(self) -> bool:
        """Torch counts the devices at its first backward pass, and knows of none that start later."""
        one = torch.zeros((), device=self.device(), requires_grad=True)
        try:
            (one * 1).backward()
        except RuntimeError:
            return False
        return True

    def random_state(self) -> int:
        """The seed that the device has reached."""
        import torch_xla.core.xla_model as xm

        return int(xm.get_rng_state())

    @contextmanager
    def use_random_state(self, state: int) -> Iterator[None]:
        """Set and put back."""
        import torch_xla.core.xla_model as xm

        before = self.random_state()
        xm.set_rng_state(state)
        try:
            yield
        finally:
            xm.set_rng_state(before)

    def sync(self, wait: bool = False) -> None:
        """Compile, if these operations were not compiled before, and run what was recorded."""
        self._xla.sync(wait=wait)

    def counters(self) -> Counters:
        """From torch_xla's metrics."""
        import torch_xla.debug.metrics as metrics

        def times(name: str) -> int:
            data = metrics.metric_data(name)
            return 0 if data is None else int(data[0])

        def seconds(name: str) -> float:
            data = metrics.metric_data(name)
            return 0.0 if data is None else float(data[1]) / 1e9

        fallbacks = {name: metrics.counter_value(name) for name in metrics.counter_names() if name.startswith("aten::")}
        return Counters(
            compiles=times("CompileTime"),
            executions=times("ExecuteTime") + times("ExecuteReplicatedTime"),  # on one device, and on all
            compile_seconds=seconds("CompileTime"),
            fallbacks={name: int(n) for name, n in fallbacks.items() if n},
        )

    def reset_counters(self) -> None:
        """Clear torch_xla's metrics."""
        import torch_xla.debug.metrics as metrics

        metrics.clear_all()


@cache
def current() -> Adapter:
    """The adapter of this process, which `ttpu launch` may have made one of several."""
    before_start()
    adapter = TorchXla()
    after_start(adapter.process)
    return adapter


def _has_tpu() -> bool:
    """Whether a TPU's device files are there."""
    from pathlib import Path

    return any(Path("/dev").glob("accel*")) or any(Path("/dev").glob("vfio/[0-9]*"))
