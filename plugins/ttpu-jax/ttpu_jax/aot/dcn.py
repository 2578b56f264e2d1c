"""What slices send one another over the data centre network, from the text of a scheduled program: libtpu writes each
exchange as a `send` and a `recv` with their `-done`, and leaves it to the hosts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from ttpu_jax.ops.parts import OTHER

if TYPE_CHECKING:
    from .hlo import Instruction

DCN = "dcn-"
"""How names of collectives between slices begin: `dcn-all-reduce`."""

_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_TYPE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_OPS: Mapping[str, str] = MappingProxyType({
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
})
_SLICES = re.compile(r'_xla_megascale_target="\{([\d,]+)\}x')  # "{1,2}x{0:7}": slices 1 and 2, all devices of each
_DEVICES = re.compile(r"_xla_megascale_target=\{\{([\d,]+)\}")  # {{100000,200000},...}: device 0 of slices 1 and 2
_NUMBERED = 100_000  # devices of a slice in these numbers
_SAME_DATA = ("bitcast", "copy", "get-tuple-element")


def rendezvous(transfer: Instruction) -> str | None:
    """The name that the `send` and the `recv` of one exchange between slices share. None for other instructions."""
    if transfer.op not in ("send", "recv"):
        return None
    found = _RENDEZVOUS.search(transfer.attributes)
    return found.group(1) if found and dcn_op(transfer) else None


def dcn_op(transfer: Instruction) -> str | None:
    """The collective that an exchange between slices is, by the name that it has within a slice. None for other
    instructions, and for exchanges of a kind that is not known."""
    found = _TYPE.search(transfer.attributes) if transfer.op in ("send", "recv") else None
    return _OPS.get(found.group(1)) if found else None


def group_of_slices(transfer: Instruction, slices: int) -> int:
    """How many slices exchange data: all of the program's `slices` where its text names none."""
    if found := _SLICES.search(transfer.attributes):
        return len(found.group(1).split(","))
    if found := _DEVICES.search(transfer.attributes):
        return len({int(number) // _NUMBERED for number in found.group(1).split(",")})
    return slices


def sent_part(send: Instruction, made: Mapping[str, Instruction]) -> str:
    """The part of the model (`ttpu_jax.ops.parts`) that computed what is sent: exchanges name no part of their own.

    Args:
        send: the `send`.
        made: name → instruction of its computation.
    """
    one: Instruction | None = send
    while one is not None and one.part == OTHER and (one is send or one.op in _SAME_DATA):
        one = made.get(next(iter(one.operand_names), ""))
    return OTHER if one is None else one.part
