"""Ahead-of-time compilation: the HLO parser on small texts, and libtpu on small programs. No TPU is needed."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise, starmap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.layout import Layout
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ttpu_core.errors import MissingDependencyError, UnsupportedError
from ttpu_core.sharding.hardware import slice_sizes
from ttpu_core.sharding.links import DCN_SECONDS
from ttpu_core.sharding.torus import Torus
from ttpu_jax.aot import hlo, schedule, topology
from ttpu_jax.aot.compile import CompiledProgram, compile_for
from ttpu_jax.aot.topology import CHIPS, GIB, TpuTopology, make_mesh, tpu_topology
from ttpu_jax.compiler_flags import OVERLAP_COLLECTIVES
from ttpu_jax.ops.memories import in_vmem
from ttpu_jax.runner.compilation import Program

GROUP = "replica_groups={{0,1,2,3}}"

# A loop of 6 whose body holds a product of 1500 cycles and an all-reduce of 1 MiB over 4 devices; then a copy of 8 MiB
# that overlaps with a product of 3000 cycles.
LOOP = f"""HloModule jit_f, is_scheduled=true, num_partitions=4

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}}

%body (arg: (s32[], f32[512,512])) -> (s32[], f32[512,512]) {{
  %arg = (s32[]{{:T(128)}}, f32[512,512]{{1,0:T(8,128)}}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%arg), index=0
  %x.1 = f32[512,512]{{1,0:T(8,128)}} get-tuple-element(%arg), index=1
  %product = f32[512,512]{{1,0:T(8,128)S(1)}} fusion(%x.1), kind=kOutput, calls=%f, backend_config={{"estimated_cycles":"1500"}}
  %all-reduce.1 = f32[512,512]{{1,0:T(8,128)}} all-reduce(%product), channel_id=1, {GROUP}, to_apply=%add
  ROOT %out = (s32[]{{:T(128)}}, f32[512,512]{{1,0:T(8,128)}}) tuple(%i, %all-reduce.1)
}}

%condition (arg: (s32[], f32[512,512])) -> pred[] {{
  %limit = s32[]{{:T(128)}} constant(6)
  %arg.1 = (s32[]{{:T(128)}}, f32[512,512]{{1,0:T(8,128)}}) parameter(0)
  %i.1 = s32[]{{:T(128)}} get-tuple-element(%arg.1), index=0
  ROOT %less = pred[]{{:T(512)}} compare(%i.1, %limit), direction=LT
}}

ENTRY %main (p: f32[512,512], big: bf16[2048,2048]) -> f32[512,512] {{
  %p = f32[512,512]{{1,0:T(8,128)}} parameter(0)
  %big = bf16[2048,2048]{{1,0:T(8,128)(2,1)}} parameter(1)
  %zero = s32[]{{:T(128)}} constant(0)
  %start = (s32[]{{:T(128)}}, f32[512,512]{{1,0:T(8,128)}}) tuple(%zero, %p)
  %while.1 = (s32[]{{:T(128)}}, /*index=1*/f32[512,512]{{1,0:T(8,128)}}) while(%start), condition=%condition, body=%body
  %result = f32[512,512]{{1,0:T(8,128)}} get-tuple-element(%while.1), index=1
  %copy-start.1 = (bf16[2048,2048]{{1,0:T(8,128)(2,1)S(1)}}, bf16[2048,2048]{{1,0:T(8,128)(2,1)}}, u32[]{{:S(2)}}) copy-start(%big)
  %other = f32[512,512]{{1,0:T(8,128)}} fusion(%result), kind=kLoop, calls=%g, backend_config={{"estimated_cycles":"3000"}}
  %copy-done.1 = bf16[2048,2048]{{1,0:T(8,128)(2,1)S(1)}} copy-done(%copy-start.1)
  ROOT %kernel = f32[512,512]{{1,0:T(8,128)}} custom-call(%other, %copy-done.1), custom_call_target="tpu_custom_call"
}}
"""  # noqa: E501  # as long as the compiler writes them


def entry(*lines: str) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule m, is_scheduled=true, num_partitions=8\n\nENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def exchange(name: str, kind: str, shape: str, target: str | None = None) -> tuple[str, ...]:
    """The start of an exchange between slices, as libtpu writes it."""
    of = f'_xla_host_transfer_rendezvous="{name}_0",_xla_megascale_transfer_type="{kind}"'
    if target is not None:
        of += f",_xla_megascale_target={target}"
    frontend = f'frontend_attributes={{_xla_host_transfer_handler_name="xla_megascale_runtime",{of}}}'
    return (
        f"%{name}.t = token[] after-all()",
        f"%{name}.q = {shape} parameter(1)",
        f"%{name}.s = ({shape}, u32[], token[]) send(%{name}.q, %{name}.t), is_host_transfer=true, {frontend}",
        f"%{name}.r = ({shape}, u32[], token[]) recv(%{name}.t), is_host_transfer=true, {frontend}",
    )


def received(name: str, shape: str) -> tuple[str, ...]:
    """The end of an exchange between slices."""
    return (
        f"%{name}.sd = token[] send-done(%{name}.s), is_host_transfer=true",
        f"%{name}.rd = ({shape}, token[]) recv-done(%{name}.r), is_host_transfer=true",
    )


def work(cycles: int) -> str:
    """An operation of the core."""
    return f'%w = f32[8] fusion(%p), kind=kLoop, calls=%g, backend_config={{"estimated_cycles":"{cycles}"}}'


def only_collective(*lines: str) -> hlo.Collective:
    (collective,) = hlo.collectives(entry(*lines))
    return collective


class TestParser:
    def test_array_bytes_follow_the_type_and_ignore_layouts(self) -> None:
        shape = "(bf16[64,1024]{1,0:T(8,128)(2,1)S(1)}, s32[]{:T(128)}, s4[5], pred[3], token[], f8e4m3fn[<=7])"
        assert hlo.array_bytes(shape) == (64 * 1024 * 2, 4, 3, 3, 7)

    def test_an_instruction_is_split_into_name_shape_op_operands_and_attributes(self) -> None:
        module = hlo.parse(LOOP)
        loop = module.body(module.entry)[4]
        assert (loop.name, loop.op, loop.operands) == ("while.1", "while", "%start")
        assert loop.arrays == (4, 512 * 512 * 4)
        assert loop.attribute("body") == "body"
        assert module.body("body")[3].estimated_cycles == 1500
        assert module.num_devices == 4

    def test_the_trip_count_comes_from_the_condition(self) -> None:
        module = hlo.parse(LOOP)
        assert module.trip_count(module.body("main")[4]) == 6

    def test_the_compilers_own_trip_count_comes_first(self) -> None:
        text = LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"9"}}')
        assert hlo.collectives(text)[0].count == 9

    def test_a_trip_count_that_depends_on_data_is_unknown(self) -> None:
        text = LOOP.replace("s32[]{:T(128)} constant(6)", "s32[]{:T(128)} get-tuple-element(%arg.1), index=0")
        assert hlo.collectives(text)[0].count == 1
        assert schedule.estimate(text, "v5e").loops_without_trip_count == ("while.1",)

    def test_a_loop_for_what_has_no_room_takes_no_time(self) -> None:
        text = LOOP.replace("body=%body", 'body=%body, metadata={op_name="jit(f)/part=experts/overflow/while"}')
        assert hlo.collectives(text)[0].count == 0
        rarely, always = schedule.estimate(text, "v5e"), schedule.estimate(LOOP, "v5e")
        assert rarely.loops_without_trip_count == () and rarely.breakdown.compute < always.breakdown.compute
        assert rarely.hbm_seconds < always.hbm_seconds
        named = LOOP.replace("body=%body", 'body=%body, metadata={op_name="jit(f)/overflowing/while"}')
        assert hlo.collectives(named)[0].count == 6

    def test_a_kernels_metadata_over_several_lines_does_not_end_the_computation(self) -> None:
        kernel = (
            '%k = f32[8]{0} custom-call(%p), custom_call_target="tpu_custom_call", frontend_attributes='
            '{kernel_metadata={\n"xprof_metadata":"{\\"block_q\\": 512}"\n}}, metadata={op_name="splash"}'
        )
        text = entry(kernel, f"ROOT %r = f32[8]{{0}} all-reduce(%k), channel_id=1, {GROUP}, to_apply=%add")
        assert [one.op for one in hlo.collectives(text)] == ["all-reduce"]

    def test_a_collective_that_starts_goes_on_and_ends_in_fusions_counts_once(self) -> None:
        gather = f"f32[64]{{0}} all-gather(%p), channel_id=1, {GROUP}, dimensions={{0}}"
        names = {
            "fused_1": "async-collective-start",
            "async_collective_fusion.2": "fusion.2",
            "fused_3": "async-collective-done",
        }
        callees = "".join(
            f"%{callee} (p: f32[8]) -> f32[64] {{\n  ROOT %gather.{number} = {gather}\n}}\n\n"
            for number, callee in enumerate(names)
        )
        calls = [f"%{name} = f32[64]{{0}} fusion(%p), kind=kCustom, calls=%{callee}" for callee, name in names.items()]
        header, _, rest = entry(*calls).partition("\n\n")
        (found,) = hlo.collectives(f"{header}\n\n{callees}{rest}")
        assert (found.op, found.count, found.is_async) == ("all-gather", 1, True)

    def test_a_collective_counts_once_for_each_iteration_around_it(self) -> None:
        assert hlo.collectives(LOOP) == (
            hlo.Collective(
                op="all-reduce", result_bytes=2**20, group_size=4, count=6, is_async=False, name="all-reduce.1"
            ),
        )

    @pytest.mark.parametrize(
        ("groups", "size"),
        [
            ("replica_groups={{0,2},{1,3}}", 2),
            ("replica_groups=[2,4]<=[4,2]T(1,0)", 4),
            ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", 4),
            ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}", 8),
            ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1':(2)2}", 2),
            ("replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_0'}", 4),
            ("replica_groups={}", 8),  # none named: all of the program's devices
        ],
    )
    def test_group_size_is_read_from_every_way_to_write_groups(self, groups: str, size: int) -> None:
        line = f"ROOT %r = f32[8]{{0}} all-reduce(%p), channel_id=1, {groups}, to_apply=%add"
        assert only_collective(line).group_size == size

    def test_an_asynchronous_start_counts_its_result_and_not_its_operand(self) -> None:
        gather = only_collective(
            "%s = ((f32[8], f32[2]), (f32[64], f32[16]), u32[]) all-gather-start(%p, %q), dimensions={0}",
            "ROOT %d = (f32[64], f32[16]) all-gather-done(%s)",
        )
        assert (gather.op, gather.result_bytes, gather.is_async) == ("all-gather", 80 * 4, True)

    @pytest.mark.parametrize(("room", "counted"), [(96, 64), (32, 32)])
    def test_a_ragged_all_to_all_counts_what_a_device_sends(self, room: int, counted: int) -> None:
        numbers = "s32[8], s32[8], s32[8], s32[8]"
        exchange = only_collective(
            f"%s = ((f32[64], f32[{room}], {numbers}), f32[{room}], u32[], u32[]) ragged-all-to-all-start(%p, %q), "
            f"{GROUP}",
            f"ROOT %d = f32[{room}] ragged-all-to-all-done(%s)",
        )
        assert (exchange.op, exchange.result_bytes) == ("ragged-all-to-all", counted * 4)

    @pytest.mark.parametrize(
        ("groups", "found"),
        [
            ("replica_groups={{0,2},{1,3}}", ((0, 2), (1, 3))),
            ("replica_groups={{0,1,2,3}}", ((0, 1, 2, 3),)),
            ("replica_groups=[2,2]<=[4]", ((0, 1), (2, 3))),
            ("replica_groups=[2,4]<=[4,2]T(1,0)", ((0, 2, 4, 6), (1, 3, 5, 7))),
            ("replica_groups={}", None),
        ],
    )
    def test_the_devices_of_groups_are_read(self, groups: str, found: tuple[tuple[int, ...], ...] | None) -> None:
        assert hlo.replica_groups(f"channel_id=1, {groups}, to_apply=%add") == found

    def test_an_all_to_all_takes_as_long_as_its_busiest_link(self) -> None:
        exchange = "ROOT %r = f32[1048576]{0} all-to-all(%p), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}"
        chip = CHIPS["v5e"]
        square = Torus(((0, 0), (0, 1), (1, 0), (1, 1)), (2, 2), (False, False), chip.ici_bytes_per_second)
        seconds = schedule.estimate(entry(exchange), "v5e", torus=square).seconds
        assert seconds == pytest.approx(2 * 2**20 / chip.ici_bytes_per_second + 2 * schedule.HOP_SECONDS)
        assert seconds < schedule.estimate(entry(exchange), "v5e").seconds

    def test_an_all_reduce_fused_with_its_slice_is_a_reduce_scatter(self) -> None:
        inner = f"  ROOT %a = f32[64]{{0}} all-reduce(%i), {GROUP}, to_apply=%add\n"
        fused = f"%all-reduce-scatter (i: f32[64]) -> f32[16] {{\n{inner}}}\n\n"
        header, _, rest = entry("ROOT %f = f32[16]{0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter").partition(
            "\n\n"
        )
        (scatter,) = hlo.collectives(f"{header}\n\n{fused}{rest}")
        assert (scatter.op, scatter.result_bytes, scatter.group_size) == ("reduce-scatter", 64, 4)

    def test_text_without_an_entry_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no ENTRY computation"):
            hlo.parse("HloModule empty\n")


class TestEstimate:
    def test_a_loop_costs_its_body_times_its_trip_count(self) -> None:
        result, chip = schedule.estimate(LOOP, "v5e"), CHIPS["v5e"]
        # 2 * 3/4 of 1 MiB over both directions of a link, and 3 hops
        reduce = 1.5 * 2**20 / (2 * chip.ici_bytes_per_second) + 3 * schedule.HOP_SECONDS
        product, other = 1500 / chip.clock_hz, 3000 / chip.clock_hz
        copy = 2048 * 2048 * 2 / chip.hbm_bytes_per_second
        assert copy > other
        assert result.breakdown.compute == pytest.approx(6 * product + other)
        assert result.breakdown.collective == pytest.approx(6 * reduce)
        assert result.breakdown.copy_wait == pytest.approx(copy - other)
        assert result.seconds == pytest.approx(6 * (product + reduce) + copy)

    def test_the_costliest_instructions_are_named_first(self) -> None:
        top = schedule.estimate(LOOP, "v5e").top
        assert [cost.name for cost in top] == ["all-reduce.1", "copy-done.1", "product", "other"]
        assert (top[2].kind, top[2].seconds) == ("compute", pytest.approx(6 * 1500 / 1.5e9))

    def test_a_kernel_without_an_estimate_is_reported(self) -> None:
        assert schedule.estimate(LOOP, "v5e").unmodelled == (schedule.Unmodelled("kernel", "custom-call", 1),)

    def test_what_is_sent_by_the_host_to_no_slice_is_reported_without_an_estimate(self) -> None:
        text = entry(
            "%t = token[] after-all()",
            "%s = (f32[8], u32[], token[]) send(%p, %t), channel_id=1, is_host_transfer=true",
            "%d = token[] send-done(%s), channel_id=1, is_host_transfer=true",
        )
        assert schedule.estimate(text, "v5e").unmodelled == (schedule.Unmodelled("s", "send", 1),)

    @pytest.mark.parametrize("cycles", [0, 1_500_000, 30_000_000])
    @pytest.mark.parametrize("chip", ["v6e", "v5e"])
    def test_what_slices_exchange_takes_time_until_it_is_received(self, chip: str, cycles: int) -> None:
        """Twice the half of 64 MiB, through an eighth of the cards of a host."""
        text = entry(*exchange("a", "ALL_REDUCE", "f32[16777216]"), work(cycles), *received("a", "f32[16777216]"))
        result = schedule.estimate(text, chip, slices=2)
        data, product = 2**26 / (CHIPS[chip].dcn_bytes_per_second / 8), cycles / CHIPS[chip].clock_hz
        assert result.seconds == pytest.approx(max(data + DCN_SECONDS, product))
        assert result.breakdown.dcn_in_background == pytest.approx(data + DCN_SECONDS)
        assert result.breakdown.dcn_wait == pytest.approx(max(0.0, data + DCN_SECONDS - product))
        assert result.breakdown.on_core == pytest.approx(result.seconds)
        assert not result.unmodelled and not result.breakdown.collective_wait
        assert result.hbm_seconds == pytest.approx(2 * 2**26 / CHIPS[chip].hbm_bytes_per_second, rel=1e-3)

    def test_exchanges_between_slices_go_one_after_another(self) -> None:
        both = [line for name in "ab" for line in exchange(name, "ALL_REDUCE", "f32[16777216]")]
        text = entry(*both, *received("a", "f32[16777216]"), *received("b", "f32[16777216]"))
        result = schedule.estimate(text, "v6e", slices=2)
        assert result.seconds == pytest.approx(2 * 2**26 / 12.5e9 + DCN_SECONDS)  # the first one's latency is hidden

    @pytest.mark.parametrize(
        ("kind", "slices", "sent"),
        [
            ("ALL_REDUCE", 4, 2 * 3 / 4),
            ("ALL_GATHER", 4, 3 / 4),
            ("REDUCE_SCATTER", 4, 3),
            ("ALL_TO_ALL", 4, 3 / 4),
            ("ALL_REDUCE", 2, 1),
            ("ONE_TO_ONE", 2, 1),
        ],
    )
    @pytest.mark.parametrize("named", ["slices", "devices", "nowhere"])
    def test_a_device_sends_what_other_slices_need(self, kind: str, slices: int, sent: float, named: str) -> None:
        """The text names the slices of a group, or devices of them as 100,000 a slice and their own number."""
        group = range(1, slices + 1)
        targets = {
            "slices": f'"{{{",".join(map(str, group))}}}x{{0:7}}"',
            "devices": f"{{{{{','.join(f'{one}00003' for one in group)}}},{{500000,700000}}}}",
            "nowhere": None,
        }
        text = entry(*exchange("a", kind, "f32[1048576]", targets[named]), *received("a", "f32[1048576]"))
        result = schedule.estimate(text, "v5p", slices=slices)
        assert result.breakdown.dcn_wait == pytest.approx(sent * 2**22 / 6.25e9 + DCN_SECONDS)
        (found,) = hlo.collectives(text, slices)
        op = "collective-permute" if kind == "ONE_TO_ONE" else kind.lower().replace("_", "-")
        assert (found.op, found.group_size) == (f"dcn-{op}", slices)
        assert (found.result_bytes, found.is_async, found.count) == (2**22, True, 1)

    def test_an_exchange_between_slices_belongs_to_the_part_that_computed_what_is_sent(self) -> None:
        """libtpu names no operation at the exchange itself, and may reshape what is sent."""
        of = 'kind=kLoop, calls=%g, metadata={op_name="jit(step)/part=mlp/dot_general"}'
        token, send, recv = (line for line in exchange("a", "ALL_REDUCE", "f32[8]") if "parameter" not in line)
        text = entry(
            f"%x = f32[8] fusion(%p), {of}, backend_config={{\"estimated_cycles\":\"1500\"}}",
            "%a.q = f32[8] bitcast(%x)",
            token,
            send,
            recv,
            *received("a", "f32[8]"),
        )
        result = schedule.estimate(text, "v5e", slices=2)
        (mlp,) = result.parts
        assert mlp.part == "mlp"
        assert mlp.breakdown.dcn_wait == result.breakdown.dcn_wait > 0
        assert mlp.breakdown.dcn_in_background == result.breakdown.dcn_in_background > 0

    @pytest.mark.parametrize("chip", ["v5e", "v6e"])
    def test_copies_to_and_from_the_host_take_the_time_of_its_bus(self, chip: str) -> None:
        """Each way has its own queue. Of an array in the host's memory only a part is read, or written."""
        part, whole, index = "f32[1,1048576]{1,0}", "f32[8,1048576]{1,0:S(5)}", "s32[]{:T(128)}"
        indices = f"{index}, {index}"
        text = entry(
            f"%h = {whole} parameter(1)",
            f"%i = {index} parameter(2)",
            f"%b = (({whole}, {indices}), {part}, u32[]{{:S(2)}}) dynamic-slice-start(%h, %i, %i)",
            f"%c = {part} dynamic-slice-done(%b)",
            f"%d = (({whole}, {part}, {indices}), {whole}, u32[]{{:S(2)}}) dynamic-update-slice-start(%h, %c, %i, %i)",
            "%e = (f32[1048576]{0:S(5)}, f32[1048576]{0}, u32[]{:S(2)}) copy-start(%p)",
            "%f = (f32[1048576]{0}, f32[1048576]{0:S(5)}, u32[]{:S(2)}) copy-start(%q)",
            "%g = f32[1048576]{0} copy-done(%f)",
            f"%j = {whole} dynamic-update-slice-done(%d)",
            "ROOT %k = f32[1048576]{0:S(5)} copy-done(%e)",
        )
        result, one = schedule.estimate(text, chip), 2**22 / CHIPS[chip].host_bytes_per_second
        assert result.seconds == pytest.approx(3 * one, rel=1e-6)  # of four, two go at once
        assert result.breakdown.host_in_background == pytest.approx(4 * one)
        assert result.breakdown.host_wait == pytest.approx(3 * one) and not result.breakdown.copy_wait
        assert result.hbm_seconds == pytest.approx(4 * 2**22 / CHIPS[chip].hbm_bytes_per_second, rel=1e-3)

    def test_a_part_that_is_written_in_the_background_is_a_copy_in_hbm_too(self) -> None:
        part, whole = "f32[1,1048576]{1,0:S(1)}", "f32[8,1048576]{1,0}"
        text = entry(
            f"%d = (({whole}, {part}, s32[]), {whole}, u32[]{{:S(2)}}) dynamic-update-slice-start(%p, %q, %i)",
            f"ROOT %j = {whole} dynamic-update-slice-done(%d)",
        )
        result = schedule.estimate(text, "v5e")
        assert result.seconds == result.breakdown.copy_wait == result.hbm_seconds == pytest.approx(2**22 / 819e9)

    def test_the_cost_that_a_kernel_states_gives_its_least_time_apart(self) -> None:
        cost = 'backend_config={"cost_estimate":{"flops":"%d","transcendentals":"0","bytes_accessed":"%d"}}'
        text = entry(
            f'%a = f32[8] custom-call(%p), custom_call_target="tpu_custom_call", {cost % (394_000_000, 8)}',
            f'ROOT %b = f32[8] custom-call(%a), custom_call_target="tpu_custom_call", {cost % (8, 8_190_000)}',
        )
        result = schedule.estimate(text, "v5e")
        assert [one.roofline_seconds for one in result.unmodelled] == [pytest.approx(2e-6), pytest.approx(1e-5)]
        assert result.seconds == 0 and result.kernel_seconds == pytest.approx(12e-6)
        assert result.seconds_with_kernels == pytest.approx(12e-6)
        assert result.total_seconds == pytest.approx(2e-6 / schedule.KERNEL_FLOPS + 1e-5 / schedule.KERNEL_BANDWIDTH)
        assert schedule.estimate(text, "v5e", {"a": 5e-6}).seconds_with_kernels == pytest.approx(15e-6)

    @pytest.mark.parametrize(
        "work",
        [
            "%k = f32[1024]{0} dynamic-update-slice(%w, %q, %i)",
            "%k = f32[8] fusion(%p), kind=kCustom, calls=%rows",
            '%k = f32[8] custom-call(%p), custom_call_target="tpu_custom_call", '
            'backend_config={"cost_estimate":{"flops":"8","transcendentals":"0","bytes_accessed":"8"}}',
        ],
        ids=["write", "fusion", "kernel"],
    )
    def test_no_operation_without_an_estimate_takes_less_than_the_smallest_that_has_one(self, work: str) -> None:
        """But for those that only say something to the compiler."""
        free = '%f = token[] custom-call(%s), custom_call_target="PrepareAsyncCallDone"'
        rest = free, "ROOT %r = f32[8] bitcast(%p)"
        given = "%w = f32[1024]{0} parameter(1)", "%i = s32[] parameter(2)", "%q = f32[8]{0} parameter(3)"
        text = entry(*given, work, *rest)
        result = schedule.estimate(text, "v5e")
        assert result.total_seconds == pytest.approx(schedule.LEAST_SECONDS)
        assert result.seconds == 0 and result.seconds_with_kernels < 1e-9
        assert [one.name for one in result.unmodelled] == ["k"]

    def test_what_stays_in_vmem_has_no_such_least_time(self) -> None:
        text = entry(
            "%w = f32[1024]{0:S(1)} parameter(1)",
            "%i = s32[] parameter(2)",
            "%q = f32[8]{0:S(1)} parameter(3)",
            "ROOT %k = f32[1024]{0:S(1)} dynamic-update-slice(%w, %q, %i)",
        )
        assert schedule.estimate(text, "v5e").total_seconds == 0

    @pytest.mark.parametrize(("chip", "cores"), [("v5e", 1), ("v5p", 2)])
    def test_the_vector_unit_takes_1024_numbers_a_cycle_in_each_core(self, chip: str, cores: int) -> None:
        """At no lower share, unlike products and bytes."""
        text = entry(
            'ROOT %a = f32[8] custom-call(%p), custom_call_target="tpu_custom_call", '
            'backend_config={"cost_estimate":{"flops":"8","transcendentals":"20480000","bytes_accessed":"8"}}'
        )
        result = schedule.estimate(text, chip)
        seconds = 20_000 / cores / CHIPS[chip].clock_hz
        assert result.kernel_seconds == result.total_seconds == pytest.approx(seconds)

    @pytest.mark.parametrize(
        ("operand", "seconds"), [("bf16", 2e-6), ("f32", 2e-6), ("s8", 1e-6), ("u4", 1e-6), ("f8e4m3fn", 1e-6)]
    )
    def test_flops_count_at_the_rate_of_the_operands(self, operand: str, seconds: float) -> None:
        """A v5e multiplies int8 twice as fast as bfloat16, and a kernel may multiply what it reads as it is."""
        text = entry(
            'ROOT %a = f32[8] custom-call(%p), custom_call_target="tpu_custom_call", operand_layout_constraints={'
            f's32[4]{{0}}, {operand}[8,128]{{1,0}}}}, backend_config={{"cost_estimate":{{"flops":"393500000",'
            '"transcendentals":"0","bytes_accessed":"8"}}'
        )
        (kernel,) = schedule.estimate(text, "v5e").unmodelled
        assert kernel.roofline_seconds == pytest.approx(seconds, rel=0.01)

    @pytest.mark.parametrize(
        ("tokens", "pages", "seen"), [(128, 1025, 1025), (128, 9000, 8192), (2048, 1025, 1025), (2048, 9000, 8192)]
    )
    def test_ragged_paged_attention_is_known_by_its_shapes(self, tokens: int, pages: int, seen: int) -> None:
        """Tables have room for 64 pages of each of 128 sequences; a token and page are 512 bytes, a query 1024."""
        queries = f"bf16[{tokens},4,128]"
        operands = f"s32[128]{{0}}, s32[128,64]{{1,0}}, {queries}{{2,1,0}}, bf16[{pages},128,2,128]{{3,2,1,0}}"
        text = entry(
            f'ROOT %ragged_paged_attention_kernel.1 = {queries} custom-call(%p), custom_call_target="tpu_custom_call", '
            f"operand_layout_constraints={{{operands}}}"
        )
        (kernel,) = schedule.estimate(text, "v5e").unmodelled
        pairs = tokens * seen / 128 * 128
        moved, flops = seen * 128 * 512 + 2 * tokens * 1024, 4 * 4 * 128 * pairs
        assert kernel.roofline_seconds == pytest.approx(max(moved / 819e9, flops / 197e12), rel=0.01)

    @pytest.mark.parametrize(("gradient", "products"), [("dq", 3), ("dkv", 4)])
    def test_the_flash_kernels_gradients_are_known_by_their_shapes(self, gradient: str, products: int) -> None:
        """Causal: of four blocks of queries the first attends to one block of keys, and the last to four."""
        heads = "bf16[1,2,2048,128]"
        text = entry(
            f"ROOT %flash_mha_bwd_{gradient}_block_q_major_512_block_k_512.3 = {heads} custom-call(%p), "
            f'custom_call_target="tpu_custom_call", operand_layout_constraints={{{heads}{{3,2,1,0}}, '
            f"{heads}{{3,2,1,0}}, s32[1,2048,128]{{2,1,0}}}}"
        )
        (kernel,) = schedule.estimate(text, "v5e").unmodelled
        square, seen = 2 * 2048**2, (1 + 2 + 3 + 4) / 16
        assert kernel.roofline_seconds == pytest.approx(2 * products * 128 * square * seen / 197e12)

    @pytest.mark.parametrize(
        ("work", "moved"),
        [
            ("%k = bf16[4096,1024]{1,0} fusion(%w, %p), kind=kCustom, calls=%rows", 2 * 4096 * 1024 * 2),
            ("%k = bf16[4096,1024]{1,0:S(1)} fusion(%w, %p), kind=kCustom, calls=%rows", 4096 * 1024 * 2),
            ("%k = f32[1048576]{0} sort(%v), dimensions={0}, to_apply=%less", 2 * 4 * 2**20),
            ('%k = f32[1048576]{0} custom-call(%v), custom_call_target="tpu_custom_call"', 2 * 4 * 2**20),
        ],
        ids=["rows", "rows into VMEM", "sort", "kernel that states nothing"],
    )
    def test_what_has_no_estimate_takes_as_long_as_its_bytes(self, work: str, moved: int) -> None:
        rows = [
            "%rows (a: bf16[65536,1024], b: f32[8]) -> bf16[4096,1024] {",
            "  %a = bf16[65536,1024]{1,0} parameter(0)",
            "  %b = f32[8] parameter(1)",
            "  ROOT %g = bf16[4096,1024]{1,0} gather(%a, %b), offset_dims={1}",
            "}",
            "",
        ]
        text = entry(
            "%w = bf16[65536,1024]{1,0} parameter(1)",
            "%v = f32[1048576]{0} parameter(2)",
            work,
            "ROOT %r = f32[8] bitcast(%p)",
        )
        head, _, rest = text.partition("ENTRY")
        result = schedule.estimate(f"{head}{chr(10).join(rows)}\nENTRY{rest}", "v5e")
        assert result.total_seconds == pytest.approx(moved / 819e9 / schedule.KERNEL_BANDWIDTH, rel=1e-4)
        assert result.seconds == result.seconds_with_kernels == result.kernel_seconds == 0
        assert [one.roofline_seconds for one in result.unmodelled] == [None]

    @pytest.mark.parametrize(
        "work",
        [
            '%k = f32[8] custom-call(%p), custom_call_target="tpu_custom_call", '
            'backend_config={"cost_estimate":{"flops":"0","transcendentals":"0","bytes_accessed":"4194304"}}',
            '%k = f32[8] reduce(%w), dimensions={0}, to_apply=%add, backend_config={"estimated_cycles":"1500"}',
        ],
        ids=["kernel", "operation"],
    )
    @pytest.mark.parametrize("copied", [0.5, 1, 3])
    def test_a_copy_and_what_reads_meanwhile_share_the_bandwidth(self, work: str, copied: float) -> None:
        """Of the shorter one, both get half, and together they take no less than one after another."""
        rows = int(copied * 2**20)
        text = entry(
            "%w = f32[1048576]{0} parameter(1)",
            f"%s = (f32[{rows}]{{0:S(1)}}, f32[{rows}], u32[]) copy-start(%p)",
            work,
            f"ROOT %d = f32[{rows}]{{0:S(1)}} copy-done(%s)",
        )
        result, one = schedule.estimate(text, "v5e"), 4 * 2**20 / 819e9
        assert result.seconds == pytest.approx(copied * one, rel=0.25)
        assert result.hbm_seconds == pytest.approx((1 + copied) * one, rel=1e-4)
        assert result.total_seconds == pytest.approx((1 + copied) * one, rel=1e-4)

    def test_what_reads_without_a_copy_under_way_waits_for_none(self) -> None:
        config = 'backend_config={"estimated_cycles":"30000"}'
        text = entry(
            "%w = f32[1048576]{0} parameter(1)",
            f"%k = f32[8] reduce(%w), dimensions={{0}}, to_apply=%add, {config}",
            "%s = (f32[1048576]{0:S(1)}, f32[1048576], u32[]) copy-start(%p)",
            "ROOT %d = f32[1048576]{0:S(1)} copy-done(%s)",
        )
        result, one = schedule.estimate(text, "v5e"), 4 * 2**20 / 819e9
        assert result.total_seconds == result.seconds == pytest.approx(30_000 / 1.5e9 + one)

    def test_copies_that_a_kernel_begins_end_one_after_another(self) -> None:
        """They go on while the core works, and those that a kernel waits for are there before the last one."""
        stated = 'backend_config={"cost_estimate":{"flops":"0","transcendentals":"0","bytes_accessed":"12582912"}}'
        fetched = "f32[1048576]{0:S(1)}"
        text = entry(
            f"%fetch_begin.1 = ({fetched}, f32[2097152]{{0:S(1)}}, s32[]{{:S(2)}}, s32[]{{:S(2)}}) custom-call(%p), "
            f'custom_call_target="tpu_custom_call", {stated}',
            f"%a = {fetched} get-tuple-element(%fetch_begin.1), index=0",
            "%b = f32[2097152]{0:S(1)} get-tuple-element(%fetch_begin.1), index=1",
            "%s = s32[]{:S(2)} get-tuple-element(%fetch_begin.1), index=2",
            "%t = s32[]{:S(2)} get-tuple-element(%fetch_begin.1), index=3",
            f'%fetch_end.1 = {fetched} custom-call(%a, %s), custom_call_target="tpu_custom_call"',
            '%w = f32[8] fusion(%p), kind=kLoop, calls=%g, backend_config={"estimated_cycles":"15000"}',
            'ROOT %fetch_end.2 = f32[2097152]{0:S(1)} custom-call(%b, %t), custom_call_target="tpu_custom_call"',
        )
        result, one = schedule.estimate(text, "v5e"), 4 * 2**20 / 819e9
        assert result.seconds == pytest.approx(3 * one) and not result.unmodelled
        assert result.breakdown.copy_wait == pytest.approx(3 * one - 15000 / 1.5e9)
        assert result.hbm_seconds == pytest.approx(3 * one, rel=1e-4)
        assert result.total_seconds == pytest.approx(one + 15000 / 1.5e9 + 2 * schedule.LEAST_SECONDS)
        early = schedule.estimate(text.replace("custom-call(%b, %t)", "custom-call(%a, %t)"), "v5e")
        assert early.breakdown.copy_wait == pytest.approx(one)

    def test_an_asynchronous_collective_costs_only_what_is_waited_for(self) -> None:
        text = entry(
            f"%s = (f32[2097152], f32[8388608], u32[]) all-gather-start(%p), {GROUP}",
            '%w = f32[8] fusion(%p), kind=kLoop, calls=%g, backend_config={"estimated_cycles":"75000"}',
            "ROOT %d = f32[8388608] all-gather-done(%s)",
        )
        result = schedule.estimate(text, "v5e")
        gather = 0.75 * 2**25 / 90e9 + 3 * schedule.HOP_SECONDS
        assert result.seconds == pytest.approx(gather)
        assert result.breakdown.collective_wait == pytest.approx(gather - 75000 / 1.5e9)
        assert result.breakdown.collective_in_background == pytest.approx(gather)

    def test_a_collective_with_a_name_but_no_end_takes_the_cores_time_where_it_stands(self) -> None:
        named = 'frontend_attributes={async_collective_name="all-gather-start"}'
        text = entry(
            f"%a = f32[8388608] all-gather(%p), {GROUP}, {named}",
            '%w = f32[8] fusion(%p), kind=kLoop, calls=%g, backend_config={"estimated_cycles":"75000"}',
            'ROOT %u = f32[8] fusion(%a), kind=kLoop, calls=%g, backend_config={"estimated_cycles":"15000"}',
        )
        result = schedule.estimate(text, "v5e")
        gather = 0.75 * 2**25 / 90e9 + 3 * schedule.HOP_SECONDS
        assert result.breakdown.collective == pytest.approx(gather) and not result.breakdown.collective_in_background
        assert result.seconds == pytest.approx(gather + 90_000 / 1.5e9)
        assert not hlo.collectives(text)[0].is_async

    @pytest.mark.parametrize("carried", [0, 75_000, 1_500_000])
    @pytest.mark.parametrize("beside", [0, 75_000])
    def test_the_steps_of_a_gather_begin_at_its_start_within_fusions_and_at_its_end(
        self, carried: int, beside: int
    ) -> None:
        """Of three steps the first goes on beside anything, others beside what carries the gather, the rest last."""
        gather = f"  ROOT %g = f32[8388608] all-gather(%i), channel_id=7, {GROUP}, dimensions={{0}}\n"
        callees = "".join(
            f"%{name} (i: f32[2097152]) -> f32[8388608] {{\n{gather}}}\n\n"
            for name in ("starts", "async_collective_fusion.1", "ends")
        )
        lines = ["%async-collective-start.1 = (f32[8388608], s32[2]) fusion(%p), kind=kCustom, calls=%starts"]
        for name, cycles in (("other", beside), ("async_collective_fusion.1", carried)):
            if cycles:
                config = f'backend_config={{"estimated_cycles":"{cycles}"}}'
                lines.append(f"%w{len(lines)} = f32[8] fusion(%p), kind=kOutput, calls=%{name}, {config}")
        lines.append("ROOT %async-collective-done.1 = f32[8388608] fusion(%p), kind=kCustom, calls=%ends")
        header, _, rest = entry(*lines).partition("\n\n")
        result = schedule.estimate(f"{header}\n\n{callees}{rest}", "v5e")
        whole = 0.75 * 2**25 / 90e9 + 3 * schedule.HOP_SECONDS
        first, before, within = whole / 3, beside / 1.5e9, carried / 1.5e9
        begins = max(first, before)  # the second step, at the earliest
        left = max(0.0, whole - first - max(0.0, before + within - begins))
        assert result.seconds == pytest.approx(max(begins, before + within) + left)
        assert result.breakdown.collective_in_background == pytest.approx(whole)
        assert result.breakdown.collective_wait == pytest.approx(result.seconds - before - within)

    @pytest.mark.parametrize("cycles", [75_000, 1_500_000], ids=["the collective", "the product"])
    @pytest.mark.parametrize("within", [True, False], ids=["within a fusion", "started elsewhere"])
    def test_a_product_with_a_collective_takes_as_long_as_the_longer_of_both(self, within: bool, cycles: int) -> None:
        callee = "fused_computation.1" if within else "async_collective_fusion.1"
        inner = f"  ROOT %g = f32[8388608] all-gather(%i), {GROUP}, dimensions={{0}}\n"
        call = f"ROOT %f = (f32[8], f32[8388608]) fusion(%p), kind=kOutput, calls=%{callee}"
        header, _, rest = entry(f'{call}, backend_config={{"estimated_cycles":"{cycles}"}}').partition("\n\n")
        fused = f"%{callee} (i: f32[2097152]) -> f32[8388608] {{\n{inner}}}\n\n"
        result = schedule.estimate(f"{header}\n\n{fused}{rest}", "v5e")
        product, gather = cycles / 1.5e9, 0.75 * 2**25 / 90e9 + 3 * schedule.HOP_SECONDS
        assert result.seconds == pytest.approx(max(product, gather) if within else product)
        assert result.breakdown.compute == pytest.approx(product)
        assert result.breakdown.collective_in_background == pytest.approx(gather if within else 0)
        assert result.breakdown.collective_wait == pytest.approx(max(0, gather - product) if within else 0)

    def test_an_unknown_chip_is_refused(self) -> None:
        with pytest.raises(UnsupportedError, match="the chips are v4, v5e, v5p, v6e, tpu7x; write 'tpu7x'"):
            schedule.estimate(LOOP, "v7x")


class TestNames:
    @pytest.mark.parametrize(
        ("name", "advice"),
        [
            ("h100:8", "the chips are v4, v5e, v5p, v6e, tpu7x; write one of them with its size, as in 'v5e:2x4'"),
            ("v7x:2x2x1", "write 'tpu7x', as in 'tpu7x:2x2x1'"),
            ("v5litepod:2x4", "write 'v5e', as in 'v5e:2x4'"),
            ("v5litepod-8", "write 'v5e', as in 'v5e:2x4'"),
            ("v5e", "write 2 of them, as in 'v5e:2x4'"),
            ("v5e:2xfour", "is not numbers of chips joined by 'x'"),
            ("v5p:2x4", "the interconnect of v5p has 3: write 3 sizes, as in 'v5p:2x2x2'"),
            ("v5e:32x32", "which is 1024 chips, but a v5e pod has 256"),
            ("v5e:0x4", "write a size of 1 to 256 chips"),
        ],
    )
    def test_a_name_that_does_not_exist_is_refused_with_one_that_does(self, name: str, advice: str) -> None:
        with pytest.raises(UnsupportedError) as refusal:
            tpu_topology(name)
        assert advice in str(refusal.value)

    def test_without_libtpu_the_message_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(MissingDependencyError, match=r'pip install "ttpu-jax\[tpu\]"'):
            tpu_topology("v5e:2x4")


@pytest.fixture(scope="module")
def v5e() -> TpuTopology:
    pytest.importorskip("libtpu")
    return tpu_topology("v5e:2x4")


@pytest.fixture(scope="module")
def mesh(v5e: TpuTopology) -> Mesh:
    return make_mesh(v5e, {"tensor": 8})


@contextmanager
def without_shardy() -> Iterator[None]:
    """The process as torch_xla leaves it."""
    before = jax.config.jax_use_shardy_partitioner  # type: ignore[attr-defined]
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        yield
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)


def array(mesh: Mesh, shape: tuple[int, ...], *spec: str | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))


def layers(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    def layer(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return jax.lax.with_sharding_constraint(jax.nn.relu(x @ weights[0]) @ weights[1], P()), None

    return jax.lax.scan(layer, x, (up, down))[0]


@pytest.fixture(scope="module")
def program(v5e: TpuTopology, mesh: Mesh) -> CompiledProgram:
    up, down = array(mesh, (5, 1024, 4096), None, None, "tensor"), array(mesh, (5, 4096, 1024), None, "tensor")
    return compile_for(v5e, layers, array(mesh, (64, 1024)), up, down, donate_argnums=0)


def longest_steps(line: np.ndarray) -> tuple[int, int]:
    """Links between a device and the next, at most, and between the last and the first."""

    def links(one: jax.Device, other: jax.Device) -> int:
        return sum(abs(a - b) for a, b in zip(one.coords, other.coords, strict=True))

    return max(starmap(links, pairwise(line)), default=0), links(line[-1], line[0])


@pytest.mark.tpu_compile
class TestTopology:
    @pytest.mark.parametrize(
        ("name", "devices", "hosts"),
        [
            ("v5e:1x1", 1, 1),
            ("v5e:2x4", 8, 1),  # one host of eight chips, where libtpu alone would say two
            ("v6e:4x4", 16, 4),
            ("v5p:2x2x2", 8, 2),
            ("tpu7x:2x2x1", 8, 1),  # two devices a chip
            ("v4:2x2x1", 4, 1),  # megacore: one device a chip
        ],
    )
    def test_a_slice_has_its_devices_and_hosts(self, name: str, devices: int, hosts: int) -> None:
        pytest.importorskip("libtpu")
        found = tpu_topology(name)
        assert len(found.devices) == devices
        assert len({device.process_index for device in found.devices}) == hosts
        assert {device.device_kind for device in found.devices} == {found.chip.device_kind}
        assert devices == math.prod(int(n) for n in name.partition(":")[2].split("x")) * found.chip.devices_per_chip

    def test_a_size_that_libtpu_refuses_is_explained(self) -> None:
        pytest.importorskip("libtpu")
        with pytest.raises(UnsupportedError, match="not divisible"):
            tpu_topology("v5e:3x5")

    def test_mesh_axes_keep_their_names_order_and_sizes(self, v5e: TpuTopology) -> None:
        mesh = make_mesh(v5e, {"data": 2, "tensor": 4})
        assert dict(mesh.shape) == {"data": 2, "tensor": 4}
        assert mesh.axis_names == ("data", "tensor")

    def test_an_axis_may_split_a_dimension_of_the_interconnect(self) -> None:
        pytest.importorskip("libtpu")
        assert dict(make_mesh(tpu_topology("v5p:4x4x4"), {"data": 2, "tensor": 32}).shape)["tensor"] == 32

    def test_axes_of_every_flat_slice_are_rings_of_neighbours(self) -> None:
        """Each device is beside the next along an axis, and the last beside the first where the axis has both
        dimensions."""
        pytest.importorskip("libtpu")
        for chip in (CHIPS["v5e"], CHIPS["v6e"]):
            for rows, columns in slice_sizes(chip):
                found = tpu_topology(f"{chip.name}:{rows}x{columns}")
                assert longest_steps(make_mesh(found, {"fsdp": len(found.devices)}).devices) == (1, 1) or rows == 1
                placed = make_mesh(found, {"data": rows, "tensor": columns}).devices
                assert {longest_steps(line)[0] for line in [*placed, *placed.T]} <= {0, 1}, (chip.name, rows, columns)

    @pytest.mark.parametrize("axes", [{"data": 2, "tensor": 2}, {}, {"data": -2, "tensor": -4}])
    def test_a_mesh_of_another_size_is_refused(self, v5e: TpuTopology, axes: dict[str, int]) -> None:
        with pytest.raises(UnsupportedError, match="'v5e:2x4' has 8: give axes of at least 1 whose product is 8"):
            make_mesh(v5e, axes)


@pytest.mark.tpu_compile
class TestCompile:
    def test_the_all_reduce_in_a_scan_counts_once_a_layer(self, program: CompiledProgram) -> None:
        (reduce,) = program.collectives
        assert (reduce.op, reduce.count, reduce.group_size) == ("all-reduce", 5, 8)
        assert reduce.result_bytes == 64 * 1024 * 2
        assert program.estimate.loops_without_trip_count == ()

    def test_each_device_holds_its_shard_of_the_weights(self, program: CompiledProgram) -> None:
        activations, weights = 64 * 1024 * 2, 2 * 5 * 1024 * 4096 * 2
        assert program.argument_bytes == activations + weights // 8
        assert program.output_bytes == activations
        assert program.argument_bytes <= program.peak_bytes < CHIPS["v5e"].hbm_bytes

    def test_a_donated_argument_is_where_the_result_goes(self, program: CompiledProgram) -> None:
        assert program.alias_bytes == program.output_bytes

    def test_without_donation_nothing_is_aliased(self, v5e: TpuTopology, mesh: Mesh) -> None:
        assert compile_for(v5e, lambda x: x @ x, array(mesh, (256, 256))).alias_bytes == 0

    def test_a_jitted_function_keeps_its_own_donation(self, v5e: TpuTopology, mesh: Mesh) -> None:
        jitted = jax.jit(lambda x: x @ x, donate_argnums=0)
        assert compile_for(v5e, jitted, array(mesh, (256, 256))).alias_bytes == 256 * 256 * 2
        with pytest.raises(UnsupportedError, match=r"already under jax\.jit"):
            compile_for(v5e, jitted, array(mesh, (256, 256)), donate_argnums=0)

    def test_what_slices_exchange_is_a_collective_with_a_time(self) -> None:
        pytest.importorskip("libtpu")
        slices = tpu_topology("2*v6e:2x2")
        mesh = make_mesh(slices, {"data": 2, "tensor": 4}, {"data": 2})
        x = array(mesh, (4096, 4096), "data", None)
        found = compile_for(slices, lambda x: x.astype(jnp.float32).sum(0), x)
        (sums,) = found.collectives
        assert (sums.op, sums.group_size, sums.result_bytes) == ("dcn-all-reduce", 2, 4096 * 4)
        parts, data = found.estimate.breakdown, 4096 * 4 / slices.chip.dcn_share
        assert parts.dcn_in_background == pytest.approx(data + DCN_SECONDS)
        assert parts.dcn_wait == pytest.approx(parts.dcn_in_background)  # nothing else is there to do
        assert not [one for one in found.estimate.unmodelled if one.op in ("send", "recv")]

    def test_an_array_on_the_host_comes_and_goes_over_the_hosts_bus(self, v5e: TpuTopology, mesh: Mesh) -> None:
        on_host = NamedSharding(mesh, P("tensor"), memory_kind="pinned_host")

        def step(x: jax.Array) -> jax.Array:
            return jax.device_put(jax.device_put(x, jax.memory.Space.Device) + 1, jax.memory.Space.Host)

        x = jax.ShapeDtypeStruct((8 * 1024, 1024), jnp.float32, sharding=on_host)
        found = compile_for(v5e, jax.jit(step, out_shardings=on_host), x).estimate
        one = 2**22 / v5e.chip.host_bytes_per_second
        assert found.breakdown.host_in_background == pytest.approx(2 * one)
        assert 1.5 * one < found.breakdown.host_wait < found.seconds

    def test_the_estimate_is_at_least_the_roofline(self, program: CompiledProgram) -> None:
        weights_read = 2 * 5 * 1024 * 4096 * 2 / 8 / CHIPS["v5e"].hbm_bytes_per_second
        assert weights_read < program.estimate.seconds < 10 * weights_read
        parts = program.estimate.breakdown
        assert parts.compute + parts.collective == pytest.approx(program.estimate.seconds)
        assert program.estimate.unmodelled == ()

    def test_twice_the_layers_take_twice_the_time(self, v5e: TpuTopology, mesh: Mesh, program: CompiledProgram) -> None:
        up, down = array(mesh, (10, 1024, 4096), None, None, "tensor"), array(mesh, (10, 4096, 1024), None, "tensor")
        longer = compile_for(v5e, layers, array(mesh, (64, 1024)), up, down, donate_argnums=0)
        assert longer.estimate.seconds == pytest.approx(2 * program.estimate.seconds, rel=0.05)

    def test_slices_of_whole_cubes_close_into_rings(self) -> None:
        v5p = tpu_topology("v5p:4x4x4")
        mesh = make_mesh(v5p, {"data": 64})
        x, weights = array(mesh, (8192, 4096)), array(mesh, (4096, 4096), "data")
        gathered = compile_for(v5p, lambda x, w: x @ jax.lax.with_sharding_constraint(w, P()), x, weights)
        # without the closing links libtpu sums padded shards instead
        assert [collective.op for collective in gathered.collectives] == ["all-gather"]

    def test_compiler_options_reach_the_compiler(self, mesh: Mesh) -> None:
        v6e = tpu_topology("v6e:2x4")
        x = array(make_mesh(v6e, {"tensor": 8}), (256, 256))
        assert compile_for(v6e, lambda x: x @ x, x, compiler_options=OVERLAP_COLLECTIVES).collectives == ()
        with pytest.raises(UnsupportedError, match="leave them out or write them as this libtpu has them"):
            compile_for(v6e, lambda x: x @ x, x, compiler_options={"xla_tpu_scoped_vmem_limit_kib": "many"})
        with pytest.warns(UserWarning, match="does not know the option xla_of_no_kind"):
            assert compile_for(v6e, lambda x: x @ x, x, compiler_options={"xla_of_no_kind": True}).peak_bytes

    def test_a_program_that_does_not_fit_is_refused_with_both_sizes(self, v5e: TpuTopology, mesh: Mesh) -> None:
        side = 98 * 1024  # whole tiles: what padding adds is not in the sum below
        with pytest.raises(UnsupportedError) as refusal:
            compile_for(v5e, lambda x: x @ x, array(mesh, (side, side)))
        needed = 2 * 2 * side * side / GIB  # the operand and the product
        assert f"needs {needed:.2f} GiB" in str(refusal.value)
        assert "where 15.75 GiB are available" in str(refusal.value)

    def test_an_array_that_finds_no_room_in_vmem_is_refused(self, v5e: TpuTopology, mesh: Mesh) -> None:
        def both(x: jax.Array) -> jax.Array:
            one, other = (in_vmem(each, Layout((0, 1))) for each in (x + 1, jnp.sin(x)))
            return one @ other + other @ one

        x = jax.ShapeDtypeStruct((5120, 5120), jnp.float32, sharding=NamedSharding(mesh, P()))
        with pytest.raises(UnsupportedError, match="VMEM has no room for an array that is kept there"):
            compile_for(v5e, both, x)

    def test_an_argument_without_the_topologys_devices_is_refused(self, v5e: TpuTopology) -> None:
        with pytest.raises(UnsupportedError, match=r"argument \[0\]\['x'\] of shape \(8,\) has no sharding"):
            compile_for(v5e, lambda tree: tree["x"] + 1, {"x": jax.ShapeDtypeStruct((8,), jnp.float32)})
        with pytest.raises(UnsupportedError, match="over other devices"):
            compile_for(v5e, lambda x: x + 1, jnp.ones(8))

    def test_what_is_computed_while_tracing_stays_on_this_machine(self, v5e: TpuTopology, mesh: Mesh) -> None:
        def function(x: jax.Array) -> jax.Array:
            with jax.ensure_compile_time_eval():
                return x * float(jnp.arange(4.0).sum())

        assert compile_for(v5e, function, array(mesh, (8, 128))).output_bytes > 0

    def test_a_program_is_the_same_after_torch_xla_has_turned_shardy_off(self, v5e: TpuTopology, mesh: Mesh) -> None:
        """A device has an eighth of memory that begins unset. The other partitioner gives it all of it."""

        def filled(x: jax.Array) -> jax.Array:
            def fill(step: Any, rows: jax.Array) -> jax.Array:
                return jax.lax.dynamic_update_index_in_dim(rows, x * step.astype(x.dtype), step, 0)

            return jax.lax.fori_loop(0, 8, fill, jax.lax.empty((8, *x.shape), x.dtype))

        def text() -> str:
            return compile_for(v5e, filled, array(mesh, (1024, 256), "tensor")).hlo_text

        expected = text()
        assert "bf16[8,128,256]" in expected and "bf16[8,1024,256]" not in expected
        with without_shardy():
            assert text() == expected
            program = Program("filled", filled, (array(mesh, (1024, 256), "tensor"),))  # of an engine
            assert "sdy." in program.lower().as_text()

    @pytest.fixture
    def cache(self, tmp_path: Path) -> Iterator[Path]:
        settings = {
            "jax_compilation_cache_dir": str(tmp_path),
            "jax_persistent_cache_min_compile_time_secs": 0,
            "jax_persistent_cache_min_entry_size_bytes": -1,
        }
        before = {name: getattr(jax.config, name) for name in settings}
        compilation_cache.reset_cache()
        for name, value in settings.items():
            jax.config.update(name, value)
        yield tmp_path
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()

    def test_the_persistent_cache_is_left_alone(self, v5e: TpuTopology, mesh: Mesh, cache: Path) -> None:
        jax.jit(lambda x: x * 3 + 1)(jnp.ones(5)).block_until_ready()
        used = set(cache.iterdir())
        assert used
        compile_for(v5e, lambda x: x @ x + 3, array(mesh, (256, 256)))
        assert set(cache.iterdir()) == used
        jax.jit(lambda x: x * 5 + 2)(jnp.ones(7)).block_until_ready()
        assert set(cache.iterdir()) > used
