"""What tests of attention over sharded sequences share: numbers, meshes, and a comparison of gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ttpu_core.spec import AttentionSpec, LayerSpec, NormSpec
from ttpu_jax.ops.attention.context import AttentionContext
from ttpu_jax.ops.attention.reference import eager

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8)
BATCH = 2
ALL_THREE = {"data": 2, "sequence": 2, "tensor": 2}


def arrays(length: int, seed: int = 0) -> tuple[jax.Array, ...]:
    """Queries, keys, values and sinks."""
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = (BATCH, length, 2, 2, 8), (BATCH, 2, length, 8), (BATCH, 2, length, 8), (2, 2)
    return tuple(jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))


def context(sizes: dict[str, int], platform: str = "cpu") -> AttentionContext:
    """A mesh of this machine's devices, of which `sequence` shards the sequence."""
    devices = np.array(jax.devices()[: int(np.prod(list(sizes.values())))]).reshape(list(sizes.values()))
    return AttentionContext(
        mesh=Mesh(devices, tuple(sizes)),
        batch_axes=("data",) if "data" in sizes else (),
        head_axes=("tensor",) if "tensor" in sizes else (),
        sequence_axes=("sequence",),
        platform=platform,
    )


def positions(length: int, padding: int = 0) -> jax.Array:
    """The second row begins with padding."""
    return jnp.arange(length)[None] - jnp.array([[0], [padding]])


def layers(*specs: AttentionSpec) -> tuple[LayerSpec, ...]:
    """Layers of nothing but attention."""
    return tuple(LayerSpec(spec, None, NormSpec()) for spec in specs)


def check_gradient(attention: Any, sizes: dict[str, int], length: int, window: int, atol: float) -> None:
    """Compare gradients of queries, keys, values and sinks with those of the reference."""
    spec, given, at = replace(SPEC, sinks=True, window=window), arrays(length, 1), positions(length)

    def loss(attention: Any, *x: jax.Array, **more: Any) -> jax.Array:
        return jnp.sin(attention(*x[:3], at, at, spec, sinks=x[3], **more)).sum()

    expected = jax.grad(lambda x: loss(eager, *x))(given)
    found = jax.jit(jax.grad(lambda x: loss(attention, *x, context=context(sizes))))(given)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=atol)
