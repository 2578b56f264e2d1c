"""Counts the bytes that a compiled program moves between HBM and the core, from its scheduled HLO text. All of them
share one bandwidth, also those that are copied in the background while the core reads others itself: no execution takes
less time than they take one after another."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .copies import COPY_STARTS, copied_bytes, ends
from .hlo import (
    COLLECTIVE_OPS,
    FREE_CUSTOM_CALL,
    Instruction,
    Module,
    array_bytes,
    computes_meanwhile,
    tuple_elements,
)
from .kernels import known_cost

_ARRAY_AND_LAYOUT = re.compile(r"([a-z][a-z0-9]*\[[\d,<=]*\])(?:\{([^}]*)\})?")
_ELSEWHERE = re.compile(r"S\([1-9]\d*\)")  # VMEM and other memories beside HBM
_NOTHING = frozenset(
    {"parameter", "constant", "bitcast", "get-tuple-element", "tuple", "iota", "after-all", "partition-id", "domain"}
)
_READS_PARTS = ("dynamic-slice", "slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Operations that write a part of their first operand in place, and which operand has it."""
_ALIASES = ("bitcast", "reshape")


def hbm_bytes(module: Module) -> int:
    """The bytes of one execution on one device. Loops without a trip count count once, and of a conditional's branches
    the one that moves most."""
    return Traffic(module).of(module.entry)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Counts the bytes of a program's computations and instructions."""

    module: Module

    def of(self, computation: str) -> int:
        """The bytes of one execution of a computation."""
        body = self.module.body(computation)
        made = {one.name: one for one in body}
        return sum(self.moved(one, made) for one in body)

    def moved(self, instruction: Instruction, made: Mapping[str, Instruction]) -> int:
        """The bytes of one execution of an instruction, in a computation whose instructions are `made`, by name."""
        op = instruction.op
        if op in _NOTHING or op.endswith("-done"):
            return 0
        if op == "while":
            return self.module.executions(instruction) * self.of(instruction.attribute("body") or "")
        if op == "conditional":
            return max((self.of(one) for one in self.module.branches(instruction)), default=0)
        if op == "call":
            return self.of(self.module.callee(instruction) or "")
        if op in COPY_STARTS:
            return _copied(instruction)
        if op == "send":
            return self._operands(instruction, made)
        if op == "fusion":
            return self._of_fusion(instruction, made)
        if op in _UPDATES:
            return _update_bytes(instruction, made) if in_hbm(instruction.shape) else 0
        if op in _READS_PARTS:
            return sum(instruction.arrays) + in_hbm(instruction.shape)
        if op == "custom-call":
            return self._of_custom_call(instruction, made)
        return self._operands(instruction, made) + in_hbm(instruction.shape)

    def _of_custom_call(self, call: Instruction, made: Mapping[str, Instruction]) -> int:
        if FREE_CUSTOM_CALL.search(call.attributes):
            return 0
        cost = call.stated_cost or known_cost(call)
        if cost is not None:  # of which operands that a copy has fetched are read elsewhere
            fetched = sum(
                sum(made[name].arrays) - in_hbm(made[name].shape) for name in set(call.operand_names) if name in made
            )
            return max(0, cost[1] - fetched)
        return self._operands(call, made) + in_hbm(call.shape)

    def _operands(self, instruction: Instruction, made: Mapping[str, Instruction]) -> int:
        return sum(in_hbm(made[name].shape) for name in dict.fromkeys(instruction.operand_names) if name in made)

    def _of_fusion(self, fusion: Instruction, made: Mapping[str, Instruction]) -> int:
        body = self.module.body(self.module.callee(fusion))
        if fusion.name.startswith("async-collective"):
            moved = sum(in_hbm(one.shape) for one in body if one.op in COLLECTIVE_OPS)
            return moved + self._operands(fusion, made) if "start" in fusion.name else 0
        inner = {one.name: one for one in body}
        passing = _passing(body) if computes_meanwhile(self.module, fusion) else frozenset[str]()
        untouched = {one.operands.strip() for one in body if one.op == "parameter" and one.name in passing}
        moved = 0
        for place, name in enumerate(fusion.operand_names):
            whole = in_hbm(made[name].shape) if name in made and str(place) not in untouched else 0
            moved += min(whole, self._read(fusion, place, whole)) if whole else 0
        results, shapes = _results(body, inner), tuple_elements(fusion.shape)
        if len(results) != len(shapes):
            return moved + in_hbm(fusion.shape)
        for one, shape in zip(results, shapes, strict=True):
            if one.name not in passing and in_hbm(shape):
                moved += _update_bytes(one, inner) if one.op in _UPDATES else in_hbm(shape)
        return moved

    def _read(self, fusion: Instruction, place: int, whole: int) -> int:
        """Bytes that a fusion reads of an operand of `whole` bytes: parts where it only slices or gathers, and none
        where it only updates a part in place."""
        read, returned = self._reads(fusion, place, whole)
        return whole if returned else read

    def _reads(self, fusion: Instruction, place: int, whole: int) -> tuple[int, bool]:
        """As `_read`, of a fusion in a fusion, and whether it returns the operand as it is, for others to read."""
        body = self.module.body(self.module.callee(fusion))
        names = {one.name for one in body if one.op == "parameter" and one.operands.strip() == str(place)}
        if not names:
            return whole, False
        read = 0
        for one in body:
            places = [number for number, name in enumerate(one.operand_names) if name in names]
            if not places:
                continue
            if one.op in _ALIASES:
                names.add(one.name)
            elif one.op in _READS_PARTS and places == [0]:
                read += sum(one.arrays)
            elif one.op == "fusion":
                inner = [self._reads(one, number, whole) for number in places]
                read += sum(count for count, _ in inner)
                if any(returned for _, returned in inner):
                    names.add(one.name)
            elif not (one.op in _UPDATES and places == [0]):
                return whole, False
        return read, body[-1].name in names


def _passing(body: tuple[Instruction, ...]) -> frozenset[str]:
    """Names of what a fusion passes on to the rest of a collective that goes on meanwhile: parameters that nothing else
    reads, and the collective's own results."""
    collectives = {one.name for one in body if one.op in COLLECTIVE_OPS}
    read = {name for one in body[:-1] if one.name not in collectives for name in one.operand_names}
    return frozenset(collectives | {one.name for one in body if one.op == "parameter" and one.name not in read})


def in_hbm(shape: str) -> int:
    """Bytes of those arrays of a shape whose layout names no other memory."""
    return sum(
        sum(array_bytes(array))
        for array, layout in _ARRAY_AND_LAYOUT.findall(shape)
        if not _ELSEWHERE.search(layout)
    )


def _copied(start: Instruction) -> int:
    """Bytes of an asynchronous copy: of a whole array as often as one of its ends is in HBM, of a part once."""
    if start.op in ("slice-start", "dynamic-slice-start"):
        return copied_bytes(start)
    return copied_bytes(start) * sum(in_hbm(end) > 0 for end in ends(start))


def _results(body: tuple[Instruction, ...], inner: Mapping[str, Instruction]) -> list[Instruction]:
    """The instructions whose results a computation returns."""
    if not body:
        return []
    root = body[-1]
    ends = [inner[name] for name in root.operand_names if name in inner] if root.op == "tuple" else [root]
    return [_source(one, inner) for one in ends]


def _source(instruction: Instruction, inner: Mapping[str, Instruction]) -> Instruction:
    while instruction.op in _ALIASES and instruction.operand_names and instruction.operand_names[0] in inner:
        instruction = inner[instruction.operand_names[0]]
    return instruction


def _update_bytes(update: Instruction, made: Mapping[str, Instruction]) -> int:
    """Bytes that an update in place writes."""
    names, place = update.operand_names, _UPDATES[update.op]
    return sum(made[names[place]].arrays) if len(names) > place and names[place] in made else 0
