"""What a backend says of an engine's programs that it compiled for devices which need not be there, as `ttpu compile`
shows it. Backends fit these protocols with types of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ttpu_serve.runner import LayerGroup


class ProgramFigures(Protocol):
    """What the compiler says of a program."""

    @property
    def peak_bytes(self) -> int:
        """The most that it takes on a device."""
        ...

    @property
    def seconds(self) -> float:
        """Predicted time of one run."""
        ...

    @property
    def counts_all(self) -> bool:
        """Whether `seconds` leave nothing out."""
        ...

    @property
    def compile_seconds(self) -> float:
        """Time that compiling took."""
        ...

    @property
    def collectives(self) -> Sequence[tuple[str, int, int]]:
        """(name, number, bytes of one device's results)."""
        ...

    @property
    def kernels(self) -> int:
        """Calls of kernels."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """All figures, as JSON has them."""
        ...


class AheadProgram(Protocol):
    """One program."""

    @property
    def name(self) -> str:
        """What tables call it."""
        ...

    @property
    def figures(self) -> ProgramFigures:
        """What the compiler says of it."""
        ...

    @property
    def compiled_before(self) -> bool:
        """Whether it was kept from an earlier run."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Bytes of pages and states that it is given on each device."""
        ...

    @property
    def cache_in_place(self) -> bool:
        """Whether all of these are written where they were, and so held once."""
        ...


class AheadSlice(Protocol):
    """An engine's programs for a slice."""

    @property
    def topology_name(self) -> str:
        """The slice, as in v5e:2x4."""
        ...

    @property
    def hbm_bytes(self) -> int:
        """Memory of each device."""
        ...

    @property
    def mesh(self) -> Mapping[str, int]:
        """Mesh axis → devices along it."""
        ...

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        ...

    @property
    def page_groups(self) -> Sequence[LayerGroup]:
        """The groups of `num_pages`."""
        ...

    @property
    def num_pages(self) -> tuple[int, ...]:
        """Pages that fit beside the weights, per group."""
        ...

    @property
    def page_bytes(self) -> tuple[int, ...]:
        """Of a page of each group on each device, in all of its layers."""
        ...

    @property
    def weight_bytes(self) -> int:
        """On each device."""
        ...

    @property
    def programs(self) -> Sequence[AheadProgram]:
        """Every program."""
        ...
