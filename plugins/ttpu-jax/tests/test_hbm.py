"""The bytes between HBM and the core, counted from a program's text."""

from __future__ import annotations

import pytest

from ttpu_jax.aot.hbm import hbm_bytes, in_hbm
from ttpu_jax.aot.hlo import parse

MIB = 2**20
ARRAY = "bf16[512,1024]{1,0:T(8,128)(2,1)}"  # one MiB
ON_CHIP = "bf16[512,1024]{1,0:T(8,128)(2,1)S(1)}"
ROW = "bf16[1,1024]{1,0:T(8,128)(2,1)}"


def program(*lines: str, others: str = "") -> int:
    body = "\n".join(f"  {line}" for line in lines)
    entry = f"ENTRY %main (p: f32[]) -> f32[] {{\n{body}\n}}\n"
    return hbm_bytes(parse(f"HloModule m, is_scheduled=true\n\n{others}\n{entry}"))


def fused(*lines: str) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"%f (p: f32[]) -> f32[] {{\n{body}\n}}\n"


P, Q = f"%p = {ARRAY} parameter(0)", f"%q = {ON_CHIP} parameter(1)"


def test_memory_spaces_are_told_apart_also_in_tuples() -> None:
    assert in_hbm(ARRAY) == MIB and in_hbm(ON_CHIP) == 0
    assert in_hbm(f"({ARRAY}, {ON_CHIP}, u32[]{{:S(2)}})") == MIB
    assert in_hbm("bf16[512,1024]") == MIB


@pytest.mark.parametrize(
    ("lines", "mebibytes"),
    [
        ((P, f"ROOT %a = {ARRAY} add(%p, %p)"), 2),  # read once, written
        ((P, Q, f"ROOT %a = {ON_CHIP} add(%p, %q)"), 1),
        ((P, f"ROOT %b = {ARRAY} bitcast(%p)"), 0),
        ((P, f"%s = ({ON_CHIP}, {ARRAY}, u32[]{{:S(2)}}) copy-start(%p)", f"ROOT %d = {ON_CHIP} copy-done(%s)"), 1),
        ((P, f"%s = ({ARRAY}, {ARRAY}, u32[]{{:S(2)}}) copy-start(%p)", f"ROOT %d = {ARRAY} copy-done(%s)"), 2),
        ((P, f'ROOT %k = {ARRAY} custom-call(%p), custom_call_target="tpu_custom_call"'), 2),
        ((P, f'ROOT %k = {ARRAY} custom-call(%p), custom_call_target="ConcatBitcast"'), 0),
        ((P, f"ROOT %r = {ON_CHIP} all-reduce(%p), to_apply=%add"), 1),
    ],
    ids=["add", "on chip", "bitcast", "prefetch", "copy", "kernel", "no work", "collective"],
)
def test_each_operation_moves_its_operands_and_results_that_are_in_hbm(lines: tuple[str, ...], mebibytes: int) -> None:
    assert program(*lines) == mebibytes * MIB


def test_a_kernel_moves_what_it_states() -> None:
    stated = 'backend_config={"cost_estimate":{"flops":"1","bytes_accessed":"12345"}}'
    assert program(P, f'ROOT %k = {ARRAY} custom-call(%p), custom_call_target="tpu_custom_call", {stated}') == 12345


ROW_BYTES = 2048


def test_a_fusion_reads_only_the_rows_that_it_slices_or_gathers() -> None:
    inner = fused(
        f"%x = {ARRAY} parameter(0)",
        f"%b = {ARRAY} bitcast(%x)",
        "%i = s32[]{:T(128)} parameter(1)",
        f"%s = {ROW} dynamic-slice(%b, %i)",
        f"ROOT %n = {ROW} negate(%s)",
    )
    call = f"ROOT %a = {ROW} fusion(%p, %i), kind=kLoop, calls=%f"
    assert program(P, "%i = s32[]{:T(128)S(2)} parameter(1)", call, others=inner) == 2 * ROW_BYTES
    nested = inner.replace("%f ", "%g ") + fused(
        f"%x = {ARRAY} parameter(0)",
        "%i = s32[]{:T(128)} parameter(1)",
        f"ROOT %a = {ROW} fusion(%x, %i), kind=kLoop, calls=%g",
    )
    assert program(P, "%i = s32[]{:T(128)S(2)} parameter(1)", call, others=nested) == 2 * ROW_BYTES
    passed = fused(f"%x = {ARRAY} parameter(0)", f"ROOT %b = {ARRAY} bitcast(%x)").replace("%f ", "%g ") + fused(
        f"%x = {ARRAY} parameter(0)",
        f"%a = {ARRAY} fusion(%x), kind=kLoop, calls=%g",
        f"ROOT %n = {ON_CHIP} negate(%a)",
    )
    assert program(P, f"ROOT %a = {ON_CHIP} fusion(%p), kind=kLoop, calls=%f", others=passed) == MIB
    alone = f"ROOT %s = {ROW} dynamic-slice(%p, %i)"
    assert program(P, "%i = s32[]{:T(128)S(2)} parameter(1)", alone) == 2 * ROW_BYTES
    whole = inner.replace("negate(%s)", "add(%s, %x)")
    assert program(P, "%i = s32[]{:T(128)S(2)} parameter(1)", call, others=whole) == MIB + ROW_BYTES


def test_an_update_in_place_moves_its_own_bytes_alone_or_fused() -> None:
    row = f"%r = {ROW} parameter(1)"
    index = "%i = s32[]{:T(128)S(2)} parameter(2)"
    assert program(P, row, index, f"ROOT %u = {ARRAY} dynamic-update-slice(%p, %r, %i)") == ROW_BYTES
    inner = fused(
        f"%x = {ARRAY} parameter(0)",
        f"%y = {ROW} parameter(1)",
        "%j = s32[]{:T(128)} parameter(2)",
        f"ROOT %u = {ARRAY} dynamic-update-slice(%x, %y, %j)",
    )
    call = f"ROOT %a = {ARRAY} fusion(%p, %r, %i), kind=kLoop, calls=%f"
    assert program(P, row, index, call, others=inner) == 2 * ROW_BYTES, "the row is read and written"
    scattered = inner.replace("dynamic-update-slice(%x, %y, %j)", "scatter(%x, %j, %y)")
    assert program(P, row, index, call, others=scattered) == 2 * ROW_BYTES


def test_what_a_collective_passes_through_a_fusion_is_not_moved_by_it() -> None:
    """A product beside it reads its inputs and writes its result; the gather is counted where it starts."""
    whole = "bf16[4096,1024]{1,0:T(8,128)(2,1)}"  # 8 MiB
    gather = f"%g = {whole} all-gather(%shard), dimensions={{0}}"
    inner = fused(
        f"%shard = {ARRAY} parameter(0)",
        f"%so_far = {whole} parameter(1)",
        f"%x = {ARRAY} parameter(2)",
        f"%n = {ARRAY} negate(%x)",
        gather,
        f"ROOT %t = ({ARRAY}, {whole}, {ARRAY}, {whole}) tuple(%n, %so_far, %shard, %g)",
    ).replace("%f ", "%async_collective_fusion.1 ")
    call = f"ROOT %a = ({ARRAY}, {whole}, {ARRAY}, {whole}) fusion(%p, %w, %q), kind=kOutput, calls=%"
    arrays = P, f"%w = {whole} parameter(1)", f"%q = {ARRAY} parameter(2)"
    assert program(*arrays, f"{call}async_collective_fusion.1", others=inner) == 2 * MIB
    alone = inner.replace("async_collective_fusion.1", "f").replace("%so_far, %shard, %g)", "%g)")
    alone = alone.replace(f"({ARRAY}, {whole}, {ARRAY}, {whole}) tuple", f"({ARRAY}, {whole}) tuple")
    within = f"ROOT %a = ({ARRAY}, {whole}) fusion(%p, %q), kind=kOutput, calls=%f"
    alone = alone.replace(f"  %so_far = {whole} parameter(1)\n", "").replace("parameter(2)", "parameter(1)")
    assert program(P, f"%q = {ARRAY} parameter(1)", within, others=alone) == (1 + 8 + 1 + 1) * MIB
    start = fused(f"%shard = {ARRAY} parameter(0)", gather.replace("%g", "ROOT %g"))
    begins = f"ROOT %async-collective-start.1 = ({ARRAY}, {whole}) fusion(%p), kind=kCustom, calls=%f"
    assert program(P, begins, others=start) == (1 + 8) * MIB
    assert program(P, begins.replace("start.1", "done.1"), others=start) == 0


def test_of_several_results_an_update_in_place_writes_its_part_and_others_all() -> None:
    inner = fused(
        f"%x = {ARRAY} parameter(0)",
        f"%y = {ROW} parameter(1)",
        "%j = s32[]{:T(128)} parameter(2)",
        f"%u = {ARRAY} dynamic-update-slice(%x, %y, %j)",
        f"%n = {ROW} negate(%y)",
        f"ROOT %t = ({ARRAY}, {ROW}) tuple(%u, %n)",
    )
    arrays = P, f"%r = {ROW} parameter(1)", "%i = s32[]{:T(128)S(2)} parameter(2)"
    call = f"ROOT %a = ({ARRAY}, {ROW}) fusion(%p, %r, %i), kind=kLoop, calls=%f"
    assert program(*arrays, call, others=inner) == 3 * ROW_BYTES
    on_chip = call.replace(f"({ARRAY}, {ROW})", f"({ON_CHIP}, {ROW})")
    assert program(*arrays, on_chip, others=inner) == 2 * ROW_BYTES


def test_loops_count_their_turns_and_conditionals_their_larger_branch() -> None:
    small = f"%small (p: f32[]) -> f32[] {{\n  {P}\n  ROOT %b = {ARRAY} bitcast(%p)\n}}\n"
    large = f"%large (p: f32[]) -> f32[] {{\n  {P}\n  ROOT %a = {ARRAY} add(%p, %p)\n}}\n"
    choice = f"ROOT %c = {ARRAY} conditional(%p, %p, %p), branch_computations={{%small, %large}}"
    assert program(P, choice, others=small + large) == 2 * MIB
    trips = 'backend_config={"known_trip_count":{"n":"5"}}'
    loop = f"ROOT %w = {ARRAY} while(%p), condition=%small, body=%large, {trips}"
    assert program(P, loop, others=small + large) == 10 * MIB
