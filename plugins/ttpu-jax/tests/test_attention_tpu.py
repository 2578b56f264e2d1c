"""The attention kernels compiled for TPUs that are not there, cut over a mesh."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ttpu_core.spec import AttentionSpec
from ttpu_jax.aot.compile import compile_for
from ttpu_jax.aot.topology import make_mesh, tpu_topology
from ttpu_jax.ops.attention import AttentionContext, attend, write_and_attend
from ttpu_jax.ops.attention.latent_decode import latent_decode

pytestmark = pytest.mark.tpu_compile

GQA = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=128)


@pytest.mark.parametrize("topology_name", ["v5e:2x4", "v6e:2x4"])
@pytest.mark.parametrize(
    ("name", "spec"),
    [
        pytest.param("splash_attention", replace(GQA, head_dim=80, window=300, logit_softcap=30.0), id="splash"),
        pytest.param("xla_flash_attention", GQA, id="flash"),
    ],
)
def test_a_kernel_compiles_for_a_tpu_and_each_device_keeps_to_itself(
    topology_name: str, name: str, spec: AttentionSpec
) -> None:
    topology = tpu_topology(topology_name)
    mesh = make_mesh(topology, {"data": 2, "expert": 2, "tensor": 2})  # of which expert cuts nothing here
    context = AttentionContext(mesh=mesh, batch_axes=("data",), head_axes=("tensor",), platform="tpu")

    def abstract(shape: tuple[int, ...], *cut: str | None, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*cut)))

    seq, heads = 1000, "tensor"
    query = abstract((2, seq, spec.num_kv_heads, spec.q_per_kv, spec.head_dim), "data", None, heads)
    key = abstract((2, spec.num_kv_heads, seq, spec.head_dim), "data", heads)
    positions = abstract((2, seq), "data", dtype="int32")

    def forward(query: jax.Array, key: jax.Array, value: jax.Array, positions: jax.Array) -> jax.Array:
        return attend(name, query, key, value, positions, positions, spec, context=context)

    def gradients(query: jax.Array, key: jax.Array, value: jax.Array, positions: jax.Array) -> Any:
        mixed, back = jax.vjp(lambda q, k, v: forward(q, k, v, positions), query, key, value)
        return back(mixed)

    prefill = compile_for(topology, forward, query, key, key, positions)
    training = compile_for(topology, gradients, query, key, key, positions)
    assert [program.hlo_text.count("tpu_custom_call") for program in (prefill, training)] == [1, 3]
    assert prefill.collectives == training.collectives == ()
    scores = 4 * query.size // spec.head_dim * seq // 4  # bytes in float32, of the rows and heads of one device
    assert max(prefill.temp_bytes, training.temp_bytes) < scores


@pytest.mark.parametrize("topology_name", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_the_kernel_for_decode_compiles_for_all_generations(topology_name: str) -> None:
    """Each kind of head and of mask, in one program, which reads the caches where they are, and writes those of all
    layers but the first."""
    topology = tpu_topology(topology_name)
    sizes = {"data": len(topology.devices) // 2, "tensor": 2}
    mesh = make_mesh(topology, sizes)
    context = AttentionContext(mesh=mesh, batch_axes=("data",), head_axes=("tensor",), platform="tpu", own_keys=False)
    specs = (
        GQA,
        replace(GQA, num_heads=16, num_kv_heads=16, window=200, logit_softcap=30.0),
        replace(GQA, num_heads=16, head_dim=256),
        replace(GQA, head_dim=256, v_head_dim=128, chunk=256),
        replace(GQA, num_heads=14, sinks=True),
        replace(GQA, num_heads=8, head_dim=64),
        replace(GQA, num_heads=4, head_dim=192, v_head_dim=128),
    )
    rows, slots = 8, 1152

    def abstract(shape: tuple[int, ...], *cut: str | None, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*cut)))

    def arrays(spec: AttentionSpec) -> tuple[jax.ShapeDtypeStruct, ...]:
        kv, heads = spec.num_kv_heads, "tensor"
        return (
            abstract((rows, 1, kv, spec.q_per_kv, spec.head_dim), "data", None, heads),
            abstract((rows, kv, slots, spec.head_dim), "data", heads),
            abstract((rows, kv, slots, spec.value_dim), "data", heads),
            abstract((kv, spec.q_per_kv), heads),
            abstract((rows, 1, kv, 2, max(spec.head_dim, spec.value_dim)), "data", None, heads),
        )

    def decode(of_layers: Any, query_positions: jax.Array, key_positions: jax.Array, slot: jax.Array) -> list[Any]:
        found: list[Any] = []
        for spec, (query, key, value, sinks, pairs) in zip(specs, of_layers, strict=True):
            positions, more = (query_positions, key_positions, spec), {"sinks": sinks if spec.sinks else None}
            if found:
                found.append(write_and_attend(query, key, value, pairs, slot, *positions, **more, context=context))
            else:
                found.append(attend("splash_attention", query, key, value, *positions, **more, context=context))
        return found

    given = [arrays(spec) for spec in specs]
    positions = [abstract((rows, size), "data", dtype="int32") for size in (1, slots)]
    slot = abstract((), dtype="int32")
    program = compile_for(topology, decode, given, *positions, slot, donate_argnums=(0,))
    assert "dynamic-update-slice" not in program.hlo_text
    assert program.hlo_text.count("tpu_custom_call") == len(specs) and program.collectives == ()
    caches = sum(array.size * 2 for layer in given for array in layer[1:3]) // len(topology.devices)
    assert program.temp_bytes < caches // 8, "no cache is copied"


@pytest.mark.parametrize("topology_name", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_the_kernel_for_latents_compiles_for_all_generations(topology_name: str) -> None:
    """It writes its cache, of which nothing is copied."""
    topology = tpu_topology(topology_name)
    mesh = make_mesh(topology, {"tensor": len(topology.devices)})
    context = AttentionContext(mesh=mesh, head_axes=("tensor",), platform="tpu", own_keys=False)
    rows, slots, rank, turned = 8, 1152, 512, 64
    spec = AttentionSpec(num_heads=16, num_kv_heads=1, head_dim=rank + turned, v_head_dim=rank)

    def abstract(*shape: int, cut: tuple[str | None, ...] = (), dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*cut)))

    heads, cache = (None, None, "tensor"), [abstract(rows, slots, size) for size in (rank, turned)]
    new = tuple(abstract(rows, 1, size) for size in (rank, turned))
    queries = [abstract(rows, 1, 16, size, cut=heads) for size in (rank, turned)]
    integers = [abstract(*shape, dtype="int32") for shape in ((), (rows, 1), (rows, slots))]

    def decode(latent: jax.Array, rope_key: jax.Array, query: jax.Array, turned: jax.Array, *more: Any) -> Any:
        mixed, *cache = latent_decode(query, turned, latent, rope_key, *more, spec, context)
        return 2 * mixed, cache

    program = compile_for(topology, decode, *cache, *queries, new, *integers, donate_argnums=(0, 1))
    assert program.hlo_text.count("tpu_custom_call") == 1 and program.collectives == ()
    assert program.temp_bytes < rows * slots * rank * 2 // 8


def test_a_training_step_with_two_rows_on_a_device_fits_into_vmem() -> None:
    """With more rows than one the kernel holds two buffers of what it scales by, and training adds the residuals: on a
    v5p that left no room for 2,048 queries at once."""
    topology = tpu_topology("v5p:2x2x1")
    seq = 4096
    context = AttentionContext(mesh=make_mesh(topology, {"data": 4}), batch_axes=("data",), platform="tpu")

    def abstract(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(context.mesh, PartitionSpec("data")))

    def gradients(query: jax.Array, key: jax.Array, value: jax.Array, positions: jax.Array) -> Any:
        def forward(*arrays: jax.Array) -> jax.Array:
            return attend("splash_attention", *arrays, positions, positions, GQA, context=context)

        mixed, back = jax.vjp(forward, query, key, value)
        return back(mixed)

    query, key = abstract(8, seq, 2, 2, 128), abstract(8, 2, seq, 128)
    compiled = compile_for(topology, gradients, query, key, key, abstract(8, seq, dtype="int32"))
    assert compiled.hlo_text.count("tpu_custom_call") == 3


@pytest.mark.parametrize(("chip", "fetched"), [("v5e", False), ("v6e", True)])
def test_the_caches_that_a_step_writes_into_stay_in_hbm_on_v5e(chip: str, *, fetched: bool) -> None:
    topology = tpu_topology(f"{chip}:1x1")
    mesh = make_mesh(topology, {"tensor": 1})
    spec = replace(GQA, num_heads=2, num_kv_heads=1, head_dim=256)
    context = AttentionContext(mesh=mesh, head_axes=("tensor",), platform="tpu", own_keys=False)
    rows, slots, width = 32, 1152, 4096

    def abstract(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def step(x: jax.Array, kernel: jax.Array, caches: list[jax.Array], positions: Any, slot: jax.Array) -> Any:
        for _ in range(4):  # products that leave HBM idle
            x = jax.numpy.tanh(x @ kernel)
        query, pairs = (x[:, :512].reshape(rows, 1, 1, 2, 256) for _ in range(2))
        slots_of = jax.numpy.broadcast_to(jax.numpy.arange(slots), (rows, slots))
        positions = positions, slots_of, spec
        return write_and_attend(query, *caches, pairs, slot, *positions, context=context)

    cache = abstract(rows, 1, slots, 256)
    integers = abstract(rows, 1, dtype="int32"), abstract(dtype="int32")
    program = compile_for(
        topology, step, abstract(rows, width), abstract(width, width), [cache, cache], *integers, donate_argnums=(2,)
    )
    assert ("bf16[32,1,1152,256]{3,2,1,0:T(8,128)(2,1)S(1)}" in program.hlo_text) == fetched
