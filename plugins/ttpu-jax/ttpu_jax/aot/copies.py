"""Asynchronous copies of a scheduled program: the bytes that each moves, and whether it goes to the host's memory."""

from __future__ import annotations

from typing import Literal

from .hlo import Instruction, tuple_elements

COPY_STARTS = ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start")
COPY_DONES = ("copy-done", "slice-done", "dynamic-slice-done", "dynamic-update-slice-done")

Direction = Literal["to host", "from host"]

_HOST = "S(5)"  # the memory that JAX calls `pinned_host`


def copied_bytes(start: Instruction) -> int:
    """Bytes that a copy moves. Its result also names its source, or the array that it writes a part of, and indices and
    semaphores of four bytes."""
    if start.op == "copy-start":
        return start.arrays[0]
    return min((size for size in start.arrays if size > 4), default=0)


def ends(start: Instruction) -> tuple[str, str]:
    """Shapes with layouts of what a copy reads and of what it writes, of which one may be only a part."""
    first, second, *_ = [*tuple_elements(start.shape), "", ""]
    if start.op == "copy-start":
        return second, first
    operands = tuple_elements(first)
    return operands[start.op == "dynamic-update-slice-start" and len(operands) > 1], second


def host_direction(start: Instruction) -> Direction | None:
    """Which way a copy goes between a device and its host's memory; None if it stays on the device."""
    read, written = (_HOST in end for end in ends(start))
    return "to host" if written else "from host" if read else None
