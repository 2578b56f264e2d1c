"""What the TPU compiler makes of products around a ring. No TPU is needed."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ttpu_jax.aot import hlo
from ttpu_jax.aot.compile import compile_for
from ttpu_jax.aot.topology import make_mesh, tpu_topology
from ttpu_jax.ops.matmul.rings import Ring, ring_mlp

HIDDEN, INNER, SEQ = 1024, 4096, 2048


@pytest.fixture(scope="module")
def scheduled() -> list[hlo.Instruction]:
    """The instructions of a gated MLP on v5e:2x4, whose products take longer than its links."""
    topology = tpu_topology("v5e:2x4")
    mesh = make_mesh(topology, {"tensor": 8})

    def array(shape: tuple[int, ...], *partition: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*partition)))

    def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return ring_mlp(
            x, (up, None), (down, None), lambda pair: jax.nn.silu(pair[..., 0, :]) * pair[..., 1, :], Ring(mesh, "tensor")
        )

    arguments = array((1, SEQ, HIDDEN), None, "tensor"), array((2, INNER, HIDDEN), None, "tensor"), array((HIDDEN, INNER), None, "tensor")
    module = hlo.parse(compile_for(topology, mlp, *arguments).hlo_text)
    return module.body(module.entry)


def test_sums_are_added_within_products(scheduled: list[hlo.Instruction]) -> None:
    adding = [one for one in scheduled if one.op == "fusion" and re.search("kind=kLoop", one.attributes) and "/add" in one.attributes]
    assert not adding


def test_no_common_result_is_split_to_be_sent(scheduled: list[hlo.Instruction]) -> None:
    split = [one for one in scheduled if one.op in ("fusion", "slice") and one.estimated_cycles and "/slice" in one.attributes]
    assert len(split) <= 2  # of the device's own rows
