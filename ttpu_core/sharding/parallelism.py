"""What users ask for as `parallelism_strategy`. In: a strategy's name, a mesh as text, or the user's own rules, and how
many devices there are; out: a `Parallelism`, the mesh and the table of what is cut along it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod

from ttpu_core.errors import UnsupportedError
from ttpu_core.sharding.strategy import DEFAULT_STRATEGY, MESH_AXES, Strategy
from ttpu_core.spec.axes import LOGICAL_AXES

AUTO = "auto"
NAMED: Mapping[str, tuple[str, ...]] = {
    "fsdp": ("fsdp",),
    "dp": ("data",),
    "data_parallel": ("data",),
    "mp": ("tensor",),
    "model_parallel": ("tensor",),
    "2d": ("fsdp", "tensor"),
    "3d": ("data", "fsdp", "tensor"),
}
"""The mesh axes of each named strategy, which share the devices as evenly as their number allows, later axes first."""

SHAPES: Mapping[int, tuple[str, ...]] = {1: ("tensor",), 2: ("data", "tensor"), 3: ("data", "fsdp", "tensor")}
"""What the sizes of a shape such as 2x4 are, by how many there are."""

DCN = "dcn."
SIMULATED_BY = "XLA_FLAGS=--xla_force_host_platform_device_count"
"""What says, on a CPU, how many devices there are; another backend may have another variable."""

Rules = Mapping[str, str | Sequence[str] | None]


@dataclass(frozen=True)
class Parallelism:
    """A mesh and what is cut along it.

    Args:
        mesh: mesh axis → devices along it, in the order of `MESH_AXES`; empty for one device.
        dcn: how many of them lie in different slices, which the data center network joins, for axes where any do.
        strategy: logical axis → mesh axes.
    """

    mesh: tuple[tuple[str, int], ...] = ()
    dcn: tuple[tuple[str, int], ...] = ()
    strategy: Strategy = DEFAULT_STRATEGY

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return prod(size for _, size in self.mesh)

    @property
    def num_slices(self) -> int:
        """Slices that the mesh spans."""
        return prod(size for _, size in self.dcn)

    def __str__(self) -> str:
        """As `parse_parallelism` reads it."""
        slices = dict(self.dcn)
        parts = [f"{DCN}{axis}={size}" for axis, size in self.dcn]
        parts += [f"{axis}={size // slices.get(axis, 1)}" for axis, size in self.mesh if size > slices.get(axis, 1)]
        return ",".join(parts) or "one device"


def resolve_parallelism(
    what: str,
    num_devices: int,
    rules: Rules | None = None,
    simulated_by: str = SIMULATED_BY,
    argument: str = "parallelism_strategy",
) -> Parallelism:
    """The mesh that a strategy means on `num_devices` devices.

    Args:
        what: a name of `NAMED` ("fsdp", "3d"), a shape ("2x4": data × tensor), or a mesh ("data=2,tensor=4", with
            "dcn.data=2," before it where two slices are joined). A name takes all devices; a mesh may take fewer.
        rules: logical axis → the mesh axes that cut it, or None, in place of the usual ones.
        simulated_by: what sets the number of devices on a CPU, for the refusal of a mesh that is too large.
        argument: what the caller's argument is called, for a refusal of its value.

    Raises:
        UnsupportedError: no such strategy, axis or mesh, or one that these devices cannot form.
    """
    text = str(what).strip().lower()
    dcn: dict[str, int] = {}
    if text in NAMED:
        mesh = _named(text, num_devices, argument)
    elif re.fullmatch(r"\d+(x\d+)*", text):
        mesh = _shape(text)
    elif "=" in text:
        mesh, dcn = _axes(text)
    else:
        close = get_close_matches(text, (*NAMED, AUTO), n=1)
        meant = f"{close[0]!r}" if close else "one of them"
        raise UnsupportedError(
            f"{argument} {what!r} was asked for, but it is no strategy: there are {', '.join(NAMED)}, "
            f"{AUTO}, shapes such as '2x4' and meshes such as 'data=2,tensor=4'; write {meant}."
        )
    found = Parallelism(_in_order(mesh), _in_order(dcn), strategy_with(rules))
    check_devices(found, num_devices, what, simulated_by)
    return found


def check_devices(parallelism: Parallelism, num_devices: int, name: str, simulated_by: str = SIMULATED_BY) -> None:
    """That there are enough devices.

    Raises:
        UnsupportedError: there are not.
    """
    needed = parallelism.num_devices
    if needed > num_devices:
        raise UnsupportedError(
            f"the mesh {name!r} was asked for, which is {needed} devices, but there "
            f"{'is 1' if num_devices == 1 else f'are {num_devices}'}: make it smaller (on a CPU, "
            f"{simulated_by}={needed} simulates as many)."
        )


def parse_mesh(text: str) -> dict[str, int]:
    """The axes of a mesh written as "tensor=8" or "data=2,tensor=4", in the order of `MESH_AXES`.

    Raises:
        UnsupportedError: an unknown axis, an axis named twice, or a size that is not a positive number.
    """
    return dict(_in_order(_axes(text)[0]))


def strategy_with(rules: Rules | None, usual: Strategy = DEFAULT_STRATEGY) -> Strategy:
    """The usual table with a user's own rules in it.

    Raises:
        UnsupportedError: an unknown logical or mesh axis.
    """
    if not rules:
        return usual
    table = dict(usual.rules)
    for logical, cut in rules.items():
        mesh_axes = () if cut is None else (cut,) if isinstance(cut, str) else tuple(cut)
        _known("logical axis", (logical,), LOGICAL_AXES)
        _known("mesh axis", mesh_axes, MESH_AXES)
        table[logical] = mesh_axes
    return Strategy(tuple(table.items()))


def _known(kind: str, given: Iterable[object], known: Iterable[str]) -> None:
    names = sorted(known)
    for name in given:
        if name not in names:
            raise UnsupportedError(
                f"the sharding rules name the {kind} {name!r}, but there is none of that name: the {kind[:-2]}es are "
                f"{', '.join(names)}; correct it."
            )


def _named(name: str, num_devices: int, argument: str) -> dict[str, int]:
    axes = NAMED[name]
    if num_devices == 1:
        return {}
    sizes = _even_factors(num_devices, len(axes))
    if sizes is None:
        smallest = 2 ** len(axes)
        possible = [str(n) for n in range(smallest, 65) if _even_factors(n, len(axes))]
        raise UnsupportedError(
            f"{argument} {name!r} was asked for, which cuts along {' and '.join(axes)}, but {num_devices} "
            f"devices cannot be shared by {len(axes)} axes of two or more: take {', '.join(possible[:6])} or another "
            "such number of devices, or a strategy with fewer axes such as 'fsdp'."
        )
    return dict(zip(axes, sizes, strict=True))


def _even_factors(number: int, count: int) -> tuple[int, ...] | None:
    """`number` as a product of `count` factors of two or more, ascending and as even as can be, or None."""
    if count == 1:
        return (number,) if number > 1 else None
    found = [
        (first, *rest)
        for first in range(2, int(number ** (1 / count) + 1e-9) + 1)
        if number % first == 0 and (rest := _even_factors(number // first, count - 1)) and rest[0] >= first
    ]
    return min(found, key=lambda factors: (factors[-1], factors), default=None)


def _shape(text: str) -> dict[str, int]:
    sizes = [int(size) for size in text.split("x")]
    if len(sizes) not in SHAPES or 0 in sizes:
        raise UnsupportedError(
            f"the mesh shape {text!r} was asked for, but a shape has one to three sizes of 1 or more (tensor, data × "
            "tensor, or data × fsdp × tensor): write such as '2x4', or name the axes as in 'data=2,tensor=4'."
        )
    return dict(zip(SHAPES[len(sizes)], sizes, strict=True))


def _axes(text: str) -> tuple[dict[str, int], dict[str, int]]:
    """Devices along each axis in all, and slices along it."""
    inside: dict[str, int] = {}
    between: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(rf"\s*({re.escape(DCN)})?(\w+)\s*=\s*(\d+)\s*", part)
        sizes = between if match and match[1] else inside
        if match is None or match[2] not in MESH_AXES or int(match[3]) < 1 or match[2] in sizes:
            raise UnsupportedError(
                f"the mesh {text!r} was asked for, but {part.strip()!r} in it is not an axis and its size: write for "
                f"example 'data=2,tensor=4', with each of {', '.join(MESH_AXES)} at most once, and once more with "
                f"'{DCN}' before it where several slices lie along it."
            )
        sizes[match[2]] = int(match[3])
    return {axis: inside.get(axis, 1) * between.get(axis, 1) for axis in {**inside, **between}}, between


def _in_order(sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple((axis, sizes[axis]) for axis in MESH_AXES if axis in sizes)
