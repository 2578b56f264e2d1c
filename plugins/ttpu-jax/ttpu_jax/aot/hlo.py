"""Takes the text of a program that XLA has compiled and scheduled, as `jax.stages.Compiled.as_text()` gives it.
Gives its computations and instructions as frozen values, and its collectives with how often each one runs."""

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ttpu_core.spec.arithmetic import BITS

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
    """What HLO calls a dtype: float8_e4m3fn is f8e4m3fn, bfloat16 is bf16, int8 is s8."""
    for long, short in _SHORT:
        dtype = dtype.replace(long, short)
    return dtype


# Bits of an element; types not named here (token, opaque) hold no data.
_BITS: Mapping[str, int] = MappingProxyType({_hlo_name(dtype): bits for dtype, bits in BITS.items()})

_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,<=]*)\]")
_COMPUTATION = re.compile(r"(ENTRY )?%?([^\s(]+) ?\(.*->.*\{\s*$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%([^\s=]+) = ")
_NAME = re.compile(r"%([^\s,(){}]+)")
_KERNEL_METADATA = re.compile(r"(kernel_metadata=\{)\n(.*)\n(\}\})")  # the one attribute that is several lines
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
        """Bytes of each array in the result, in order, without the padding that tiling adds."""
        return array_bytes(self.shape)

    @property
    def operand_names(self) -> tuple[str, ...]:
        return tuple(_NAME.findall(self.operands))

    @property
    def estimated_cycles(self) -> int | None:
        """The compiler's own estimate, in clock cycles of one core; absent on kernels and on data movement."""
        match = re.search(r'"estimated_cycles":"?(\d+)', self.attributes)
        return int(match.group(1)) if match else None

    @property
    def collective_op(self) -> str | None:
        """Which collective this instruction performs or starts; None for the end of one and for all else."""
        op = self.op.removesuffix("-start")
        return op if op in COLLECTIVE_OPS else None

    @property
    def is_named_async(self) -> bool:
        """Whether an instruction that reads as synchronous is one whose wait was scheduled elsewhere."""
        return "async_collective_name" in self.attributes

    def attribute(self, key: str) -> str | None:
        """Returns the value of `key=value`, without a leading `%`."""
        match = _attribute_pattern(key).search(self.attributes)
        return match.group(1) if match else None


@dataclass(frozen=True, slots=True)
class Module:
    """A whole program. `computations` are in text order, callees before their callers."""

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str
    num_devices: int

    def body(self, computation: str | None) -> tuple[Instruction, ...]:
        return self.computations.get(computation or "", ())

    def callee(self, instruction: Instruction) -> str | None:
        """Returns the computation that a fusion, call or asynchronous start runs."""
        return instruction.attribute("calls") or instruction.attribute("to_apply")

    def branches(self, conditional: Instruction) -> tuple[str, ...]:
        names = _NAME.findall(conditional.attributes.partition("metadata=")[0])
        return tuple(name for name in names if name in self.computations)

    def trip_count(self, loop: Instruction) -> int | None:
        """Returns how often a `while` runs its body, or None where the text does not say.

        The compiler's annotation, or else the one integer constant in the condition: `lax.scan` and `fori_loop`
        count from zero by one up to it. Where the condition also tests data, it is an upper bound.
        """
        known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes)
        if known:
            return int(known.group(1))
        constants = [
            int(instruction.operands)
            for instruction in self.body(loop.attribute("condition"))
            if instruction.op == "constant" and re.fullmatch(r"-?\d+", instruction.operands)
        ]
        return constants[0] if len(constants) == 1 and constants[0] > 0 else None

    def group_size(self, collective: Instruction) -> int:
        """Returns how many devices take part in each group of a collective."""
        if collective.op.startswith("collective-permute"):
            return 2
        return _group_size(collective.attributes) or self.num_devices


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a program. `count` multiplies the trip counts of the loops around it, unknown ones as 1."""

    op: str
    result_bytes: int  # on one device, of one execution
    group_size: int
    count: int
    is_async: bool
    name: str


def parse(text: str) -> Module:
    """Reads scheduled HLO text; raises `ValueError` when it holds no entry computation."""
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
    """Returns the bytes of each array in `bf16[8,128]{1,0}` or `(f32[2], s4[7])`, sub-byte types rounded up."""
    return tuple(
        -(-_BITS[dtype] * math.prod(int(size) for size in dimensions.replace("<=", "").split(",") if size) // 8)
        for dtype, dimensions in _ARRAY.findall(shape)
        if dtype in _BITS
    )


def collective_bytes(instruction: Instruction) -> int:
    """Returns the bytes of a collective's result on one device.

    An asynchronous start also returns its operand and bookkeeping: only the second element is its result.
    """
    if instruction.op.endswith("-start") and instruction.op != "all-reduce-start":
        elements = _tuple_elements(instruction.shape)
        return sum(array_bytes(elements[1] if len(elements) > 1 else instruction.shape))
    return sum(instruction.arrays)


def fused_collective(module: Module, fusion: Instruction) -> tuple[str, int, Instruction] | None:
    """Returns (op, result bytes, the collective itself) of a fusion around a collective, None for other fusions.

    TPUs write a reduce-scatter as an all-reduce and a slice of it, fused.
    """
    callee = module.callee(fusion) or ""
    inner = next((one for one in module.body(callee) if one.op in COLLECTIVE_OPS), None)
    if inner is None:
        return None
    scatters = inner.op == "all-reduce" and "scatter" in callee
    return "reduce-scatter" if scatters else inner.op, sum(fusion.arrays), inner


def collectives(text: str) -> tuple[Collective, ...]:
    """Returns every collective of a scheduled program in the order of its schedule."""
    module = parse(text)
    return tuple(_collectives(module, module.entry, 1, False))


def _collectives(module: Module, computation: str, count: int, is_async: bool) -> Iterator[Collective]:
    for instruction in module.body(computation):
        if op := instruction.collective_op:
            yield Collective(
                op=op,
                result_bytes=collective_bytes(instruction),
                group_size=module.group_size(instruction),
                count=count,
                is_async=is_async or instruction.op.endswith("-start") or instruction.is_named_async,
                name=instruction.name,
            )
        elif instruction.op == "while":
            body = instruction.attribute("body") or ""
            yield from _collectives(module, body, count * (module.trip_count(instruction) or 1), is_async)
        elif instruction.op == "conditional":
            for branch in module.branches(instruction):
                yield from _collectives(module, branch, count, is_async)
        elif instruction.op in ("fusion", "call", "async-start", "call-start"):
            yield from _called_collectives(module, instruction, count, is_async)


def _called_collectives(module: Module, caller: Instruction, count: int, is_async: bool) -> Iterator[Collective]:
    callee = module.callee(caller) or ""
    if callee.startswith("async_collective_fusion"):
        return  # computes while a collective that was started elsewhere goes on, and repeats it in its text
    fused = fused_collective(module, caller) if caller.op == "fusion" else None
    if fused is not None and fused[0] != fused[2].op:
        op, result_bytes, inner = fused
        yield Collective(op, result_bytes, module.group_size(inner), count, is_async, caller.name)
        return
    starts = caller.op.endswith("-start") or caller.name.startswith("async-collective")
    yield from _collectives(module, callee, count, is_async or starts)


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
    """Returns the index after the parenthesis that closes the one at `opening`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, opening):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.end()
    return len(text)


def _tuple_elements(shape: str) -> list[str]:
    """Splits `(a, (b, c), d)` into `a`, `(b, c)`, `d`; a shape that is no tuple is its only element."""
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
    """Reads the three ways to write replica groups: `{{0,1},{2,3}}`, `[2,4]<=[8]` and `mesh['x'=2,'y'=4] {'y'}`.

    The last may say before its axes how devices are ordered: `mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'x'}`.
    """
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


@functools.cache
def _attribute_pattern(key: str) -> re.Pattern[str]:
    return re.compile(rf"\b{key}=%?([^\s,}}]+)")
