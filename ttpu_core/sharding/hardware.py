"""A table of TPU generations: peak rates, memory, interconnect and hosts. `parse_topology` reads slice names such as
`v5e:2x4` or `2*v5e:4x4`. No TPU is needed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ttpu_core.errors import UnsupportedError

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Chip:
    """Figures of one JAX device. A device is one chip, except on tpu7x, where a chip is two devices."""

    name: str
    device_kind: str  # the value of `jax.Device.device_kind`
    clock_hz: float  # converts the compiler's cycles into seconds
    bf16_flops: float  # peak, per second
    int8_ops: float | None  # peak of int8 × int8, per second; None: not faster than bfloat16, or not published
    fp8_flops: float | None  # None: the chip computes in bfloat16 instead
    hbm_bytes_per_second: float
    hbm_bytes: int  # the compiler's limit for one program; the runtime reserves the rest of the memory
    ici_bytes_per_second: float  # one link, one direction
    ici_links: int  # links of one chip, two per dimension of the interconnect
    dimensions: int  # dimensions of the interconnect
    sums_on_sparse_cores: bool  # whether the compiler leaves reduce-scatters to SparseCores, beside the core
    pod_chips: int  # chips of the largest pod
    devices_per_chip: int
    chips_per_host: int
    dcn_bytes_per_second: float  # from one host to other slices, one direction
    host_bytes_per_second: float  # between one device and its host's memory, one direction
    example: str

    @property
    def dcn_share(self) -> float:
        """One device's share of its host's network cards, in bytes per second: all chips of a host send at once. Where
        Google Cloud gives four chips of a host of eight to a virtual machine, the other four share the cards too."""
        return self.dcn_bytes_per_second / (self.chips_per_host * self.devices_per_chip)


# Peak rates, bandwidths, pod sizes and chips of a host: cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}, divided by
# the devices of a chip. hbm_bytes: "available HBM" in error messages of libtpu 0.0.42. ici: the documents'
# bidirectional figure for a chip, divided by its links and by two; see also jax-ml.github.io/scaling-book/tpus. fp8:
# on v5p and v6e the documents state the bfloat16 rate, and the compiler converts; only tpu7x multiplies fp8. int8: see
# each chip.
# sums_on_sparse_cores: as libtpu 0.0.42 compiles programs. v5e has no SparseCores (cloud.google.com/tpu/docs/
# system-architecture-tpu-vm); v4 has some.
# dcn: the network cards of a host (v5e 2 × 100 Gbit/s, v6e 4 × 200 Gbit/s), or the documents' figure for a chip (50
# Gbit/s on v5p, 100 on tpu7x) times the chips of a host. A pod of v5e has 6.4 Tbit/s, which is the same 25 a chip.
# host: PCI Express, of which the documents state no rate. jax-ml.github.io/scaling-book/tpus has 16 GB/s each way for
# v4, "typically around 1.5e10" for a chip, and 32 GB/s on v6e; a chip of tpu7x is assumed to have what one of v6e has.
CHIPS: Mapping[str, Chip] = MappingProxyType({
    "v4": Chip(
        name="v4",
        device_kind="TPU v4",
        clock_hz=1.05e9,  # Jouppi et al., "TPU v4", ISCA 2023
        bf16_flops=275e12,  # both cores: compiled in megacore mode, where a chip is one device
        int8_ops=None,  # "275 teraflops (bf16 or int8)"
        fp8_flops=None,
        hbm_bytes_per_second=1230e9,
        hbm_bytes=int(30.75 * GIB),
        ici_bytes_per_second=45e9,
        ici_links=6,
        dimensions=3,
        sums_on_sparse_cores=False,
        pod_chips=4096,
        devices_per_chip=1,
        chips_per_host=4,
        dcn_bytes_per_second=25e9,  # not published: assumed equal to v5p
        host_bytes_per_second=16e9,
        example="v4:2x2x1",
    ),
    "v5e": Chip(
        name="v5e",
        device_kind="TPU v5 lite",
        clock_hz=1.5e9,  # 197e12 flop/s over 4 MXUs of 128 x 128, two flop each
        bf16_flops=197e12,
        int8_ops=393e12,
        fp8_flops=None,
        hbm_bytes_per_second=819e9,
        hbm_bytes=int(15.75 * GIB),
        ici_bytes_per_second=45e9,
        ici_links=4,
        dimensions=2,
        sums_on_sparse_cores=False,
        pod_chips=256,
        devices_per_chip=1,
        chips_per_host=8,
        dcn_bytes_per_second=25e9,
        host_bytes_per_second=15e9,
        example="v5e:2x4",
    ),
    "v5p": Chip(
        name="v5p",
        device_kind="TPU v5",
        clock_hz=1.75e9,  # 459e12 flop/s over 2 cores of 4 MXUs of 128 x 128, two flop each
        bf16_flops=459e12,
        int8_ops=918e12,
        fp8_flops=None,
        hbm_bytes_per_second=2765e9,
        hbm_bytes=int(95.74 * GIB),
        ici_bytes_per_second=90e9,
        ici_links=6,
        dimensions=3,
        sums_on_sparse_cores=True,
        pod_chips=8960,
        devices_per_chip=1,
        chips_per_host=4,
        dcn_bytes_per_second=25e9,
        host_bytes_per_second=15e9,
        example="v5p:2x2x2",
    ),
    "v6e": Chip(
        name="v6e",
        device_kind="TPU v6 lite",
        clock_hz=1.75e9,  # 918e12 flop/s over 524288 flop a cycle; the compiler's cycles agree with that width
        bf16_flops=918e12,
        int8_ops=1836e12,
        fp8_flops=None,
        hbm_bytes_per_second=1640e9,
        hbm_bytes=int(31.25 * GIB),
        ici_bytes_per_second=90e9,
        ici_links=4,
        dimensions=2,
        sums_on_sparse_cores=True,
        pod_chips=256,
        devices_per_chip=1,
        chips_per_host=8,
        dcn_bytes_per_second=100e9,
        host_bytes_per_second=32e9,
        example="v6e:2x4",
    ),
    "tpu7x": Chip(
        name="tpu7x",
        device_kind="TPU7x",
        clock_hz=2.0e9,  # no published figure: an assumption, about 10 % below peak / 524288 flop a cycle
        bf16_flops=1155e12,
        int8_ops=None,  # not published
        fp8_flops=2307e12,
        hbm_bytes_per_second=3700e9,
        hbm_bytes=int(94.75 * GIB),
        ici_bytes_per_second=100e9,
        ici_links=6,
        dimensions=3,
        sums_on_sparse_cores=True,
        pod_chips=9216,
        devices_per_chip=2,
        chips_per_host=4,
        dcn_bytes_per_second=50e9,
        host_bytes_per_second=16e9,  # not published: assumed to be half of v6e, as a chip is two devices
        example="tpu7x:2x2x1",
    ),
})

# Common names of chips, and the compiler's names.
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

# Slice sizes in chips that can be ordered (cloud.google.com/tpu/docs), the smallest first, up to 256 chips.
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_CUBIC = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8))


@dataclass(frozen=True, slots=True)
class Topology:
    """`slices` equal slices of `size` chips each. The interconnect (ICI) links chips inside a slice, the data centre
    network (DCN) links slices."""

    chip: Chip
    size: tuple[int, ...]  # chips along each dimension of the interconnect
    slices: int = 1

    @property
    def slice_name(self) -> str:
        """The compiler's name of one slice: `v5e:4x4`."""
        return f"{self.chip.name}:{'x'.join(map(str, self.size))}"

    @property
    def name(self) -> str:
        """`v5e:4x4`, or `2*v5e:4x4` for two such slices."""
        return self.slice_name if self.slices == 1 else f"{self.slices}*{self.slice_name}"

    @property
    def chips_per_slice(self) -> int:
        """Chips of one slice."""
        return math.prod(self.size)

    @property
    def devices_per_slice(self) -> int:
        """JAX devices of one slice."""
        return self.chips_per_slice * self.chip.devices_per_chip

    @property
    def num_chips(self) -> int:
        """Chips of all slices together."""
        return self.slices * self.chips_per_slice

    @property
    def num_devices(self) -> int:
        """JAX devices of all slices together."""
        return self.slices * self.devices_per_slice

    @property
    def is_sold(self) -> bool:
        """Whether slices of this size can be ordered. Three-dimensional slices may also consist of whole 4x4x4
        cubes."""
        cubes = self.chip.dimensions == 3 and all(length % 4 == 0 for length in self.size)
        return cubes or self.size in slice_sizes(self.chip)

    @property
    def host_bounds(self) -> tuple[int, ...] | None:
        """The slice's size in three dimensions if one host holds it. None means the compiler's default hosts of
        2x2x1.

        libtpu's default makes two hosts of v5e:2x4 and refuses v5e:1x1."""
        if self.chips_per_slice > self.chip.chips_per_host:
            return None
        return tuple([*self.size, 1][:3])

    @property
    def num_hosts(self) -> int:
        """Number of hosts. A slice that fits one host has one; larger slices have 4 chips per host."""
        return self.slices * (1 if self.host_bounds else -(-self.chips_per_slice // 4))

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Whether each dimension closes into a ring.

        Three-dimensional slices of whole 4x4x4 cubes are tori. On v5e and v6e only a dimension as long as a side of
        the pod closes."""
        if self.chip.dimensions == 3:
            return (all(length % 4 == 0 for length in self.size),) * 3
        return tuple(length == 16 for length in self.size)


def chip_named(name: str) -> Chip:
    """The figures of the chip `name` ("v5e").

    Raises:
        UnsupportedError: no chip has this name. The message suggests one.
    """
    chip = CHIPS.get(name)
    if chip is not None:
        return chip
    meant = chip_of_machine(name)
    if meant is not None:
        advice = f"write {meant.name!r}, as in {meant.example!r}"
    else:
        advice = "write one of them with its size, as in 'v5e:2x4'"
    raise UnsupportedError(
        f"TPU chip {name!r} was asked for, but it is not a name that the compiler knows: "
        f"the chips are {', '.join(CHIPS)}; {advice}."
    )


def chip_of_machine(accelerator_type: str) -> Chip | None:
    """The chip of a machine that Google Cloud calls "v5litepod-8", or of a usual name of a chip. None if it is no known
    TPU."""
    plain = accelerator_type.lower().partition("-")[0]
    return CHIPS.get(_ALIASES.get(plain, plain))


def chip_of_device_kind(kind: str) -> Chip | None:
    """The chip for a value of `jax.Device.device_kind` such as "TPU v5 lite". None if the device is no known TPU."""
    for chip in CHIPS.values():
        if kind == chip.device_kind:
            return chip
    # Some runtimes report the product's name instead: "TPU v5e", "TPU v6e", "TPU v7x".
    plain = kind.removeprefix("TPU").strip().lower().replace(" ", "")
    return CHIPS.get(_ALIASES.get(plain, plain)) if kind.startswith("TPU") else None


def slice_sizes(chip: Chip) -> tuple[tuple[int, ...], ...]:
    """Slice sizes in chips that can be ordered, the smallest first, up to 256 chips."""
    return _FLAT if chip.dimensions == 2 else _CUBIC


def parse_topology(name: str) -> Topology:
    """Parse a chip and the size of a slice in chips: "v5e:2x4", "v5p:2x2x2". Several equal slices are "2*v5e:4x4".

    Raises:
        UnsupportedError: the name or size does not exist.
    """
    found = re.fullmatch(r"\s*(\d+)\s*\*\s*(.*)", name)
    slices, slice_name = (int(found[1]), found[2]) if found else (1, name)
    chip_name, colon, size_text = slice_name.strip().partition(":")
    chip = chip_named(chip_name)
    if slices < 1:
        raise UnsupportedError(
            f"TPU topology {name!r} was asked for, which has no slices, but at least 1 is needed: write 1 slice as "
            f"{chip.example!r} or several as '2*{chip.example}'."
        )
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
    return Topology(chip, size, slices)
