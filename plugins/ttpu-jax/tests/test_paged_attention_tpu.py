"""Paged attention compiled for TPUs that are not there: the kernel where it serves, pages that stay in place, and no
traffic between devices."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ttpu_core.spec import AttentionSpec, axes
from ttpu_jax.aot.compile import CompiledProgram, compile_for
from ttpu_jax.aot.topology import make_mesh, tpu_topology
from ttpu_jax.ops.attention import AttentionContext
from ttpu_jax.ops.paged_attention import PagedKV, RaggedBatch, empty_pages, page_bytes, paged_attention, write
from ttpu_jax.params.placement import Placement

pytestmark = pytest.mark.tpu_compile

LLAMA = AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128)
LATENTS = AttentionSpec(num_heads=16, num_kv_heads=1, head_dim=576, v_head_dim=512)
GEMMA = AttentionSpec(num_heads=16, num_kv_heads=8, head_dim=256, window=4096, logit_softcap=50.0)
SMALL = replace(GEMMA, num_heads=4, num_kv_heads=2)  # kernels are compiled head by head
DECODE, DRAFTS, SHORT, MIXED = (16, 1), (64, 4), (32, 16), (128, 64)  # tokens, and the most of one sequence
SEQUENCES, PAGES, PAGE_SIZE = 16, 2048, 128


def compiled(
    topology_name: str,
    spec: AttentionSpec,
    step: tuple[int, int] = DECODE,
    dtype: str = "bfloat16",
    pages_per_sequence: int = 64,
    value_in_key: bool = False,
    kernels: bool = True,
    heads_outside: bool = False,
) -> CompiledProgram:
    """A program that writes into donated pages and attends, cut over all devices of a topology, with or without our
    kernels."""
    topology = tpu_topology(topology_name)
    mesh = make_mesh(topology, {"tensor": len(topology.devices)})
    placement = Placement(mesh)
    heads = placement.mesh_axes(axes.KV_HEADS, spec.num_kv_heads)
    context = AttentionContext(mesh=mesh, head_axes=heads, platform="tpu")
    tokens, most = step

    def array(shape: tuple[int, ...], kind: Any = jnp.int32, *cut: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, kind, sharding=NamedSharding(mesh, PartitionSpec(*cut)))

    def per_head(*shape: int) -> Any:
        return array((tokens, spec.num_kv_heads, *shape), jnp.bfloat16, None, heads or None)

    per_token, per_sequence = array((tokens,)), array((SEQUENCES,))
    table = array((SEQUENCES, pages_per_sequence))
    batch = RaggedBatch(
        array((SEQUENCES + 1,)), per_sequence, array((1,)), per_token, per_token, per_token, (table,), (per_token,),
        per_sequence, max_queries=most, max_prefills=2, page_size=PAGE_SIZE,
    )  # fmt: skip
    kv = empty_pages(spec, PAGES, PAGE_SIZE, placement, dtype, value_in_key=value_in_key, abstract=True)
    size, ways = page_bytes(spec, PAGE_SIZE, placement, dtype, value_in_key=value_in_key)
    sinks = array((spec.num_kv_heads, spec.q_per_kv), jnp.bfloat16, heads or None) if spec.sinks else None

    def run(kv: PagedKV, query: jax.Array, key: jax.Array, value: jax.Array, batch: RaggedBatch, sinks: Any) -> Any:
        kv = write(
            kv, key, None if value_in_key else value, batch, context=context, by_kernel=kernels,
            heads_outside=heads_outside,
        )  # fmt: skip
        return kv, paged_attention(query, kv, batch, spec, sinks=sinks, context=context, own=kernels)

    queries = per_head(spec.q_per_kv, spec.head_dim)
    arguments = kv, queries, per_head(spec.head_dim), per_head(spec.value_dim), batch, sinks
    program = compile_for(topology, jax.jit(run, donate_argnums=0), *arguments)
    pool = PAGES * size // ways
    assert program.alias_bytes == pool, "pages must stay in place, and take what page_bytes says"
    for pages in jax.tree.leaves(kv):
        shape = ",".join(map(str, pages.sharding.shard_shape(pages.shape)))
        assert f"[{shape}]" in program.hlo_text
        assert not re.search(rf"= \(?\w+\[{shape}\].* copy(-start)?\(", program.hlo_text), "all pages are copied"
    assert "while(" not in program.hlo_text or not number_of_kernels(program), "tokens are written one by one"
    assert program.collectives == ()
    return program


def number_of_kernels(program: CompiledProgram) -> int:
    """Kernels beside the one that writes pages that are not quantized."""
    return len(re.findall(r"%(?!page_write)\S+ = .*tpu_custom_call", program.hlo_text))


def least_times(program: CompiledProgram) -> dict[str, float | None]:
    """Kernel → its least time in seconds."""
    return {one.name.partition(".")[0]: one.roofline_seconds for one in program.estimate.unmodelled}


@pytest.mark.parametrize("topology_name", ["v4:1x1x1", "v5e:2x4", "v5p:1x1x1", "v6e:2x4", "tpu7x:1x1x1"])
def test_decode_steps_have_our_kernel_on_every_generation(topology_name: str) -> None:
    """Which takes heads of 256 features, windows and softcap, and reads the pages in the window alone."""
    program = compiled(topology_name, GEMMA, DECODE)
    assert number_of_kernels(program) == 1 and "paged_decode_attention" in program.hlo_text
    assert "%page_write" in program.hlo_text and "scatter" not in program.hlo_text
    size, ways = page_bytes(GEMMA, PAGE_SIZE, Placement(), "bfloat16")[0], len(program.topology.devices)
    in_window = SEQUENCES * (4096 // PAGE_SIZE + 1)
    least = in_window * size / ways / program.topology.chip.hbm_bytes_per_second
    assert least_times(program)["paged_decode_attention"] == pytest.approx(least, rel=0.02)


@pytest.mark.parametrize(
    ("spec", "step"),
    [
        (LLAMA, DECODE),
        (replace(GEMMA, sinks=True, window=None), DRAFTS),
        (AttentionSpec(num_heads=64, num_kv_heads=8, head_dim=64, window=128, sinks=True), DECODE),
        (AttentionSpec(num_heads=32, num_kv_heads=4, head_dim=512), DECODE),
    ],
    ids=["heads of 128", "drafts", "heads of 64", "heads of 512 that devices share"],
)
def test_our_kernel_serves_other_steps_without_a_loop(spec: AttentionSpec, step: tuple[int, int]) -> None:
    program = compiled("v5e:1x1", spec, step)
    assert number_of_kernels(program) == 1 and "paged_decode_attention" in program.hlo_text
    assert not program.estimate.loops_without_trip_count


@pytest.mark.parametrize(
    ("spec", "step", "dtype"),
    [
        (replace(LATENTS, num_heads=128), DRAFTS, "bfloat16"),
        (AttentionSpec(32, 1, 128), (256, 16), "bfloat16"),
        (AttentionSpec(128, 8, 128), (256, 16), "int8"),
    ],
    ids=["latents of 128 heads", "one KV head", "int8"],
)
def test_drafts_of_many_heads_fit_into_vmem(spec: AttentionSpec, step: tuple[int, int], dtype: str) -> None:
    program = compiled("v5e:1x1", spec, step, dtype, value_in_key=spec.head_dim == 576)
    assert number_of_kernels(program) == 1


@pytest.mark.parametrize("topology_name", ["v5e:2x4", "v6e:1x1"])
def test_latents_are_read_once_as_keys_and_values(topology_name: str) -> None:
    """Each token's 576 features lie in 640, and all devices have all latents."""
    program = compiled(topology_name, LATENTS, DECODE, value_in_key=True)
    assert number_of_kernels(program) == 1 and "paged_decode_attention" in program.hlo_text
    assert not program.estimate.loops_without_trip_count
    read = min(SEQUENCES * 64, PAGES) * PAGE_SIZE * 640 * 2
    least = read / program.topology.chip.hbm_bytes_per_second
    assert least_times(program)["paged_decode_attention"] == pytest.approx(least, rel=0.02)


@pytest.mark.parametrize("topology_name", ["v4:1x1x1", "v5e:2x4", "v5p:1x1x1", "v6e:1x1", "tpu7x:1x1x1"])
def test_steps_with_prompts_have_our_kernels_on_every_generation(topology_name: str) -> None:
    """One for prompts, and one for sequences of one query; each block of prompts reads the pages of a window alone."""
    program = compiled(topology_name, GEMMA if topology_name == "v5e:2x4" else SMALL, MIXED)
    assert set(least_times(program)) >= {"paged_prompt_attention", "paged_decode_attention", "page_write"}
    assert number_of_kernels(program) == 2 and not program.estimate.loops_without_trip_count


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (AttentionSpec(num_heads=128, num_kv_heads=1, head_dim=576, v_head_dim=512), {"value_in_key": True}),
        (AttentionSpec(num_heads=16, num_kv_heads=2, head_dim=64, window=128, sinks=True), {}),
        (AttentionSpec(num_heads=8, num_kv_heads=1, head_dim=512), {}),
        (AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=256, chunk=1024), {}),
        (SMALL, {"dtype": "float32"}),
    ],
    ids=["latents of 128 heads", "sinks", "heads of 512", "chunks", "float32"],
)
def test_prompts_of_other_layers_have_our_kernel(spec: AttentionSpec, options: dict[str, Any]) -> None:
    """Of 128 heads 32 at a time."""
    program = compiled("v5e:1x1", spec, (2048, 1024), **options)
    assert number_of_kernels(program) == 1 + -(-spec.q_per_kv // 32)
    assert not program.estimate.loops_without_trip_count


def test_keys_of_a_ring_are_written_head_by_head() -> None:
    for spec in (LLAMA, GEMMA):
        program = compiled("v5e:2x4", spec, MIXED, heads_outside=True)
        assert "%page_write" in program.hlo_text and not re.search(r" copy\(.*cache_write", program.hlo_text)


def test_without_them_jaxs_kernel_or_the_reference_computes_steps() -> None:
    program = compiled("v6e:2x4", LLAMA, DECODE, kernels=False)
    size = page_bytes(LLAMA, PAGE_SIZE, Placement(), "bfloat16")[0]
    least = SEQUENCES * 64 * size / 8 / program.topology.chip.hbm_bytes_per_second  # the table has room for 64 pages
    assert least_times(program)["ragged_paged_attention_kernel"] == pytest.approx(least, rel=0.02)
    assert number_of_kernels(compiled("v5e:2x4", LLAMA, MIXED, kernels=False)) == 1
    assert number_of_kernels(compiled("v5e:2x4", replace(LLAMA, sinks=True), MIXED, kernels=False)) == 0
    assert number_of_kernels(compiled("v5e:2x4", GEMMA, DECODE, kernels=False)) == 0


@pytest.mark.parametrize("topology_name", ["v4:1x1x1", "v5p:1x1x1"])
def test_pages_in_float8_have_our_kernels_where_chips_have_no_float8_too(topology_name: str) -> None:
    program = compiled(topology_name, SMALL, MIXED, "float8_e4m3fn")
    assert number_of_kernels(program) == 2 and not program.estimate.loops_without_trip_count


@pytest.mark.parametrize(
    ("topology_name", "spec", "step", "features", "dtype"),
    [
        ("v5e:2x4", LLAMA, MIXED, 8 * 2 * 128, "float8_e4m3fn"),
        ("v4:1x1x1", LATENTS, MIXED, 640, "float8_e4m3fn"),
        ("v6e:1x1", LATENTS, DECODE, 640, "float8_e4m3fn"),
        ("v5e:2x4", LLAMA, MIXED, 8 * 2 * 128, "int8"),
        ("v6e:1x1", LATENTS, MIXED, 640, "int8"),
        ("v5p:1x1x1", AttentionSpec(6, 3, 128), DECODE, 3 * 2 * 128, "int8"),
        ("tpu7x:1x1x1", AttentionSpec(6, 1, 384, window=512), DECODE, 2 * 384, "int8"),
    ],
    ids=[
        "a head on each device", "latents", "latents in a decode step", "int8", "latents in int8", "three heads",
        "a head of three parts",
    ],
)
def test_pages_of_8_bits_leave_no_place_empty(
    topology_name: str, spec: AttentionSpec, step: tuple[int, int], features: int, dtype: str
) -> None:
    """Scales of heads that do not fill a row of 128 have room for as many more."""
    program = compiled(topology_name, spec, step, dtype, value_in_key=spec == LATENTS)
    assert "%page_write" in program.hlo_text and "scatter" not in program.hlo_text
    assert number_of_kernels(program) == 1 + (step == MIXED)
    ways = len(program.topology.devices) if spec == LLAMA else 1
    own = spec.num_kv_heads // ways
    scales = 4 * (own * 2 if own % 2 == 0 else own * 4) * ways if dtype == "int8" else 0
    assert program.alias_bytes == PAGES * PAGE_SIZE * (features + scales) // ways


def test_split_pages_have_our_kernels_also_where_others_are_asked_for() -> None:
    """Which cannot read them."""
    program = compiled("v5e:2x4", LLAMA, MIXED, "float8_e4m3fn", kernels=False)
    assert "%page_write" in program.hlo_text and number_of_kernels(program) == 2


def test_int8_pages_of_several_heads_have_our_kernels() -> None:
    """The second layer is gemma-3's, with heads of 256 features."""
    assert number_of_kernels(compiled("v5e:2x2", LLAMA, SHORT, "int8")) == 2
    wide = AttentionSpec(num_heads=32, num_kv_heads=16, head_dim=256, window=1024)
    program = compiled("v6e:2x4", wide, DECODE, "int8")
    assert number_of_kernels(program) == 1 and "scatter" not in program.hlo_text
    least = least_times(program)
    size, ways = page_bytes(wide, PAGE_SIZE, Placement(), "int8")[0], 8
    in_window = SEQUENCES * (1024 // PAGE_SIZE + 1)
    assert least["paged_decode_attention"] == pytest.approx(in_window * size / ways / 1640e9, rel=0.02)
    assert 0 < (least["page_write_tiles"] or 0.0) < 2e-6


@pytest.mark.parametrize("topology_name", ["v4:1x1x1", "v5p:1x1x1", "tpu7x:1x1x1"])
def test_kernels_for_int8_pages_compile_for_every_generation(topology_name: str) -> None:
    spec = AttentionSpec(num_heads=16, num_kv_heads=4, head_dim=128)
    assert number_of_kernels(compiled(topology_name, spec, MIXED, "int8")) == 2


def test_one_head_that_devices_do_not_share_stays_whole() -> None:
    """Its rows of keys and values would be as many as the devices."""
    assert number_of_kernels(compiled("tpu7x:1x1x1", AttentionSpec(16, 1, 256), DECODE)) == 1
