"""Parses the argument `parallelism_strategy`: a strategy's name, a mesh as text, or the user's own rules. The result
is a `Parallelism`: a mesh, and a table of logical axes sharded along it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod

from ttpu_core.errors import UnsupportedError
from ttpu_core.sharding.strategy import DEFAULT_STRATEGY, MESH_AXES, MeshAxes, Strategy
from ttpu_core.spec import axes
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
"""The mesh axes of each named strategy. They share the devices as evenly as the number allows; later axes get the
larger factors."""

SHAPES: Mapping[int, tuple[str, ...]] = {1: ("tensor",), 2: ("data", "tensor"), 3: ("data", "fsdp", "tensor")}
"""The mesh axes of a shape such as 2x4, by its number of sizes."""

DCN = "dcn."
SIMULATED_BY = "XLA_FLAGS=--xla_force_host_platform_device_count"
"""The setting that simulates several devices on a CPU. Another backend may have another variable."""

Rules = Mapping[str, str | Sequence[str] | None]


@dataclass(frozen=True)
class Parallelism:
    """A mesh, and how logical axes are sharded along it.

    Args:
        mesh: mesh axis → devices along it, in the order of `MESH_AXES`; empty for one device.
        dcn: mesh axis → slices along it, which the data centre network joins; only axes that span several slices.
        strategy: logical axis → mesh axes.
    """

    mesh: tuple[tuple[str, int], ...] = ()
    dcn: tuple[tuple[str, int], ...] = ()
    strategy: Strategy = DEFAULT_STRATEGY

    @property
    def num_devices(self) -> int:
        """Number of devices of the mesh."""
        return prod(size for _, size in self.mesh)

    @property
    def num_slices(self) -> int:
        """Number of slices that the mesh spans."""
        return prod(size for _, size in self.dcn)

    def __str__(self) -> str:
        """The text that `parse_parallelism` reads."""
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
    usual: Strategy = DEFAULT_STRATEGY,
) -> Parallelism:
    """The mesh that a strategy means on `num_devices` devices.

    Args:
        what: a name in `NAMED` ("fsdp", "3d"), a shape ("2x4": data × tensor), or a mesh ("data=2,tensor=4", with
            "dcn.data=2," before it for two joined slices). A name uses all devices; a mesh may use fewer.
        num_devices: number of available devices.
        rules: logical axis → the mesh axes that shard it, or None; these replace the usual rules.
        simulated_by: the setting that simulates devices on a CPU, for the error message.
        argument: the caller's name for the argument, for the error message.
        usual: the usual rules.

    Raises:
        UnsupportedError: no such strategy, axis or mesh, or these devices cannot form it.
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
    found = Parallelism(_in_order(mesh), _in_order(dcn), strategy_with(rules, usual))
    check_devices(found, num_devices, what, simulated_by)
    return found


def check_devices(parallelism: Parallelism, num_devices: int, name: str, simulated_by: str = SIMULATED_BY) -> None:
    """Check that there are enough devices.

    Raises:
        UnsupportedError: there are too few.
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


def parse_slices(text: str) -> dict[str, int]:
    """The slices along each axis of a mesh written as "dcn.data=2,tensor=4", in the order of `MESH_AXES`; those of a
    mesh that names none are an empty dict.

    Raises:
        UnsupportedError: as for `parse_mesh`.
    """
    return dict(_in_order(_axes(text)[1]))


def parse_rules(text: str) -> dict[str, tuple[str, ...] | None]:
    """Rules written as "expert=data+tensor,embed=none": logical axes, each with the mesh axes that shard it.

    Raises:
        UnsupportedError: a part that is no rule, or a logical axis named twice. `strategy_with` checks the names.
    """
    rules: dict[str, tuple[str, ...] | None] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\w+(?:\s*\+\s*\w+)*)\s*", part)
        if match is None or match[1] in rules:
            raise UnsupportedError(
                f"the sharding rules {text!r} were asked for, but {part.strip()!r} in them is not a logical axis and "
                "the mesh axes that shard it: write for example 'expert=data+tensor,embed=none', each logical axis at "
                "most once."
            )
        names = tuple(name.strip() for name in match[2].split("+"))
        rules[match[1]] = None if names == ("none",) else names
    return rules


def written_rules(rules: Rules) -> str:
    """The rules as `parse_rules` reads them."""
    texts = {name: (by,) if isinstance(by, str) else tuple(by or ()) for name, by in rules.items()}
    return ",".join(f"{name}={'+'.join(by) or 'none'}" for name, by in texts.items())


def rules_text(strategy: Strategy, usual: Strategy = DEFAULT_STRATEGY) -> str:
    """The rules that differ from the usual ones, as `parse_rules` reads them: "expert=data+tensor"; "" if none do."""
    table, default = dict(strategy.rules), dict(usual.rules)
    unlisted: dict[str, MeshAxes | None] = {axes.LOOKED_UP: None}  # any other axis is not sharded then
    changed: dict[str, MeshAxes] = {}
    for name in dict.fromkeys((*default, *table)):
        by, usually = (rules.get(name, unlisted.get(name, ())) for rules in (table, default))
        if by is not None and by != usually:
            changed[name] = by
    return written_rules(changed)


def strategy_with(rules: Rules | None, usual: Strategy = DEFAULT_STRATEGY) -> Strategy:
    """The strategy `usual` with the user's rules in place of its own.

    Raises:
        UnsupportedError: an unknown logical or mesh axis.
    """
    if not rules:
        return usual
    table = dict(usual.rules)
    for logical, by in rules.items():
        mesh_axes = () if by is None else (by,) if isinstance(by, str) else tuple(by)
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
            f"{argument} {name!r} was asked for, which shards along {' and '.join(axes)}, but {num_devices} "
            f"devices cannot be shared by {len(axes)} axes of two or more: take {', '.join(possible[:6])} or another "
            "such number of devices, or a strategy with fewer axes such as 'fsdp'."
        )
    return dict(zip(axes, sizes, strict=True))


def _even_factors(number: int, count: int) -> tuple[int, ...] | None:
    """`number` as a product of `count` factors of two or more, ascending and as even as possible, or None."""
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
    """Devices along each axis over all slices, and slices along each axis."""
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
