"""TPU slices for ahead-of-time compilation, such as `v5e:2x4`: compile-only devices, the chip's figures, and meshes
over the devices. This machine needs no TPU."""

import importlib.util
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from ttpu_core.errors import MissingDependencyError, UnsupportedError
from ttpu_core.sharding.hardware import CHIPS, GIB, Chip, chip_named, parse_topology
from ttpu_core.sharding.links import slice_axes
from ttpu_jax.params.mesh import arrange

__all__ = ["CHIPS", "GIB", "Chip", "TpuTopology", "chip_named", "first_line", "make_mesh", "tpu_topology"]

# Without these variables libtpu queries a missing metadata server for minutes and fills the log.
_SILENCE: Mapping[str, str] = MappingProxyType({
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",  # any valid name; it does not limit the topologies
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
})


@dataclass(frozen=True, slots=True)
class TpuTopology:
    """A slice to compile for. `devices` can form a mesh and be compiled for, but nothing runs on them."""

    name: str
    chip: Chip
    devices: tuple[jax.Device, ...]


def tpu_topology(name: str) -> TpuTopology:
    """The slice `name`, a chip and its size in chips: "v5e:2x4", "v5p:2x2x2", "tpu7x:2x2x1". Several slices are
    "2*v5e:4x4".

    A slice that fits one host is one host. Dimensions that close into rings on real slices do so here.

    Raises:
        UnsupportedError: the name or size does not exist.
        MissingDependencyError: libtpu is not installed.
    """
    topology = parse_topology(name)
    chip = topology.chip
    if importlib.util.find_spec("libtpu") is None:
        raise MissingDependencyError(
            f"compiling for {name!r} needs libtpu, which is not installed: "
            'it needs no TPU, only `pip install "ttpu-jax[tpu]"`.'
        )
    _silence_libtpu()
    options: dict[str, object] = {"wrap": [*topology.wraps, False][:3]}
    if topology.host_bounds is not None:
        options["chips_per_host_bounds"] = list(topology.host_bounds)
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    if chip.name == "v4":
        options["chip_config_name"] = "megacore"  # JAX supports meshes of v4 only with one device per chip
    try:
        description = topologies.get_topology_desc(platform="tpu", topology_name=topology.slice_name, **options)
    except jax.errors.JaxRuntimeError as error:
        raise UnsupportedError(
            f"TPU topology {name!r} was asked for, but libtpu answers {first_line(error)!r}: "
            f"a size that {chip.name} machines come in is needed, as in {chip.example!r}."
        ) from error
    return TpuTopology(name=topology.name, chip=chip, devices=tuple(description.devices))


def make_mesh(
    topology: TpuTopology, axes: Mapping[str, int], slices: Mapping[str, int] | None = None, *, by_links: bool = True
) -> Mesh:
    """A mesh over all devices of `topology`, with the axes of `axes` in that order.

    Neighbours on the last axes are neighbours on the interconnect if the sizes allow it. `slices` gives the number
    of slices along each axis; None puts them on the first axes that they divide. Without `by_links` devices keep
    their order.

    Raises:
        UnsupportedError: the product of the sizes is not the number of devices.
    """
    sizes = tuple(axes.values())
    wanted, found = math.prod(sizes), len(topology.devices)
    asked = ", ".join(f"{axis}={size}" for axis, size in axes.items()) or "no axes"
    if not sizes or min(sizes) < 1 or wanted != found:
        per_chip = topology.chip.devices_per_chip
        why = f" ({per_chip} a chip)" if per_chip > 1 else ""
        raise UnsupportedError(
            f"a mesh of {asked} was asked for, which is {wanted if sizes else 0} devices, but {topology.name!r} has "
            f"{found}{why}: give axes of at least 1 whose product is {found}."
        )
    along = slice_axes(axes, parse_topology(topology.name).slices) if slices is None else slices
    return Mesh(arrange(topology.devices, axes, along, by_links=by_links), tuple(axes))


def _silence_libtpu() -> None:
    """Set the variables before libtpu initialises. On a machine with TPUs the environment stays unchanged."""
    if any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*")):
        return
    for variable, value in _SILENCE.items():
        os.environ.setdefault(variable, value)


def first_line(error: Exception) -> str:
    """The first line of libtpu's message, for quoting inside a sentence."""
    return str(error).strip().partition("\n")[0].rstrip(".")
