"""The entry point `torch_xla` of the group `ttpu.models_under_test`. The runtime reads its environment when it starts,
so this module starts it only when it is needed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from ttpu_core.architecture import Architecture
from ttpu_core.checkpoint import Checkpoint
from ttpu_core.errors import UnsupportedError
from ttpu_core.sharding.parallelism import parse_mesh, resolve_parallelism
from ttpu_core.spec import ArchitectureSpec
from ttpu_torch_xla.launching import CPU_DEVICES, DEVICE

if TYPE_CHECKING:
    from ttpu_torch_xla.under_test.model import TorchModel


class TorchUnderTest:
    """Starts the runtime and loads stock models."""

    name = "torch_xla"
    distributions: tuple[str, ...] = ("ttpu-torch-xla", "torch_xla", "ttpu-jax", "jax", "libtpu")

    def prepare(self, device: Literal["cpu", "tpu"], virtual_devices: int) -> None:
        """The device that torch_xla starts on. It simulates several CPU devices only where the user asks for them: then
        each program of the process runs on all of them."""
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # of the kernels, which JAX only lowers
        if device == "cpu":
            os.environ.setdefault(DEVICE, "CPU")

    def missing_device(self, device: Literal["cpu", "tpu"]) -> str | None:
        """Return why checks cannot run on a device here, or None. Starts the runtime, which must start before torch's
        first backward pass."""
        from ttpu_torch_xla.runtime import current

        runtime = current()
        if runtime.num_devices() > 1:
            runtime.use_spmd()
        runtime.device()
        if device == "cpu" or runtime.platform() == "tpu":
            return None
        return f"there is no TPU here: {runtime.name} runs on {runtime.platform()}"

    def missing_devices(self, count: int) -> str | None:
        """Return why models cannot be sharded over so many devices in this process, or None."""
        from ttpu_torch_xla.runtime import current

        runtime = current()
        if runtime.num_devices() == count and runtime.is_spmd():
            return None
        return (
            f"{runtime.name} started with {runtime.num_devices()} devices here, and sharded checks need {count}: set "
            f"{CPU_DEVICES}={count} before it starts"
        )

    def device_kinds(self) -> tuple[str, ...]:
        """The platform, which all devices share."""
        from ttpu_torch_xla.runtime import current

        return (current().platform(),)

    def load(
        self,
        architecture: Architecture,
        checkpoint: Checkpoint,
        *,
        dtype: str,
        mesh: str | None,
        attn_implementation: str,
    ) -> TorchModel:
        """Load a model.

        Args:
            architecture: what the plugin says of the checkpoint's config.
            checkpoint: as transformers saved it.
            dtype: "float32" or "bfloat16".
            mesh: such as "fsdp=2,tensor=4"; None for one device.
            attn_implementation: as `from_pretrained` takes it.
        """
        from ttpu_torch_xla.under_test.model import TorchModel

        return TorchModel(architecture, checkpoint, dtype=dtype, mesh=mesh, attn_implementation=attn_implementation)

    def refuse_mesh(self, spec: ArchitectureSpec, mesh: str) -> None:
        """A mesh must have all devices that there are, and divide heads and experts.

        Raises:
            UnsupportedError: it does not.
        """
        from ttpu_torch_xla.runtime import current
        from ttpu_torch_xla.sharding.resolve import check

        devices = current().num_devices()
        found = resolve_parallelism(mesh, devices)
        if found.num_devices != devices:
            raise UnsupportedError(
                f"the mesh {mesh} was asked for, but {current().name} runs one program on all {devices} devices: use "
                "all of them."
            )
        check(spec, parse_mesh(mesh), found.strategy)

    def forget_programs(self) -> None:
        """Do nothing: the runtime keeps a bounded number of programs."""

    def attention_implementations(self) -> Sequence[str]:
        """Names of the kernels, the reference first."""
        from ttpu_torch_xla.attention import KERNELS
        from ttpu_torch_xla.attention.choice import EAGER

        return (EAGER, *KERNELS)
