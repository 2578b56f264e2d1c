"""Estimates the time of one execution of a program from its scheduled HLO text for a TPU chip, and what the time is
spent on.

The compiler writes its own cycle estimate on nearly every fusion. The estimate walks the schedule with one clock for
the core, one for the queue of asynchronous copies, one for each set of links that collectives use, one for the network
between slices and one for each direction between the device and its host's memory, and multiplies loops by their trip
counts. Compared with rooflines, large products reach 70 to 90 %: the estimate ranks programs, but
is not an absolute time. `Compiled.cost_analysis()["optimal_seconds"]` is not an alternative: it counts loop bodies once
and can be negative."""

import re
from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

from ttpu_core.sharding.links import DCN_SECONDS, HOP_SECONDS, collective_seconds, dcn_seconds, permute_seconds
from ttpu_core.sharding.torus import Torus
from ttpu_jax.ops.fetched import FETCH_BEGIN, FETCH_END
from ttpu_jax.ops.parts import OTHER

from .copies import COPY_DONES, COPY_STARTS, copied_bytes, host_direction
from .dcn import dcn_op, group_of_slices, rendezvous, sent_part
from .hbm import Traffic, hbm_bytes
from .hlo import (
    COLLECTIVE_OPS,
    FREE_CUSTOM_CALL,
    Instruction,
    Module,
    collective_bytes,
    computes_meanwhile,
    fused_collective,
    parse,
    received_bytes,
    replica_groups,
)
from .kernels import flops_rate, known_cost, vector_rate
from .permutes import route
from .topology import Chip, chip_named

__all__ = ["HOP_SECONDS", "Breakdown", "InstructionCost", "PartCost", "ScheduleEstimate", "Unmodelled", "estimate"]

KERNEL_BANDWIDTH, KERNEL_FLOPS = 0.86, 0.73
"""The shares of a chip's HBM bandwidth and of its FLOPs that Pallas kernels are taken to reach: those published for
ragged paged attention in decode and in prefill on TPU7x (arXiv 2604.15464)."""
LEAST_SECONDS = 1.2e-6
"""What a kernel, or another operation on HBM, without an estimate of the compiler takes at least. The estimates of the
smallest operations on HBM are 1,826 cycles on v5e, 2,121 on v5p and v6e, and 2,299 on tpu7x, which is 1.15 to 1.22
microseconds; those in VMEM alone take a tenth of that."""
_TOP = 12
_ALL_TO_ALL = ("all-to-all", "ragged-all-to-all")
_OFFLOAD_STARTS = ("async-start", "call-start")  # collectives that SparseCores perform
_COLLECTIVE_DONES = ("async-done", "call-done", *(f"{op}-done" for op in COLLECTIVE_OPS))
_WORK_WITHOUT_FUSION = ("sort", "scatter", "dynamic-update-slice", "convolution", "dot", "rng-bit-generator")


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds by cause. All but those in the background add up on the core's clock. Of what takes time in the
    background, the core waits for a part, and the rest is hidden."""

    compute: float = 0.0
    copy_wait: float = 0.0  # the core waits for a copy between HBM and VMEM
    host_wait: float = 0.0  # the core waits for a copy between HBM and the host's memory
    collective: float = 0.0  # the core takes part in a collective
    collective_wait: float = 0.0  # the core waits for the end of an asynchronous collective
    dcn_wait: float = 0.0  # the core waits for data from other slices
    collective_in_background: float = 0.0  # time of asynchronous collectives, which overlaps with the rest
    dcn_in_background: float = 0.0  # time that data takes between slices
    host_in_background: float = 0.0  # time of copies between HBM and the host's memory

    @property
    def on_core(self) -> float:
        """Time on the core's clock."""
        waits = self.copy_wait + self.host_wait + self.collective_wait + self.dcn_wait
        return self.compute + self.collective + waits


@dataclass(frozen=True, slots=True)
class InstructionCost:
    """An instruction's share of the estimate over all its executions. `kind` is a field of `Breakdown`."""

    name: str
    kind: str
    seconds: float


@dataclass(frozen=True, slots=True)
class PartCost:
    """Seconds of one part of the model (`ttpu_jax.ops.parts`) over all its executions. `kernels` is the least time of
    its kernels that state their cost, which `breakdown` leaves out."""

    part: str
    breakdown: Breakdown
    kernels: float

    @property
    def seconds(self) -> float:
        """Time on the core, with kernels. The parts' times add up to the program's where no copy outlasts it."""
        return self.breakdown.on_core + self.kernels


@dataclass(frozen=True, slots=True)
class Unmodelled:
    """An instruction that takes time but has no estimate of the compiler, such as a Pallas kernel. It counts as zero
    seconds in `seconds`, and with its bytes where HBM is shared. `roofline_seconds`, of one execution, is the least
    time in which the chip makes the FLOPs and moves the bytes that the kernel states, or that it is known to take
    (`ttpu_jax.aot.kernels`); None for others."""

    name: str
    op: str
    count: int
    roofline_seconds: float | None = None
    part: str = OTHER


@dataclass(frozen=True, slots=True)
class ScheduleEstimate:
    """Estimated seconds of one execution (all devices work at the same time), and the parts without an estimate.
    `seconds` counts kernels as no time. `seconds_with_kernels` counts them with the least time that the cost they state
    allows, during which copies and collectives in the background go on. `hbm_seconds` is what all bytes between HBM and
    the core take one after another (`ttpu_jax.aot.hbm`): a prediction below it lets copies in the background and the
    core's own reads have the whole bandwidth at once. `total_seconds` counts kernels at the shares of the chip's rates
    that `KERNEL_BANDWIDTH` and `KERNEL_FLOPS` name, and so what else has no estimate of the compiler, such as gathers
    of rows, scatters and sorts, with what they move between HBM and the core, but kernels and what moves anything
    with no less than `LEAST_SECONDS`; it lets copies in the background and the core's own reads have half of the
    bandwidth each while both go on."""

    seconds: float
    seconds_with_kernels: float
    hbm_seconds: float
    total_seconds: float
    breakdown: Breakdown
    parts: tuple[PartCost, ...]  # costliest first
    top: tuple[InstructionCost, ...]  # the costliest instructions, costliest first
    unmodelled: tuple[Unmodelled, ...]
    loops_without_trip_count: tuple[str, ...]  # counted as one iteration each

    @property
    def kernel_seconds(self) -> float:
        """The least time of the kernels that state their cost, which `seconds` leaves out."""
        return sum(one.count * (one.roofline_seconds or 0.0) for one in self.unmodelled)


def estimate(
    hlo_text: str,
    chip: str,
    kernels: Mapping[str, float] | None = None,
    torus: Torus | None = None,
    slices: int = 1,
) -> ScheduleEstimate:
    """Estimate a program from its scheduled HLO text and the name of its chip ("v5e").

    Args:
        torus: the slice's interconnect, with the program's devices in their order; None takes an all-to-all as one
            around a ring, and devices that send to one another as neighbours on rings.
        kernels: seconds of one execution of kernels, by their names without a number.
        slices: that the program runs on.

    Raises:
        UnsupportedError: an unknown chip.
        ValueError: the text is not an HLO module.
    """
    walk = _Walk(parse(hlo_text), chip_named(chip), torus, slices)
    ledger = _Ledger()
    seconds = walk.run(walk.module.entry, 1, ledger)
    return ScheduleEstimate(
        seconds=seconds,
        seconds_with_kernels=replace(walk, kernels=kernels or {}).run(walk.module.entry, 1, _Ledger()),
        total_seconds=replace(walk, kernels=kernels or {}, traffic=Traffic(walk.module)).run(
            walk.module.entry, 1, _Ledger()
        ),
        hbm_seconds=hbm_bytes(walk.module) / walk.chip.hbm_bytes_per_second,
        breakdown=ledger.breakdown(),
        parts=ledger.parts(),
        top=ledger.top(),
        unmodelled=tuple(ledger.unmodelled),
        loops_without_trip_count=tuple(ledger.loops_without_trip_count),
    )


@dataclass(slots=True)
class _Ledger:
    """Collects the seconds of a walk."""

    # (kind, instruction name, part) -> seconds
    costs: defaultdict[tuple[str, str, str], float] = field(default_factory=lambda: defaultdict(float))
    unmodelled: list[Unmodelled] = field(default_factory=list)
    loops_without_trip_count: list[str] = field(default_factory=list)

    def add(self, kind: str, instruction: Instruction, seconds: float, part: str | None = None) -> None:
        """`part` is of instructions that name none themselves."""
        self.costs[kind, instruction.name, part or instruction.part] += seconds

    def breakdown(self, part: str | None = None) -> Breakdown:
        """Of a part; None is all."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for (kind, _, of), cost in self.costs.items():
            if part in (None, of):
                seconds[kind] += cost
        return Breakdown(**seconds)

    def parts(self) -> tuple[PartCost, ...]:
        """Of each part that takes any time."""
        kernels: defaultdict[str, float] = defaultdict(float)
        for one in self.unmodelled:
            kernels[one.part] += one.count * (one.roofline_seconds or 0.0)
        names = dict.fromkeys([*(of for (*_, of) in self.costs), *kernels])
        costs = (PartCost(name, self.breakdown(name), kernels[name]) for name in names)
        return tuple(sorted(costs, key=lambda cost: cost.seconds, reverse=True))

    def top(self) -> tuple[InstructionCost, ...]:
        on_core = [
            InstructionCost(name, kind, seconds)
            for (kind, name, _), seconds in self.costs.items()
            if not kind.endswith("_in_background")
        ]
        return tuple(sorted(on_core, key=lambda cost: cost.seconds, reverse=True)[:_TOP])


@dataclass(slots=True)
class _InSteps:
    """A collective of several steps around a ring, each of which the core begins: the first where the collective
    starts, others within fusions that it goes on in, the rest where it ends.

    left: seconds that the links take for steps that have not begun.
    ready: the time at which those that have begun are done.
    """

    left: float
    ready: float


@dataclass(slots=True)
class _Clocks:
    """Seconds since a computation began: the core's clock, and the times at which queued copies and collectives
    finish. Permutes that use different links, such as those that send opposite ways, go on at once."""

    made: Mapping[str, Instruction]
    core: float = 0.0
    copies: float = 0.0
    busy: dict[frozenset[Hashable] | None, float] = field(default_factory=dict)  # links → time; None: all of them
    ready: dict[str, float] = field(default_factory=dict)  # instruction → time at which the work it started finishes
    in_steps: dict[str | None, _InSteps] = field(default_factory=dict)  # by channel, which fusions repeat
    copying: list[str] = field(default_factory=list)  # names of copies that may be under way
    lanes: dict[str, float] = field(default_factory=dict)  # to other slices, and each way to the host → time
    parts: dict[str, str] = field(default_factory=dict)  # `recv` → part of the model that computed what is exchanged

    def queue_copy(self, name: str, seconds: float) -> None:
        self.copies = max(self.copies, self.core) + seconds
        self.ready[name] = self.copies
        self.copying.append(name)

    def queue_in_lane(self, lane: str, name: str, seconds: float, latency: float = 0.0) -> None:
        """Start to send data when those before in the same lane are sent."""
        self.lanes[lane] = max(self.lanes.get(lane, 0.0), self.core) + seconds
        self.ready[name] = self.lanes[lane] + latency

    def work(self, seconds: float, in_hbm: float = 0.0) -> None:
        """Advance the core by work that takes `seconds` alone, and HBM's whole bandwidth for `in_hbm` of them. Copies
        under way meanwhile get half of the bandwidth, and the work the other half."""
        begun = self.core
        under_way = max(0.0, self.copies - begun)
        both = min(under_way, in_hbm)
        self.core += max(seconds, in_hbm + both)
        if not both:
            return
        self.copying = [name for name in self.copying if self.ready[name] > begun]
        for name in self.copying:
            self.ready[name] += min(in_hbm, self.ready[name] - begun)
        self.copies += both

    def queue_collective(self, name: str, seconds: float, links: frozenset[Hashable] | None = None) -> None:
        """Start a collective when the links that it uses are free. `links` None is all links."""
        shared = (at for used, at in self.busy.items() if used is None or links is None or not used.isdisjoint(links))
        self.busy[links] = self.ready[name] = max(self.core, *shared, 0.0) + seconds

    def wait_until(self, moment: float) -> float:
        """Advance the core to `moment` if that is later. Returns the waiting time."""
        waited = max(0.0, moment - self.core)
        self.core += waited
        return waited


@dataclass(frozen=True, slots=True)
class _Walk:
    """One pass over a program's schedule."""

    module: Module
    chip: Chip
    torus: Torus | None = None  # None: all-to-alls and permutes go around rings
    slices: int = 1
    kernels: Mapping[str, float] | None = None  # None: they take no time
    traffic: Traffic | None = None  # None: HBM's bandwidth is not shared, and kernels take their least time

    def run(self, computation: str, count: int, ledger: _Ledger) -> float:
        """Seconds of one execution. The seconds of all `count` executions are entered into the ledger."""
        body = self.module.body(computation)
        clocks = _Clocks(made={one.name: one for one in body})
        for instruction in body:
            self._step(instruction, clocks, count, ledger)
        return max(clocks.core, clocks.copies, *clocks.lanes.values())

    def _step(self, instruction: Instruction, clocks: _Clocks, count: int, ledger: _Ledger) -> None:
        op = instruction.op
        if op in ("while", "call", "conditional"):
            clocks.core += self._control_flow(instruction, count, ledger)
        elif op in COPY_STARTS:
            self._copy(instruction, clocks, count, ledger)
        elif op in COPY_DONES:
            self._wait("copy_wait", instruction, clocks, count, ledger)
        elif op == "recv-done":
            self._wait("dcn_wait", instruction, clocks, count, ledger)
        elif op in _COLLECTIVE_DONES:
            self._wait("collective_wait", instruction, clocks, count, ledger)
        elif op in _OFFLOAD_STARTS:
            self._offload(instruction, clocks, count, ledger)
        elif instruction.collective_op is not None:
            self._collective(instruction, clocks, count, ledger)
        elif op == "fusion":
            self._fusion(instruction, clocks, count, ledger)
        elif instruction.estimated_cycles is not None:
            self._compute(instruction, clocks, count, ledger)
        elif op == "custom-call" and instruction.name.startswith(FETCH_BEGIN):
            self._fetch(instruction, clocks)
        elif op == "custom-call" and instruction.name.startswith(FETCH_END):
            self._fetched(instruction, clocks, count, ledger)
        elif op == "send":
            self._send(instruction, clocks, count, ledger)
        elif op in _WORK_WITHOUT_FUSION or (
            op == "custom-call" and not FREE_CUSTOM_CALL.search(instruction.attributes)
        ):
            roofline = self._roofline(instruction)
            ledger.unmodelled.append(Unmodelled(instruction.name, op, count, roofline, instruction.part))
            if self.kernels is not None:
                self._kernel(instruction, clocks, roofline)

    def _copy(self, start: Instruction, clocks: _Clocks, count: int, ledger: _Ledger) -> None:
        direction = host_direction(start)
        if direction is None:
            clocks.queue_copy(start.name, copied_bytes(start) / self.chip.hbm_bytes_per_second)
            return
        seconds = copied_bytes(start) / self.chip.host_bytes_per_second
        clocks.queue_in_lane(direction, start.name, seconds)
        ledger.add("host_in_background", start, seconds * count)

    def _send(self, send: Instruction, clocks: _Clocks, count: int, ledger: _Ledger) -> None:
        """Let data of this slice and of others go both ways until the `recv` of the same name has its own. Devices are
        taken to send at the same moment, as they run the same program."""
        name = rendezvous(send)
        recv = next((one for one in clocks.made.values() if one.op == "recv" and rendezvous(one) == name), None)
        if name is None or recv is None:
            ledger.unmodelled.append(Unmodelled(send.name, send.op, count, part=send.part))
            return
        slices = group_of_slices(send, self.slices)
        seconds = dcn_seconds(dcn_op(send) or "", received_bytes(recv), slices, self.chip.dcn_share)
        clocks.queue_in_lane("other slices", recv.name, seconds, DCN_SECONDS)
        part = clocks.parts[recv.name] = sent_part(send, clocks.made)
        ledger.add("dcn_in_background", recv, (seconds + DCN_SECONDS) * count, part)

    def _fetch(self, begin: Instruction, clocks: _Clocks) -> None:
        """Queue the copies that a kernel begins (`ttpu_jax.ops.fetch`), in the order of its results. Behind these come
        their semaphores, of four bytes."""
        if self.traffic is not None:
            clocks.work(LEAST_SECONDS)
        for place, size in enumerate(begin.arrays):
            if size > 4:
                clocks.queue_copy(f"{begin.name}/{place}", size / self.chip.hbm_bytes_per_second)

    def _fetched(self, end: Instruction, clocks: _Clocks, count: int, ledger: _Ledger) -> None:
        """Wait for the copies whose results a kernel takes."""
        if self.traffic is not None:
            clocks.work(LEAST_SECONDS)
        parts = [clocks.made[name] for name in end.operand_names if name in clocks.made]
        keys = [f"{part.operand_names[0]}/{part.attribute('index')}" for part in parts if part.operand_names]
        ends = max((clocks.ready.get(key, 0.0) for key in keys), default=0.0)
        ledger.add("copy_wait", end, clocks.wait_until(ends) * count)

    def _kernel(self, kernel: Instruction, clocks: _Clocks, roofline: float | None) -> None:
        known = self.kernels.get(kernel.name.partition(".")[0]) if self.kernels else None
        if self.traffic is None or known is not None:
            clocks.work(known if known is not None else roofline or 0.0)
            return
        in_hbm = self._in_hbm(kernel, clocks)
        products, vector = self._flops_seconds(kernel) / KERNEL_FLOPS, self._vector_seconds(kernel)
        least = LEAST_SECONDS if in_hbm or kernel.op == "custom-call" else 0.0
        clocks.work(max(products, vector, in_hbm / KERNEL_BANDWIDTH, least), in_hbm)

    def _in_hbm(self, instruction: Instruction, clocks: _Clocks) -> float:
        """Seconds of HBM's whole bandwidth that an instruction's own reads and writes take."""
        if self.traffic is None:
            return 0.0
        return self.traffic.moved(instruction, clocks.made) / self.chip.hbm_bytes_per_second

    def _roofline(self, kernel: Instruction) -> float | None:
        """The least time of a kernel; None where its cost is not known."""
        cost = kernel.stated_cost or known_cost(kernel)
        if cost is None:
            return None
        in_hbm = cost[1] / self.chip.hbm_bytes_per_second
        return max(self._flops_seconds(kernel), self._vector_seconds(kernel), in_hbm)

    def _flops_seconds(self, kernel: Instruction) -> float:
        """What the FLOPs of a kernel take at the chip's rate, for as many rows as there are on average."""
        flops, _ = kernel.stated_cost or known_cost(kernel) or (0, 0)
        return flops * kernel.filled_share / flops_rate(kernel, self.chip)

    def _vector_seconds(self, kernel: Instruction) -> float:
        """What the operations that a kernel states for the vector unit take, for as many rows as there are on average.
        """
        return kernel.stated_vector_operations * kernel.filled_share / vector_rate(self.chip)

    def _control_flow(self, instruction: Instruction, count: int, ledger: _Ledger) -> float:
        if instruction.op == "call":
            return self.run(self.module.callee(instruction) or "", count, ledger)
        if instruction.op == "conditional":
            return self._slowest_branch(instruction, count, ledger)
        trips = self.module.trip_count(instruction)
        if trips is None:
            ledger.loops_without_trip_count.append(instruction.name)
            trips = 1
        return trips * self.run(instruction.attribute("body") or "", count * trips, ledger)

    def _slowest_branch(self, conditional: Instruction, count: int, ledger: _Ledger) -> float:
        slowest, slowest_ledger = 0.0, _Ledger()
        for branch in self.module.branches(conditional):
            own = _Ledger()
            seconds = self.run(branch, count, own)
            if seconds > slowest:
                slowest, slowest_ledger = seconds, own
            ledger.unmodelled += own.unmodelled
            ledger.loops_without_trip_count += own.loops_without_trip_count
        for key, cost in slowest_ledger.costs.items():
            ledger.costs[key] += cost
        return slowest

    def _wait(self, kind: str, done: Instruction, clocks: _Clocks, count: int, ledger: _Ledger) -> None:
        started = done.operand_names[-1] if done.operand_names else ""
        if started in clocks.made and host_direction(clocks.made[started]):
            kind = "host_wait"
        waited = clocks.wait_until(clocks.ready.get(started, 0.0))
        ledger.add(kind, done, waited * count, clocks.parts.get(started))

    def _compute(self, instruction: Instruction, clocks: _Clocks, count: int, ledger: _Ledger) -> None:
        seconds = (instruction.estimated_cycles or 0) / self.chip.clock_hz
        clocks.work(seconds, self._in_hbm(instruction, clocks))
        ledger.add("compute", instruction, seconds * count)

    def _collective(self, instruction: Instruction, clocks: _Clocks, count: int, ledger: _Ledger) -> None:
        op = instruction.collective_op or ""
        seconds = self._seconds(op, collective_bytes(instruction), instruction, _driven_axes(instruction))
        if instruction.op.endswith("-start"):
            self._in_background(instruction, seconds, clocks, count, ledger)
        else:
            clocks.core += seconds
            ledger.add("collective", instruction, seconds * count)

    def _offload(self, start: Instruction, clocks: _Clocks, count: int, ledger: _Ledger) -> None:
        seconds = self._inner_seconds(start)
        if seconds is None:
            ledger.unmodelled.append(Unmodelled(start.name, start.op, count, part=start.part))
        else:
            self._in_background(start, seconds, clocks, count, ledger)

    def _fusion(self, fusion: Instruction, clocks: _Clocks, count: int, ledger: _Ledger) -> None:
        cycles = fusion.estimated_cycles
        fused = None if computes_meanwhile(self.module, fusion) else fused_collective(self.module, fusion)
        begun = clocks.core
        if fusion.name.startswith("async-collective-start"):
            self._begin_steps(fusion, clocks, count, ledger)
        elif fusion.name.startswith("async-collective-done"):
            self._end_steps(fusion, clocks, count, ledger)
        elif fused and (cycles is None or "all-reduce-scatter" in (self.module.callee(fusion) or "")):
            seconds = self._fused_seconds(fusion, *fused)
            clocks.core += seconds
            ledger.add("collective", fusion, seconds * count)
        elif cycles is not None:
            if fused:  # it begins and ends within the fusion, whose estimate leaves it out
                self._in_background(fusion, self._fused_seconds(fusion, *fused), clocks, count, ledger)
            self._compute(fusion, clocks, count, ledger)
            if fused:
                ledger.add("collective_wait", fusion, clocks.wait_until(clocks.ready[fusion.name]) * count)
        else:
            ledger.unmodelled.append(Unmodelled(fusion.name, fusion.op, count, part=fusion.part))
            if self.kernels is not None:
                self._kernel(fusion, clocks, None)
        if computes_meanwhile(self.module, fusion):
            self._take_steps(fusion, clocks, begun)

    def _begin_steps(self, start: Instruction, clocks: _Clocks, count: int, ledger: _Ledger) -> None:
        for one in self._inner_collectives(start):
            seconds = self._seconds(one.op, collective_bytes(one), one, _driven_axes(one))
            first = seconds / max(1, self.module.group_size(one) - 1)
            clocks.queue_collective(start.name, first)
            clocks.in_steps[one.attribute("channel_id")] = _InSteps(seconds - first, clocks.ready[start.name])
            ledger.add("collective_in_background", start, seconds * count)

    def _take_steps(self, fusion: Instruction, clocks: _Clocks, begun: float) -> None:
        """Let the collectives that a fusion carries go on for as long as it computes, from the moment `begun`."""
        for inner in self._inner_collectives(fusion):
            one = clocks.in_steps.get(inner.attribute("channel_id"))
            if one is None:
                continue
            at = max(begun, one.ready, *clocks.busy.values())
            taken = min(one.left, max(0.0, clocks.core - at))
            if taken:
                one.left -= taken
                one.ready = clocks.busy[None] = at + taken

    def _end_steps(self, done: Instruction, clocks: _Clocks, count: int, ledger: _Ledger) -> None:
        for inner in self._inner_collectives(done):
            one = clocks.in_steps.pop(inner.attribute("channel_id"), None)
            if one is not None:
                at = max(clocks.core, one.ready, *clocks.busy.values()) if one.left else one.ready
                ledger.add("collective_wait", done, clocks.wait_until(at + one.left) * count)

    def _fused_seconds(self, fusion: Instruction, op: str, result_bytes: int, inner: Instruction) -> float:
        axes = max(_driven_axes(inner), _driven_axes(fusion))
        return self._seconds(op, result_bytes, inner, axes)

    def _in_background(
        self, start: Instruction, seconds: float, clocks: _Clocks, count: int, ledger: _Ledger
    ) -> None:
        permutes = start.collective_op == "collective-permute"
        clocks.queue_collective(start.name, seconds, route(start, self.torus).links if permutes else None)
        ledger.add("collective_in_background", start, seconds * count)

    def _inner_collectives(self, caller: Instruction) -> list[Instruction]:
        return [one for one in self.module.body(self.module.callee(caller)) if one.op in COLLECTIVE_OPS]

    def _inner_seconds(self, caller: Instruction) -> float | None:
        inner = self._inner_collectives(caller)
        if not inner:
            return None
        return sum(self._seconds(one.op, collective_bytes(one), one, _driven_axes(one)) for one in inner)

    def _seconds(self, op: str, result_bytes: int, collective: Instruction, axes: int) -> float:
        if op == "collective-permute":
            way = route(collective, self.torus)
            return permute_seconds(result_bytes, self.chip.ici_bytes_per_second, way.hops, way.messages)
        groups = replica_groups(collective.attributes) if op in _ALL_TO_ALL else None
        if self.torus is not None and groups is not None:
            return self.torus.all_to_all_seconds(result_bytes, groups)
        group_size = self.module.group_size(collective)
        return collective_seconds(op, result_bytes, group_size, self.chip.ici_bytes_per_second, axes)


def _driven_axes(collective: Instruction) -> int:
    """Number of dimensions of the interconnect that the collective's algorithm uses at once, from the compiler's
    notes."""
    if emitter := re.search(r'"emitter":"(\d)D', collective.attributes):
        return int(emitter.group(1))
    match = re.search(r"colors:(\d+)", collective.attributes)
    colors = int(match.group(1)) if match else 1
    if "UniDirection" in collective.attributes:  # two colors per dimension, one for each direction
        return max(1, colors // 2)
    return colors if "StrategyND" in collective.attributes else 1
