"""Norms whose root is computed for each feature: the same results, and one operation of a TPU fewer."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ttpu_core.spec import NormSpec
from ttpu_jax.aot.compile import without_persistent_cache
from ttpu_jax.aot.topology import make_mesh, tpu_topology
from ttpu_jax.model.modules import Runtime
from ttpu_jax.ops.norm import normalize
from ttpu_jax.optimizations import Optimization
from ttpu_jax.params.placement import Placement, local_placement


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(("axes", "features"), [(1, None), (2, None), (3, None), (1, 24)])
def test_results_and_gradients_are_those_of_a_root_for_each_row(
    dtype: jnp.dtype, kind: str, axes: int, features: int | None
) -> None:
    spec = NormSpec(kind=kind, scale_in_fp32=axes != 2)  # type: ignore[arg-type]
    draw = np.random.default_rng(0)
    values = draw.standard_normal((5, 3, 32)) * np.logspace(-3, 3, 5)[:, None, None]
    values[2, 1], values[3, 0, :4] = 0, 0  # a row of zeros, and some zeros
    x, scale = jnp.asarray(values, dtype), jnp.asarray(draw.standard_normal(32), dtype)

    def outcome(*, by_feature: bool) -> tuple[np.ndarray, ...]:
        def found(x: jax.Array) -> jax.Array:
            return normalize(x, spec, scale, axes=axes, features=features, by_feature=by_feature)

        slope = jax.grad(lambda x: (found(x).astype(jnp.float32) * jnp.arange(32)).sum())(x)
        return np.asarray(found(x), np.float32), np.asarray(slope, np.float32)

    (plain, slope), (fused, fused_slope) = outcome(by_feature=False), outcome(by_feature=True)
    np.testing.assert_array_equal(fused, plain)
    np.testing.assert_allclose(fused_slope, slope, rtol=2e-2 if dtype == jnp.bfloat16 else 1e-4, atol=1e-3)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_what_is_not_finite_stays_in_its_row(value: float) -> None:
    x = np.ones((3, 8), np.float32)
    x[1, 2] = value
    plain, fused = (np.asarray(normalize(jnp.asarray(x), NormSpec(), by_feature=by)) for by in (False, True))
    np.testing.assert_array_equal(fused, plain)
    assert np.isfinite(fused[[0, 2]]).all()


@pytest.mark.tpu_compile
@pytest.mark.parametrize("by_feature", [False, True])
@pytest.mark.parametrize(("slice_name", "kind"), [("v6e:1x1", "rms"), ("v5e:1x1", "layer")])
def test_a_tpu_computes_no_roots_of_rows_apart(by_feature: bool, slice_name: str, kind: str) -> None:
    pytest.importorskip("libtpu")
    whole = NamedSharding(make_mesh(tpu_topology(slice_name), {"tensor": 1}), PartitionSpec())
    spec = NormSpec(kind=kind)  # type: ignore[arg-type]

    def layer(x: jax.Array, more: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = x + more
        return x, normalize(x, spec, by_feature=by_feature) @ kernel

    shapes = [(32, 4096), (32, 4096), (4096, 1024)]
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=whole) for shape in shapes]
    with without_persistent_cache():
        text = jax.jit(layer).lower(*given).compile().as_text()
    operations = re.findall(r"^ +(?:ROOT )?%(\S+) = ", text[text.index("\nENTRY") :], re.MULTILINE)
    assert any("rsqrt" in name for name in operations) == (not by_feature), operations


def test_norms_are_fused_on_tpus_except_in_training() -> None:
    pytest.importorskip("libtpu")
    tpu = Placement(make_mesh(tpu_topology("v6e:1x1"), {"tensor": 1}))
    assert Runtime(tpu).fuses_norms
    assert not Runtime(tpu).in_training().fuses_norms
    assert not Runtime(tpu, without=frozenset({Optimization.FUSED_NORMS})).fuses_norms
    assert not Runtime(local_placement()).fuses_norms
