"""The devices that a product with a quantized kernel runs on."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from jax.sharding import AbstractMesh, Mesh

from ttpu_jax.ops.attention.blocks import device_kind
from ttpu_jax.ops.attention.context import AttentionContext

UsePallas = bool | Literal["auto"]


@dataclass(frozen=True)
class Devices:
    """Where a product runs. Hashable: static while a program is traced.

    Args:
        platform: cpu, tpu or gpu; "tpu-interpreted" runs the TPU's kernels on a CPU.
        mesh: the devices; None for one.
        kernel_axes: for each dimension of the kernel [*out, in], the mesh axes that shard it.
        row_axes: for each dimension of the activations but the last, the mesh axes that shard it.
        use_pallas: True for Pallas kernels wherever one serves, False for none, "auto" for the faster of both as the
            compiler estimates them.
        stream_axes: the mesh axes that cut the sequence of the residual stream between products, beside those of
            `row_axes`; see `ttpu_jax.model.modules.Runtime`.
    """

    platform: str
    mesh: Mesh | AbstractMesh | None = None
    kernel_axes: tuple[tuple[str, ...], ...] = ()
    row_axes: tuple[tuple[str, ...], ...] = ()
    use_pallas: UsePallas = "auto"
    stream_axes: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """`jax.Device.device_kind`."""
        return device_kind(AttentionContext(mesh=self.mesh))

    def shards(self, axes: tuple[str, ...]) -> int:
        """The number of devices along mesh axes."""
        return prod(self.mesh.shape[axis] for axis in axes) if self.mesh is not None else 1
