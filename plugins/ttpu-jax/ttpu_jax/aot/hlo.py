"""Parses the text of a program that XLA has compiled and scheduled (`jax.stages.Compiled.as_text()`) into
computations and instructions, and lists its collectives with their execution counts."""

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from ttpu_core.spec.arithmetic import BITS
from ttpu_jax.ops.parts import OTHER, OVERFLOW, filled_share, part_of

from .dcn import DCN, dcn_op, group_of_slices

FREE_CUSTOM_CALL = re.compile(
    r'target="(AllocateBuffer|ConcatBitcast|Assume|GatherScatterIndices|Sharding|AsyncCollective|PrepareAsyncCall)'
)
"""Custom calls that only say something to the compiler, or that start or end what other instructions count."""
COLLECTIVE_OPS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
)

_SHORT = (("bool", "pred"), ("uint", "u"), ("int", "s"), ("float", "f"), ("complex", "c"), ("_", ""))


def _hlo_name(dtype: str) -> str:
    """HLO's name of a dtype: f8e4m3fn for float8_e4m3fn, bf16 for bfloat16, s8 for int8."""
    for long, short in _SHORT:
        dtype = dtype.replace(long, short)
    return dtype


# Bits per element. Types that are not listed (token, opaque) hold no data.
_BITS: Mapping[str, int] = MappingProxyType({_hlo_name(dtype): bits for dtype, bits in BITS.items()})

_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,<=]*)\]")
_COMPUTATION = re.compile(r"(ENTRY )?%?([^\s(]+) ?\(.*->.*\{\s*$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%([^\s=]+) = ")
_NAME = re.compile(r"%([^\s,(){}]+)")
_KERNEL_METADATA = re.compile(r"(kernel_metadata=\{)\n(.*)\n(\}\})")  # the only attribute that spans several lines
_OPERATION = re.compile(r'op_name="([^"]*)"')
_COUNT = re.compile(r"(?:num_partitions|replica_count)=(\d+)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation: `%name = shape op(operands), attributes`."""

    name: str
    shape: str
    op: str
    operands: str
    attributes: str

    @property
    def arrays(self) -> tuple[int, ...]:
        """Bytes of each array in the result, in order, without padding for tiles."""
        return array_bytes(self.shape)

    @property
    def operand_names(self) -> tuple[str, ...]:
        """Names of the operands."""
        return tuple(_NAME.findall(self.operands))

    @property
    def estimated_cycles(self) -> int | None:
        """The compiler's estimate in clock cycles of one core. None for kernels and data movement."""
        match = re.search(r'"estimated_cycles":"?(\d+)', self.attributes)
        return int(match.group(1)) if match else None

    @property
    def stated_cost(self) -> tuple[int, int] | None:
        """The FLOPs and the bytes accessed that a kernel's author states (`pallas.CostEstimate`), or None."""
        numbers = self._stated()
        return None if numbers is None else (numbers.get("flops", 0), numbers.get("bytes_accessed", 0))

    @property
    def stated_vector_operations(self) -> int:
        """The transcendental operations that a kernel's author states, or 0. Other work of the vector unit is stated as
        such too."""
        return (self._stated() or {}).get("transcendentals", 0)

    def _stated(self) -> dict[str, int] | None:
        stated = re.search(r'"cost_estimate":\{([^}]*)\}', self.attributes)
        if stated is None:
            return None
        return {name: int(number) for name, number in re.findall(r'"(\w+)":"?(\d+)', stated.group(1))}

    @property
    def part(self) -> str:
        """The part of the model that it belongs to, see `ttpu_jax.ops.parts.part_of`."""
        match = _OPERATION.search(self.attributes)
        return part_of(match.group(1)) if match else OTHER

    @property
    def filled_share(self) -> float:
        """The share of a kernel's rows that are there on average, see `ttpu_jax.ops.parts.filled`."""
        match = _OPERATION.search(self.attributes)
        return filled_share(match.group(1)) if match else 1.0

    @property
    def overflows(self) -> bool:
        """Whether it runs only where a buffer is too small for a step's rows."""
        match = _OPERATION.search(self.attributes)
        return match is not None and OVERFLOW in match.group(1).split("/")

    @property
    def collective_op(self) -> str | None:
        """The collective that this instruction performs or starts. None for the end of a collective and for other
        instructions."""
        op = self.op.removesuffix("-start")
        return op if op in COLLECTIVE_OPS else None

    def attribute(self, key: str) -> str | None:
        """The value of `key=value`, without a leading `%`, or None."""
        match = _attribute_pattern(key).search(self.attributes)
        return match.group(1) if match else None


@dataclass(frozen=True, slots=True)
class Module:
    """A whole program. `computations` are in text order, callees before their callers."""

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str
    num_devices: int

    def body(self, computation: str | None) -> tuple[Instruction, ...]:
        """The instructions of a computation. Empty for an unknown name."""
        return self.computations.get(computation or "", ())

    def callee(self, instruction: Instruction) -> str | None:
        """The computation that a fusion, call or asynchronous start runs, or None."""
        return instruction.attribute("calls") or instruction.attribute("to_apply")

    def branches(self, conditional: Instruction) -> tuple[str, ...]:
        """The computations that a conditional chooses from."""
        names = _NAME.findall(conditional.attributes.partition("metadata=")[0])
        return tuple(name for name in names if name in self.computations)

    def trip_count(self, loop: Instruction) -> int | None:
        """The number of iterations of a `while`, or None if the text does not state it. Zero for what runs only where a
        buffer is too small (`ttpu_jax.ops.parts.OVERFLOW`).

        It comes from the compiler's annotation, or else from the only integer constant in the condition: `lax.scan`
        and `fori_loop` count from zero by one up to it. If the condition also tests data, the number is an upper
        bound."""
        if loop.overflows:
            return 0
        known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes)
        if known:
            return int(known.group(1))
        constants = [
            int(instruction.operands)
            for instruction in self.body(loop.attribute("condition"))
            if instruction.op == "constant" and re.fullmatch(r"-?\d+", instruction.operands)
        ]
        return constants[0] if len(constants) == 1 and constants[0] > 0 else None

    def executions(self, loop: Instruction) -> int:
        """The number of iterations of a `while` as reports count them: one if it is not known."""
        trips = self.trip_count(loop)
        return 1 if trips is None else trips

    def group_size(self, collective: Instruction) -> int:
        """The number of devices in each group of a collective."""
        if collective.op.startswith("collective-permute"):
            return 2
        return _group_size(collective.attributes) or self.num_devices


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a program. `count` is the product of the trip counts of the loops around it; unknown trip
    counts count as 1. Names of those between slices begin with `ttpu_jax.aot.dcn.DCN`."""

    op: str
    result_bytes: int  # on one device, of one execution
    group_size: int  # devices, or between slices how many of these
    count: int
    is_async: bool
    name: str


def parse(text: str) -> Module:
    """Parse scheduled HLO text.

    Raises:
        ValueError: the text has no entry computation.
    """
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, name = "", ""
    lines: list[Instruction] = []
    for line in _KERNEL_METADATA.sub(r"\1\2\3", text).splitlines():
        opening = _COMPUTATION.match(line) if line[:1] in ("%", "E") else None
        if opening:
            name, lines = opening.group(2), []
            entry = name if opening.group(1) else entry
        elif line.startswith("}") and name:
            computations[name] = tuple(lines)
            name = ""
        elif name and (instruction := _parse_instruction(line)):
            lines.append(instruction)
    if entry not in computations:
        raise ValueError("an HLO module was asked for, but the text has no ENTRY computation: pass Compiled.as_text().")
    header = text.partition("\n")[0]
    num_devices = math.prod(int(count) for count in _COUNT.findall(header))
    return Module(MappingProxyType(computations), entry, num_devices)


def array_bytes(shape: str) -> tuple[int, ...]:
    """The bytes of each array in `bf16[8,128]{1,0}` or `(f32[2], s4[7])`. Sub-byte types are rounded up."""
    return tuple(
        -(-_BITS[dtype] * math.prod(int(size) for size in dimensions.replace("<=", "").split(",") if size) // 8)
        for dtype, dimensions in _ARRAY.findall(shape)
        if dtype in _BITS
    )


def collective_bytes(instruction: Instruction) -> int:
    """The bytes of a collective's result on one device.

    An asynchronous start also returns its operand and bookkeeping: only the second element is its result. The buffers
    of a ragged all-to-all have room for more than comes; on average a device receives what it sends."""
    if instruction.op.endswith("-start") and instruction.op != "all-reduce-start":
        elements = tuple_elements(instruction.shape)
        result = sum(array_bytes(elements[1] if len(elements) > 1 else instruction.shape))
        return min(result, array_bytes(elements[0])[0]) if instruction.op == "ragged-all-to-all-start" else result
    return sum(instruction.arrays)


def received_bytes(recv: Instruction) -> int:
    """The bytes that a device has received after a `recv`, or sent with a `send`: the first array of its result."""
    return sum(array_bytes(tuple_elements(recv.shape)[0]))


def fused_collective(module: Module, fusion: Instruction) -> tuple[str, int, Instruction] | None:
    """(op, result bytes, the collective itself) of a fusion around a collective, or None for other fusions.

    TPU programs write a reduce-scatter as a fusion of an all-reduce and a slice."""
    callee = module.callee(fusion) or ""
    inner = next((one for one in module.body(callee) if one.op in COLLECTIVE_OPS), None)
    if inner is None:
        return None
    if inner.op == "all-reduce" and "scatter" in callee:
        return "reduce-scatter", sum(fusion.arrays), inner
    return inner.op, collective_bytes(inner), inner


def computes_meanwhile(module: Module, fusion: Instruction) -> bool:
    """Whether a fusion computes during a collective that another instruction has started. It repeats the collective in
    its text."""
    return (module.callee(fusion) or "").startswith("async_collective_fusion")


def collectives(text: str, slices: int = 1) -> tuple[Collective, ...]:
    """Every collective of a scheduled program over `slices` slices, in the order of its schedule."""
    module = parse(text)
    return tuple(_collectives(module, module.entry, 1, False, slices))


def _collectives(module: Module, computation: str, count: int, is_async: bool, slices: int) -> Iterator[Collective]:
    for instruction in module.body(computation):
        if instruction.op == "recv" and (op := dcn_op(instruction)):
            yield Collective(
                op=f"{DCN}{op}",
                result_bytes=received_bytes(instruction),
                group_size=group_of_slices(instruction, slices),
                count=count,
                is_async=True,
                name=instruction.name,
            )
        elif op := instruction.collective_op:
            yield Collective(
                op=op,
                result_bytes=collective_bytes(instruction),
                group_size=module.group_size(instruction),
                count=count,
                is_async=is_async or instruction.op.endswith("-start"),
                name=instruction.name,
            )
        elif instruction.op == "while":
            body = instruction.attribute("body") or ""
            yield from _collectives(module, body, count * module.executions(instruction), is_async, slices)
        elif instruction.op == "conditional":
            for branch in module.branches(instruction):
                yield from _collectives(module, branch, count, is_async, slices)
        elif instruction.op in ("fusion", "call", "async-start", "call-start"):
            yield from _called_collectives(module, instruction, count, is_async, slices)


def _called_collectives(
    module: Module, caller: Instruction, count: int, is_async: bool, slices: int
) -> Iterator[Collective]:
    if computes_meanwhile(module, caller) or caller.name.startswith("async-collective-done"):
        return
    fused = fused_collective(module, caller) if caller.op == "fusion" else None
    if fused is not None and fused[0] != fused[2].op:
        op, result_bytes, inner = fused
        yield Collective(op, result_bytes, module.group_size(inner), count, is_async, caller.name)
        return
    starts = caller.op.endswith("-start") or caller.name.startswith("async-collective")
    yield from _collectives(module, module.callee(caller) or "", count, is_async or starts, slices)


def _parse_instruction(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    start = match.end()
    shape_end = _closing(line, start) if line[start] == "(" else line.find(" ", start)
    opening = line.find("(", shape_end)
    closing = _closing(line, opening)
    return Instruction(
        name=match.group(1),
        shape=line[start:shape_end],
        op=line[shape_end:opening].strip(),
        operands=line[opening + 1 : closing - 1],
        attributes=line[closing:],
    )


def _closing(text: str, opening: int) -> int:
    """The index after the parenthesis that closes the one at `opening`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, opening):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.end()
    return len(text)


def tuple_elements(shape: str) -> list[str]:
    """Split `(a, (b, c), d)` into `a`, `(b, c)`, `d`. A shape that is not a tuple is its only element."""
    if not shape.startswith("("):
        return [shape]
    elements, depth = [""], 0
    for character in shape[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += character
    return elements


def _group_size(attributes: str) -> int | None:
    """Size of replica groups in their three notations: `{{0,1},{2,3}}`, `[2,4]<=[8]` and `mesh['x'=2,'y'=4] {'y'}`.

    The last may state the order of devices before its axes: `mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'x'}`."""
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return len(match.group(1).split(","))
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]", attributes):
        return int(match.group(2))
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", attributes):
        sizes = {axis: int(size) for axis, size in re.findall(r"('[^']*')=(\d+)", match.group(1))}
        # 'x':(2)4 is the part of axis 'x' that has size 4, after a part of size 2
        axes = re.findall(r"('[^']*')(?::\(\d+\)(\d+))?", match.group(2))
        return math.prod(int(part) if part else sizes.get(axis, 1) for axis, part in axes)
    return None


def replica_groups(attributes: str) -> tuple[tuple[int, ...], ...] | None:
    """The devices of each replica group in the notations `{{0,1},{2,3}}` and `[2,4]<=[4,2]T(1,0)`; None in others."""
    if match := re.search(r"replica_groups=\{(\{[\d,]+\}(?:,\{[\d,]+\})*)\}", attributes):
        return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", match.group(1)))
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        sizes = tuple(map(int, match.group(3).split(",")))
        order = tuple(map(int, match.group(4).split(","))) if match.group(4) else tuple(range(len(sizes)))
        devices = np.arange(math.prod(sizes)).reshape(sizes).transpose(order)
        return tuple(map(tuple, devices.reshape(int(match.group(1)), int(match.group(2))).tolist()))
    return None


@functools.cache
def _attribute_pattern(key: str) -> re.Pattern[str]:
    return re.compile(rf"\b{key}=%?([^\s,}}]+)")
