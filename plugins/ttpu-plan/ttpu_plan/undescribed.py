"""Plans for models that no plugin describes: what of their weights and cache each device holds on the meshes of a
slice, and how fast a decode step can be at most. What the programs need beside them only the compiler says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from ttpu_core.backend import PlansWithoutPlugin
from ttpu_core.cli.console import in_bytes
from ttpu_core.sharding.hardware import CHIPS, Topology, parse_topology, slice_sizes
from ttpu_plan.links import links_of
from ttpu_plan.plan import HEADROOM

if TYPE_CHECKING:
    from rich.table import Table

    from ttpu_core.config import ModelConfig

NOTE = (
    "No plugin describes this model type: transformers' own code runs. Memory is that of its weights and its cache; "
    "what the programs need beside them, `ttpu compile-report` says. Decode steps are lower bounds: the weights and "
    "the cache are read once, and what is spread along fsdp is gathered. Nothing ran on a TPU."
)


@dataclass(frozen=True, slots=True)
class UndescribedPlan:
    """A model on one mesh of some slices. Sizes are bytes of one device.

    Attributes:
        topology: the slices' name.
        num_chips: of all slices.
        mesh: mesh axis → devices along it.
        weight_bytes: parameters and buffers.
        cache_bytes: of all rows.
        hbm_bytes: that one program may use.
        decode_seconds: the least time of a decode step.
        tokens_per_second: of all rows, at most.
    """

    topology: str
    num_chips: int
    mesh: tuple[tuple[str, int], ...]
    weight_bytes: int
    cache_bytes: int
    hbm_bytes: int
    decode_seconds: float
    tokens_per_second: float

    @property
    def fits(self) -> bool:
        """Whether weights and cache are within the share of the memory that plans may use."""
        return self.weight_bytes + self.cache_bytes <= HEADROOM * self.hbm_bytes

    @property
    def missing_bytes(self) -> int:
        """The bytes on each device by which weights and cache exceed that share."""
        return round(self.weight_bytes + self.cache_bytes - HEADROOM * self.hbm_bytes)


def undescribed_plans(
    fallback: PlansWithoutPlugin, config: ModelConfig, topology: str | None, *, batch: int, context: int, dtype: str
) -> list[UndescribedPlan]:
    """The plans on the meshes of a slice, those that fit first and of these the fastest; without a slice, the first on
    the smallest slice of each generation that one fits.

    Args:
        fallback: of the backend.
        config: of the model.
        topology: the slices' name, or None.
        batch: rows of the cache.
        context: slots of each row.
        dtype: of weights and cache.

    Raises:
        UnsupportedError: there is no such slice, the model cannot be traced, or it has fewer positions than `context`.
    """
    places = [parse_topology(topology)] if topology is not None else list(_smallest_first())
    meshes = list(dict.fromkeys(mesh for place in places for mesh in _meshes(place)))
    known = fallback.held_bytes(config, [dict(mesh) for mesh in meshes], batch=batch, context=context, dtype=dtype)
    held = dict(zip(meshes, known, strict=True))
    found: list[UndescribedPlan] = []
    for place in places:
        if topology is None and any(one.topology.partition(":")[0] == place.chip.name for one in found):
            continue
        each = []
        for mesh in _meshes(place):
            bytes_ = held[mesh]
            seconds = (bytes_.read + bytes_.cache) / place.chip.hbm_bytes_per_second
            gathered = links_of(dict(mesh), place).seconds("all-gather", bytes_.read, ("fsdp",))
            if dict(mesh)["fsdp"] > 1:
                seconds = max(seconds, sum(gathered))
            plan = UndescribedPlan(
                place.name,
                place.num_chips,
                tuple((axis, size) for axis, size in mesh if size > 1),
                bytes_.weights,
                bytes_.cache,
                place.chip.hbm_bytes,
                seconds,
                batch / seconds,
            )
            each.append(plan)
        each.sort(key=lambda one: (not one.fits, one.decode_seconds if one.fits else one.weight_bytes))
        found += each if topology is not None else [one for one in each[:1] if one.fits]
    return found


def as_json(plans: Sequence[UndescribedPlan]) -> list[dict[str, Any]]:
    """Plain values of each plan."""
    return [{**asdict(one), "mesh": dict(one.mesh), "fits": one.fits} for one in plans]


def table_of(plans: Sequence[UndescribedPlan], title: str) -> Table:
    """A table with a line for each plan; those that do not fit are dim."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    labels = ("slice", "chips", "mesh", "weights", "cache", "of", "decode step", "tokens/s")
    for label in labels:
        table.add_column(label, justify="left" if label in ("slice", "mesh") else "right", no_wrap=True)
    for one in plans:
        table.add_row(
            one.topology,
            str(one.num_chips),
            ",".join(f"{axis}={size}" for axis, size in one.mesh) or "one device",
            in_bytes(one.weight_bytes),
            in_bytes(one.cache_bytes),
            in_bytes(one.hbm_bytes),
            f"≥ {one.decode_seconds * 1e3:.2f} ms",
            f"≤ {one.tokens_per_second:,.0f}",
            style="" if one.fits else "dim",
        )
    return table


def _smallest_first() -> Iterator[Topology]:
    """The slices of each generation of chips."""
    for chip in CHIPS.values():
        for size in slice_sizes(chip):
            yield Topology(chip, size)


def _meshes(place: Topology) -> Iterator[tuple[tuple[str, int], ...]]:
    """The ways to share the devices between "fsdp" and "tensor", which stays inside a slice."""
    for tensor in range(1, place.devices_per_slice + 1):
        if place.num_devices % tensor == 0 and place.devices_per_slice % tensor == 0:
            mesh = (("fsdp", place.num_devices // tensor), ("tensor", tensor))
            assert prod(size for _, size in mesh) == place.num_devices
            yield mesh
