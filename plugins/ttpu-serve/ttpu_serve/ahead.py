"""Protocols for the programs that a backend compiles ahead for devices which need not be present. `ttpu compile` prints
them. Backends implement these protocols with types of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ttpu_serve.runner import LayerGroup


class ProgramFigures(Protocol):
    """Memory, time, collectives and kernels of one compiled program, as the compiler reports them."""

    @property
    def peak_bytes(self) -> int:
        """Peak memory on one device, in bytes."""
        ...

    @property
    def seconds(self) -> float:
        """Predicted time of one run."""
        ...

    @property
    def counts_all(self) -> bool:
        """Whether `seconds` includes every operation of the program."""
        ...

    @property
    def compile_seconds(self) -> float:
        """Time that compilation took."""
        ...

    @property
    def collectives(self) -> Sequence[tuple[str, int, int]]:
        """(name, number of calls, bytes of one device's results) of each collective."""
        ...

    @property
    def kernels(self) -> int:
        """Number of custom kernel calls."""
        ...

    @property
    def kernel_seconds(self) -> float:
        """Least time of the kernels that state their cost. `seconds` leaves them out."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        ...


class AheadProgram(Protocol):
    """One program that was compiled ahead."""

    @property
    def name(self) -> str:
        """The program's name in tables."""
        ...

    @property
    def figures(self) -> ProgramFigures:
        """The compiler's figures for the program."""
        ...

    @property
    def compiled_before(self) -> bool:
        """Whether the program came from the cache of an earlier run."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Bytes of KV pages and recurrent states that the program receives on each device."""
        ...

    @property
    def cache_in_place(self) -> bool:
        """Whether the program updates all pages and states in place, so that each is held once."""
        ...


class AheadSlice(Protocol):
    """All programs of an engine, compiled for one TPU slice."""

    @property
    def topology_name(self) -> str:
        """The slice's name, for example v5e:2x4."""
        ...

    @property
    def hbm_bytes(self) -> int:
        """Memory of each device, in bytes."""
        ...

    @property
    def mesh(self) -> Mapping[str, int]:
        """Mesh axis → number of devices along it."""
        ...

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        ...

    @property
    def page_groups(self) -> Sequence[LayerGroup]:
        """The page groups, in the order of `num_pages`."""
        ...

    @property
    def num_pages(self) -> tuple[int, ...]:
        """Pages per group that fit beside the weights."""
        ...

    @property
    def page_bytes(self) -> tuple[int, ...]:
        """Bytes of one page per group on each device, summed over the group's layers."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights on each device."""
        ...

    @property
    def programs(self) -> Sequence[AheadProgram]:
        """Every compiled program."""
        ...
