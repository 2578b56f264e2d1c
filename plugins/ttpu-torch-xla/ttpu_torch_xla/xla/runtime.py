"""torch_xla as a runtime: operations are recorded lazily and compiled by XLA when something asks for their values."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from ttpu_core.errors import MissingDependencyError, UnsupportedError
from ttpu_core.sharding.hardware import chip_named, chip_of_machine
from ttpu_core.sharding.links import slice_axes
from ttpu_core.sharding.rings import arranged
from ttpu_torch_xla.patches.patch import Patch
from ttpu_torch_xla.runtime import Counters, JaxOperation, PartitionSpec, TorchRuntime, current
from ttpu_torch_xla.runtime.protocol import Step
from ttpu_torch_xla.xla.distributed import after_start, before_start
from ttpu_torch_xla.xla.patches import PATCHES


class TorchXla:
    """The entry point `torch_xla` of the group `ttpu.torch_runtimes`; a `TorchRuntime`."""

    name: ClassVar[str] = "torch_xla"
    device_type: ClassVar[str] = "xla"
    packages: ClassVar[tuple[str, ...]] = ("torch_xla",)
    patches: ClassVar[tuple[Patch, ...]] = PATCHES

    @classmethod
    def start(cls) -> TorchXla:
        """Simulated devices and process numbers are those that `ttpu launch` says.

        Raises:
            MissingDependencyError: torch_xla cannot be imported.
            LaunchError: this is one of several processes on a CPU.
        """
        before_start()
        runtime = cls()
        after_start(runtime.process)
        return runtime

    def __init__(self) -> None:
        """Import torch_xla, which starts nothing.

        Raises:
            MissingDependencyError: it cannot be imported.
        """
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
        """The platform, tpu or cpu."""
        return str(self._runtime.device_type() or "cpu").lower()

    def device_kind(self) -> str:
        """The PJRT client's name of the device kind."""
        return str(self._xla._XLAC._xla_device_kind(str(self.device())))

    def num_devices(self) -> int:
        """Devices in all; several CPU devices are simulated by the environment variable CPU_NUM_DEVICES."""
        return int(self._runtime.global_runtime_device_count())

    def chip(self) -> str | None:
        """The name of the chip ("v5e"), from the TPU VM's metadata; None where it is no known TPU."""
        if self.platform() != "tpu":
            return None
        from torch_xla._internal import tpu

        chip = chip_of_machine(str(tpu.get_tpu_env()["ACCELERATOR_TYPE"]))
        return None if chip is None else chip.name

    def num_slices(self) -> int:
        """The number of slices, from the devices' attributes; one where they have none."""
        return len({each.get("slice_index", 0) for each in self._runtime.global_runtime_device_attributes()})

    def process(self) -> tuple[int, int]:
        """The number of this process, and how many there are. Reading it starts the runtime."""
        return int(self._runtime.process_index()), int(self._runtime.process_count())

    def is_spmd(self) -> bool:
        """Whether `use_spmd` was called."""
        return bool(self._runtime.is_spmd())

    def use_spmd(self) -> None:
        """Run one program over all devices from now on (GSPMD, arXiv 2105.04663)."""
        if not self._runtime.is_spmd():
            self._runtime.use_spmd()

    def mesh(self, sizes: Mapping[str, int], dcn: Mapping[str, int] | None = None) -> Any:
        """An `xs.Mesh`, or a `HybridMesh` where slices are joined.

        Raises:
            UnsupportedError: the mesh has not as many devices as there are (every device runs the program), or is of
                another number of slices.
        """
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
        elif prod(between) == 1 and (found := self._along_dimensions(inside)) is not None:
            mesh = xs.Mesh(found.reshape(-1), inside, names)
        else:  # devices that know no slices, such as a CPU's, are taken to be of equal ones in their order
            rank = len(names)
            pairs = [place for axis in range(rank) for place in (axis, rank + axis)]
            ids = np.arange(there).reshape(*between, *inside).transpose(pairs).reshape(-1)
            mesh = xs.Mesh(ids, tuple(sizes.values()), names)
        xs.set_global_mesh(mesh)
        return mesh

    def _along_dimensions(self, sizes: tuple[int, ...]) -> np.ndarray | None:
        """The devices of one slice, int64 [*sizes], along its dimensions; None where they have no coordinates."""
        attributes: list[dict[str, Any]] = sorted(self._runtime.global_runtime_device_attributes(), key=_number)
        name = self.chip() if all("coords" in device for device in attributes) else None
        if name is None:
            return None
        places = [(*device["coords"], device.get("core_on_chip", 0)) for device in attributes]
        return arranged(places, sizes, chip_named(name))

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor of any shape, of the same shape; torch_xla sends the values when a program needs them."""
        return tensor.to(self.device())

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What was recorded runs first, as one program. The shards of this process's devices are joined on the host:
        torch_xla itself would compile a program for each shape and sharding that joins them."""
        self.sync(wait=True)
        found = [one.detach() for one in tensors]
        if not self.is_spmd() or self.process()[1] > 1:
            return [one.cpu().contiguous() for one in found]
        parts = self._xla._XLAC._get_local_shards(found)
        places = self._xla._XLAC._get_local_shard_replica_and_indices(found)
        return [_joined(one, *each) for one, *each in zip(found, parts, places, strict=True)]

    def shard(self, tensor: torch.Tensor, mesh: Any, partition_spec: PartitionSpec) -> None:
        """`xs.mark_sharding`, which annotates a tensor of any shape in place."""
        import torch_xla.distributed.spmd as xs

        spec = tuple(
            None if not axes else axes if isinstance(axes, str) else axes[0] if len(axes) == 1 else axes
            for axes in partition_spec
        )
        xs.mark_sharding(tensor, mesh, spec)

    def sharding_of(self, tensor: torch.Tensor) -> str:
        """XLA's notation for a tensor of any shape, such as {devices=[4,2]0,1,2,3,4,5,6,7}."""
        return str(self._xla._XLAC._get_xla_sharding_spec(tensor))

    def wrap_fsdp(self, layers: torch.nn.ModuleList, mesh: Any) -> None:
        """torch_xla's FSDPv2, which adds a barrier behind each layer's gradients, so that the compiler does not gather
        them all before it sends the first."""
        from torch_xla.distributed.fsdp.wrap import recursive_wrap, transformer_auto_wrap_policy
        from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

        recursive_wrap(
            layers,
            auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={type(one) for one in layers}),
            wrapper_cls=SpmdFullyShardedDataParallel,
            ignored_modules=set(),
            ignored_params=set(),
            only_wrap_children=True,
            mesh=mesh,
            shard_output=_sharded_already,
        )

    def barrier(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """XLA's optimization barrier, which torch_xla puts in place of the tensors' values."""
        import torch_xla.core.xla_model as xm

        held = list(tensors)
        xm.optimization_barrier_(held)
        return held

    def dot(
        self, x: torch.Tensor, w: torch.Tensor, contracted: tuple[Sequence[int], Sequence[int]], sums: torch.dtype
    ) -> torch.Tensor:
        """XLA's `dot_general` of x [..., k] and w [k, n], contracted as they say, to [..., n]: torch's own product of
        int8 keeps sums in int8, and one of int32 does not use int8 units."""
        dimensions = tuple(list(one) for one in contracted)
        total: torch.Tensor = self._xla._XLAC._xla_dot_general(
            x, w, (dimensions, ([], [])), preferred_element_type=sums
        )
        return total

    def jax_operation(self, name: str, hlo_module: bytes) -> JaxOperation:
        """One node of the recorded program, which XLA compiles with the rest."""
        import torch_xla.core.xla_builder as builder

        computation = builder.computation_from_module_proto(name, hlo_module)

        def call(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            leaves: Sequence[torch.Tensor] = self._xla._XLAC._xla_user_computation(
                f"xla::{name}", list(tensors), computation
            )
            return leaves

        return call

    def scan(
        self, step: Step, carry: list[torch.Tensor], stacked: dict[str, torch.Tensor], *, recompute: bool
    ) -> list[torch.Tensor]:
        """torch_xla's experimental scan; with `recompute` torch's min-cut partition chooses what a turn keeps."""
        from functorch.compile import default_partition, min_cut_rematerialization_partition
        from torch._functorch import config as functorch_config
        from torch_xla.experimental.scan import scan

        with functorch_config.patch(aggressive_recomputation=recompute):  # else whatever takes long is kept
            result, _ = scan(
                step,
                carry,
                stacked,
                partition_fn=min_cut_rematerialization_partition if recompute else default_partition,
                is_fn_pure=True,
            )
        return list(result)

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
        """A context that sets the random state and restores it at its end."""
        import torch_xla.core.xla_model as xm

        before = self.random_state()
        xm.set_rng_state(state)
        try:
            yield
        finally:
            xm.set_rng_state(before)

    def sync(self, wait: bool = False) -> None:
        """Run the recorded operations, and compile them first if they are new."""
        self._xla.sync(wait=wait)

    def counters(self) -> Counters:
        """Return the counters of torch_xla's metrics."""
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


def _joined(tensor: torch.Tensor, parts: Sequence[Any], places: Sequence[Any]) -> torch.Tensor:
    """A whole tensor of any shape on the host, from the part of each device and its place."""
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for (part, _), (_, indices) in zip(parts, places, strict=True):
        if indices is Ellipsis:
            return part.clone()
        whole[tuple(indices)] = part[tuple(slice(0, one.stop - one.start) for one in indices)]  # the last may be padded
    return whole


def _sharded_already(output: Any, mesh: Any) -> None:
    """The hooks of `shard_model` have sharded a layer's output, by the batch's axes and not along "fsdp" alone."""


def _has_tpu() -> bool:
    """Whether a TPU's device files are there."""
    from pathlib import Path

    return any(Path("/dev").glob("accel*")) or any(Path("/dev").glob("vfio/[0-9]*"))


def _number(device: Mapping[str, Any]) -> int:
    """The number of a device, which its name ends with: "TPU:3"."""
    return int(str(device["name"]).rpartition(":")[2])


if TYPE_CHECKING:
    _fits: type[TorchRuntime] = TorchXla
