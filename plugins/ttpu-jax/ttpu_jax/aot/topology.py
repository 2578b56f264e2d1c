"""Takes the name of a TPU slice such as `v5e:2x4`, whether or not this machine has one.
Gives the slice's compile-only devices, its chip's figures, and a mesh with named axes over those devices."""

import importlib.util
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import jax
from jax.experimental import mesh_utils, topologies
from jax.sharding import Mesh

from ttpu_core.errors import MissingDependencyError, UnsupportedError

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Chip:
    """Figures of one JAX device: a chip, except on tpu7x, where a chip is two devices."""

    name: str
    device_kind: str  # what `jax.Device.device_kind` says
    clock_hz: float  # turns the compiler's cycles into seconds
    bf16_flops: float  # peak, per second
    hbm_bytes_per_second: float
    hbm_bytes: int  # what the compiler lets one program use: the runtime keeps a little of the memory
    ici_bytes_per_second: float  # one link, one direction
    dimensions: int  # of the interconnect
    pod_chips: int  # the largest pod that exists
    devices_per_chip: int
    example: str


# Peak rates, bandwidths and pod sizes: cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}, divided by the devices of
# a chip. hbm_bytes: "available HBM" in the refusals of libtpu 0.0.42. ici: the documents' bidirectional figure for a
# chip, over its links and by two; see also jax-ml.github.io/scaling-book/tpus.
CHIPS: Mapping[str, Chip] = MappingProxyType({
    "v4": Chip(
        name="v4",
        device_kind="TPU v4",
        clock_hz=1.05e9,  # Jouppi et al., "TPU v4", ISCA 2023
        bf16_flops=275e12,  # both cores: compiled in megacore mode, where a chip is one device
        hbm_bytes_per_second=1230e9,
        hbm_bytes=int(30.75 * GIB),
        ici_bytes_per_second=45e9,
        dimensions=3,
        pod_chips=4096,
        devices_per_chip=1,
        example="v4:2x2x1",
    ),
    "v5e": Chip(
        name="v5e",
        device_kind="TPU v5 lite",
        clock_hz=1.5e9,  # 197e12 flop/s over 4 MXUs of 128 x 128, two flop each
        bf16_flops=197e12,
        hbm_bytes_per_second=819e9,
        hbm_bytes=int(15.75 * GIB),
        ici_bytes_per_second=45e9,
        dimensions=2,
        pod_chips=256,
        devices_per_chip=1,
        example="v5e:2x4",
    ),
    "v5p": Chip(
        name="v5p",
        device_kind="TPU v5",
        clock_hz=1.75e9,  # 459e12 flop/s over 2 cores of 4 MXUs of 128 x 128, two flop each
        bf16_flops=459e12,
        hbm_bytes_per_second=2765e9,
        hbm_bytes=int(95.74 * GIB),
        ici_bytes_per_second=90e9,
        dimensions=3,
        pod_chips=8960,
        devices_per_chip=1,
        example="v5p:2x2x2",
    ),
    "v6e": Chip(
        name="v6e",
        device_kind="TPU v6 lite",
        clock_hz=1.75e9,  # 918e12 flop/s over 524288 flop a cycle; the compiler's cycles agree with that width
        bf16_flops=918e12,
        hbm_bytes_per_second=1640e9,
        hbm_bytes=int(31.25 * GIB),
        ici_bytes_per_second=90e9,
        dimensions=2,
        pod_chips=256,
        devices_per_chip=1,
        example="v6e:2x4",
    ),
    "tpu7x": Chip(
        name="tpu7x",
        device_kind="TPU7x",
        clock_hz=2.0e9,  # no published figure: an assumption, about 10 % below peak / 524288 flop a cycle
        bf16_flops=1155e12,
        hbm_bytes_per_second=3700e9,
        hbm_bytes=int(94.75 * GIB),
        ici_bytes_per_second=100e9,
        dimensions=3,
        pod_chips=9216,
        devices_per_chip=2,
        example="tpu7x:2x2x1",
    ),
})

# Names that people type, and the one that the compiler knows.
_ALIASES: Mapping[str, str] = MappingProxyType({
    "v5litepod": "v5e",
    "v5lite": "v5e",
    "v5": "v5p",
    "v6": "v6e",
    "v6lite": "v6e",
    "trillium": "v6e",
    "v7": "tpu7x",
    "v7x": "tpu7x",
    "tpu7": "tpu7x",
    "ironwood": "tpu7x",
})

# Without these libtpu asks a metadata server that is not there, minutes long, and fills the log.
_SILENCE: Mapping[str, str] = MappingProxyType({
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",  # any valid name: it does not limit the topologies
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
})


@dataclass(frozen=True, slots=True)
class TpuTopology:
    """A slice to compile for. `devices` can be put in a mesh and compiled for, but nothing runs on them."""

    name: str
    chip: Chip
    devices: tuple[jax.Device, ...]


def chip_named(name: str) -> Chip:
    """Returns the figures of chip `name` ("v5e"); raises `UnsupportedError`, with a suggestion, if there is none."""
    chip = CHIPS.get(name)
    if chip is not None:
        return chip
    plain = name.lower().partition("-")[0]  # v5litepod-8 is how Google Cloud names a machine
    meant = CHIPS.get(_ALIASES.get(plain, plain))
    if meant is not None:
        advice = f"write {meant.name!r}, as in {meant.example!r}"
    else:
        advice = "write one of them with its size, as in 'v5e:2x4'"
    raise UnsupportedError(
        f"TPU chip {name!r} was asked for, but it is not a name that the compiler knows: "
        f"the chips are {', '.join(CHIPS)}; {advice}."
    )


def tpu_topology(name: str) -> TpuTopology:
    """Returns the slice called `name`, a chip and its size in chips: "v5e:2x4", "v5p:2x2x2", "tpu7x:2x2x1".

    A slice that one host can hold is one host; a slice whose links close into rings has them.
    Raises `UnsupportedError` for a name or size that does not exist, `MissingDependencyError` without libtpu.
    """
    chip, size = _parse(name)
    if importlib.util.find_spec("libtpu") is None:
        raise MissingDependencyError(
            f"compiling for {name!r} needs libtpu, which is not installed: "
            'it needs no TPU, only `pip install "ttpu-jax[tpu]"`.'
        )
    _silence_libtpu()
    host_bounds = _host_bounds(chip, size)
    options: dict[str, object] = {"wrap": _wrap(chip, size)}
    if host_bounds is not None:
        options["chips_per_host_bounds"] = host_bounds
    if chip.name == "v4":
        options["chip_config_name"] = "megacore"  # JAX makes meshes of v4 only so: one device a chip
    try:
        description = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    except jax.errors.JaxRuntimeError as error:
        raise UnsupportedError(
            f"TPU topology {name!r} was asked for, but libtpu answers {first_line(error)!r}: "
            f"a size that {chip.name} machines come in is needed, as in {chip.example!r}."
        ) from error
    return TpuTopology(name=name, chip=chip, devices=tuple(description.devices))


def make_mesh(topology: TpuTopology, axes: Mapping[str, int]) -> Mesh:
    """Returns a mesh over all devices of `topology`, with axes named and sized as in `axes`, in that order.

    Neighbours on the last axes are neighbours on the interconnect where the sizes allow it.
    Raises `UnsupportedError` when the sizes do not multiply to the number of devices.
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
    devices = list(topology.devices)
    try:
        placed = mesh_utils.create_device_mesh(sizes, devices)
    except NotImplementedError:  # an axis that is no product of whole interconnect dimensions
        placed = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(placed, tuple(axes))


def _parse(name: str) -> tuple[Chip, tuple[int, ...]]:
    chip_name, colon, size_text = name.partition(":")
    chip = chip_named(chip_name)
    if not colon or re.fullmatch(r"\d+(x\d+)*", size_text) is None:
        raise UnsupportedError(
            f"TPU topology {name!r} was asked for, but its size {size_text!r} is not numbers of chips joined by 'x': "
            f"write {chip.dimensions} of them, as in {chip.example!r}."
        )
    size = tuple(int(part) for part in size_text.split("x"))
    if len(size) != chip.dimensions:
        raise UnsupportedError(
            f"TPU topology {name!r} was asked for, but it has {len(size)} dimension{'s'[: len(size) != 1]} and the "
            f"interconnect of {chip.name} has {chip.dimensions}: write {chip.dimensions} sizes, as in "
            f"{chip.example!r}."
        )
    if not 1 <= math.prod(size) <= chip.pod_chips:
        raise UnsupportedError(
            f"TPU topology {name!r} was asked for, which is {math.prod(size)} chips, but a {chip.name} pod has "
            f"{chip.pod_chips}: write a size of 1 to {chip.pod_chips} chips, as in {chip.example!r}."
        )
    return chip, size


def _host_bounds(chip: Chip, size: tuple[int, ...]) -> list[int] | None:
    """A host holds up to 8 chips on a two-dimensional interconnect, 4 on a three-dimensional one.

    libtpu's own default is 2x2x1, which makes two hosts of v5e:2x4 and refuses v5e:1x1.
    """
    chips_per_host = 8 if chip.dimensions == 2 else 4
    if math.prod(size) > chips_per_host:
        return None
    return [*size, 1][:3]


def _wrap(chip: Chip, size: tuple[int, ...]) -> list[bool]:
    """Whether each dimension closes into a ring; libtpu leaves v5p:4x4x4 open unless told.

    Three-dimensional slices made of whole 4x4x4 cubes are tori; on v5e and v6e only a whole side of a pod closes.
    """
    if chip.dimensions == 3:
        return [all(length % 4 == 0 for length in size)] * 3
    return [*(length == 16 for length in size), False]


def _silence_libtpu() -> None:
    """Must come before libtpu initialises. On a machine with TPUs the variables are its own business."""
    if any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*")):
        return
    for variable, value in _SILENCE.items():
        os.environ.setdefault(variable, value)


def first_line(error: Exception) -> str:
    """Returns what libtpu says before it goes into detail, to be quoted inside a sentence."""
    return str(error).strip().partition("\n")[0].rstrip(".")
