"""What the TPU compiler makes of products around a ring. No TPU is needed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ttpu_jax.aot import hlo
from ttpu_jax.aot.compile import compile_for
from ttpu_jax.aot.topology import make_mesh, tpu_topology
from ttpu_jax.ops.matmul.rings import Ring, ring_mlp

pytestmark = pytest.mark.tpu_compile

HIDDEN, INNER, SEQ = 4096, 14336, 2048  # those of Llama-3.1-8B


@pytest.fixture(scope="module")
def module() -> hlo.Module:
    """The program of a gated MLP on v5e:2x4, whose products take longer than its links."""
    topology = tpu_topology("v5e:2x4")
    mesh = make_mesh(topology, {"tensor": 8})

    def array(shape: tuple[int, ...], *partition: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*partition)))

    def activate(pair: jax.Array) -> jax.Array:
        return jax.nn.silu(pair[..., 0, :]) * pair[..., 1, :]

    def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return ring_mlp(x, (up, None), (down, None), activate, Ring(mesh, "tensor"))

    x, up = array((1, SEQ, HIDDEN), None, "tensor"), array((2, INNER, HIDDEN), None, "tensor")
    return hlo.parse(compile_for(topology, mlp, x, up, array((HIDDEN, INNER), None, "tensor")).hlo_text)


def multiplies(module: hlo.Module, computation: str) -> bool:
    """Whether there is a product in a computation or in its fusions."""
    body = module.body(computation)
    fused = [module.callee(one) for one in body if one.op == "fusion"]
    return any(one.op == "convolution" for one in body) or any(multiplies(module, each) for each in fused)


def test_what_arrives_is_read_by_products_alone(module: hlo.Module) -> None:
    readers = [
        one
        for one in module.body(module.entry)
        if one.op == "fusion" and any(name.startswith("collective-permute-done") for name in one.operand_names)
    ]
    assert len(readers) >= 2 * (8 - 1)
    assert [one.name for one in readers if not multiplies(module, module.callee(one))] == []


def test_no_common_result_is_split_to_be_sent(module: hlo.Module) -> None:
    body = module.body(module.entry)
    timed = [one for one in body if one.op in ("fusion", "slice") and one.estimated_cycles]
    split = [one for one in timed if "/slice" in one.attributes]
    assert len(split) <= 2  # of the device's own rows
