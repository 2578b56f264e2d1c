"""Gradients of a loop over layers are JAX's own, whatever memory they are written into."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from ttpu_jax.train.backward_loop import LayerGradients, lies_as_rows

LAYERS, FEATURES, WIDTH = 5, 32, 8
RANDOM = np.random.default_rng(0)
PARAMS = {
    "scale": jnp.asarray(1 + RANDOM.normal(size=(LAYERS, WIDTH)) / 8, jnp.float32),
    "up": jnp.asarray(RANDOM.normal(size=(LAYERS, FEATURES, WIDTH)) / 8, jnp.float32),
}
SCALES, KERNELS = (LAYERS, WIDTH), (LAYERS, FEATURES, WIDTH)


def rows(count: int = 2, length: int = 24) -> jax.Array:
    return jnp.asarray(RANDOM.normal(size=(count, length, WIDTH)), jnp.float32)


def mean(params: dict[str, Any], x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The loss of a small model, and what it returns beside it."""

    @jax.checkpoint
    def layer(x: jax.Array, params: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        inner = jax.nn.silu((x * params["scale"]) @ params["up"].T)
        return x + inner @ params["up"], inner.max()

    x, largest = jax.lax.scan(layer, x, params)
    return (x**2).mean(), (largest, x)


GRADIENT = jax.grad(mean, has_aux=True)
BOTH = {"scale", "up"}
LEAN = LayerGradients(GRADIENT, BOTH, {"up"}, devices=1)


def unset(gradients: Callable[..., Any], *arguments: Any) -> list[tuple[int, ...]]:
    """The shapes of memory that is left unset."""

    def of(jaxpr: Any) -> list[tuple[int, ...]]:
        here = [one.outvars[0].aval.shape for one in jaxpr.eqns if one.primitive.name == "empty"]
        inner = (inner for equation in jaxpr.eqns for inner in jex.jaxprs_in_params(equation.params))
        return here + [shape for each in inner for shape in of(each)]

    return sorted(of(jax.make_jaxpr(gradients)(*arguments).jaxpr))


def assert_those_of_jax(gradients: Callable[..., Any], *arguments: Any) -> None:
    ours, theirs = jax.jit(gradients)(*arguments), jax.jit(GRADIENT)(*arguments)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_gradients_are_written_over_the_activations_that_a_layer_has_read() -> None:
    assert_those_of_jax(LEAN, PARAMS, rows())
    assert unset(LEAN, PARAMS, rows()) == [SCALES]


def test_what_unset_memory_holds_never_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs set it to zeros; here it is not a number."""
    monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    for lean in (LEAN, replace(LEAN, by_rows=())):
        assert_those_of_jax(lean, PARAMS, rows())


def test_two_kernels_do_not_lie_over_the_same_activations() -> None:
    params = {**PARAMS, "down": PARAMS["up"][::-1]}

    def gated(params: dict[str, Any], x: jax.Array) -> tuple[jax.Array, None]:
        def layer(x: jax.Array, params: dict[str, Any]) -> tuple[jax.Array, None]:
            return x + jnp.tanh((x * params["scale"]) @ params["up"].T) @ params["down"], None

        return (jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2).mean(), None

    gradient, both = jax.grad(gated, has_aux=True), {"up", "down"}
    lean, x = LayerGradients(gradient, both, both, 1), rows()
    assert unset(lean, params, x) == [KERNELS]
    for path, value in jax.jit(lean)(params, x)[0].items():
        np.testing.assert_allclose(value, jax.jit(gradient)(params, x)[0][path], rtol=1e-5, atol=1e-7, err_msg=path)


def test_loops_with_effects_are_left_as_they_are() -> None:
    def told(params: dict[str, Any], x: jax.Array) -> tuple[jax.Array, None]:
        def layer(x: jax.Array, params: dict[str, Any]) -> tuple[jax.Array, None]:
            jax.debug.callback(lambda: None)
            return x + jnp.tanh((x * params["scale"]) @ params["up"].T) @ params["up"], None

        return (jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2).mean(), None

    lean = LayerGradients(jax.grad(told, has_aux=True), BOTH, {"up"}, 1)
    assert unset(lean, PARAMS, rows()) == []
    assert lean(PARAMS, rows())[0].keys() == PARAMS.keys()


def test_without_activations_that_fit_memory_is_left_unset() -> None:
    """Three rows do not divide 32 features; rows of 15 tokens are shorter than 16 of them; and 8 are no whole tile."""
    for x in (rows(3), rows(2, 15), rows(4)):
        assert_those_of_jax(LEAN, PARAMS, x)
        assert unset(LEAN, PARAMS, x) == [SCALES, KERNELS]
    for other in (replace(LEAN, by_rows=()), replace(LEAN, by_rows={"absent", "scale"}), replace(LEAN, devices=4)):
        assert_those_of_jax(other, PARAMS, rows())
        assert unset(other, PARAMS, rows()) == [SCALES, KERNELS]


def test_gradients_that_are_not_named_begin_with_zeros() -> None:
    for named, expected in ((set(), []), ({"scale"}, [SCALES]), ({"absent"}, [])):
        lean = replace(LEAN, unset=named)
        assert_those_of_jax(lean, PARAMS, rows())
        assert unset(lean, PARAMS, rows()) == expected


def test_activations_that_are_read_again_stay() -> None:
    """Two backward passes read them, one after the other."""

    def twice(params: dict[str, Any], x: jax.Array) -> Any:
        (loss, (largest, last)), pull = jax.vjp(lambda params: mean(params, x), params)
        nothing = jnp.zeros_like(largest)
        first, second = pull((loss, (nothing, last)))[0], pull((loss / 2, (nothing, last**2)))[0]
        return {"up": first["up"], "up again": second["up"]}, loss

    ups = {"up", "up again"}
    lean, x = LayerGradients(twice, ups, ups, devices=1), rows()
    assert unset(lean, PARAMS, x) == [KERNELS, KERNELS]
    ours, theirs = jax.jit(lean)(PARAMS, x), jax.jit(twice)(PARAMS, x)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7), ours, theirs)


def test_rounded_gradients_lie_over_rounded_activations() -> None:
    params = {"scale": PARAMS["scale"], "up": PARAMS["up"].astype(jnp.bfloat16)}

    def rounded(params: dict[str, Any], x: jax.Array) -> tuple[jax.Array, Any]:
        def layer(x: jax.Array, params: dict[str, Any]) -> tuple[jax.Array, None]:
            inner = x * params["scale"] @ params["up"].T.astype(jnp.float32)
            return jnp.tanh(inner @ params["up"]).astype(x.dtype), None

        return (jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2).astype(jnp.float32).mean(), None

    lean = LayerGradients(jax.grad(rounded, has_aux=True), BOTH, {"up"}, 1)
    assert unset(lean, params, rows().astype(jnp.bfloat16)) == [SCALES]
    assert unset(lean, params, rows()) == [SCALES, KERNELS], "float32 activations"


def test_parts_of_a_batch_and_arguments_of_any_kind() -> None:
    def in_parts(params: dict[str, Any], x: jax.Array) -> Any:
        def part(so_far: Any, x: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, so_far, lean(params, x)[0]), None

        return jax.lax.scan(part, jax.tree.map(jnp.zeros_like, params), x.reshape(2, 2, *x.shape[1:]))[0]

    lean = LEAN
    ours = jax.jit(in_parts)(PARAMS, x := rows(4))
    lean = GRADIENT  # type: ignore[assignment]
    theirs = jax.jit(lambda *given: in_parts(*given))(PARAMS, x)
    for path, value in ours.items():
        np.testing.assert_allclose(value, theirs[path], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("divides", [True, False])
def test_devices_keep_their_own_gradients(divides: bool) -> None:
    """Rows and features over the same devices: nothing is exchanged to write one over the other."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    features = 256
    up = jnp.asarray(RANDOM.normal(size=(LAYERS, features, WIDTH)) / 16, jnp.float32)
    lies = NamedSharding(mesh, PartitionSpec(None, "fsdp", None))
    params = {"scale": PARAMS["scale"], "up": jax.device_put(up, lies)}
    x = jax.device_put(rows(8, 32), NamedSharding(mesh, PartitionSpec("fsdp")))

    lean = LayerGradients(GRADIENT, BOTH, {"up"} if divides else (), 8)
    assert unset(lean, params, x) == ([SCALES] if divides else [SCALES, (LAYERS, features, WIDTH)])
    ours = jax.jit(lean)(params, x)[0]
    theirs = jax.jit(GRADIENT)(params, x)[0]
    np.testing.assert_allclose(ours["up"], theirs["up"], rtol=1e-4, atol=1e-7)


def test_what_lies_as_rows() -> None:
    mesh = jax.make_mesh((2, 4, 1), ("data", "fsdp", "tensor"))
    whole = jax.make_mesh((8, 1), ("fsdp", "tensor"))

    def lies(mesh: jax.sharding.Mesh, spec: tuple[Any, ...], rows: tuple[str, ...]) -> bool:
        return lies_as_rows(NamedSharding(mesh, PartitionSpec(*spec)), rows)

    assert lies(whole, (None, "fsdp"), ("fsdp",)) and lies(whole, (None, ("fsdp", "tensor"), None), ("fsdp",))
    assert lies(mesh, (None, ("data", "fsdp"), None), ("data", "fsdp"))
    assert not lies(mesh, (None, ("fsdp", "data"), None), ("data", "fsdp")), "in another order"
    assert not lies(mesh, (None, "fsdp", None), ("data", "fsdp")) and not lies(mesh, (None, "fsdp"), ("fsdp",))
    assert not lies(whole, (None, None, "fsdp"), ("fsdp",)) and not lies(whole, ("fsdp",), ("fsdp",))
    assert not lies(whole, (None, "fsdp"), ())
    one = SingleDeviceSharding(jax.local_devices()[0])
    assert lies_as_rows(one, ()) and not lies_as_rows(one, ("fsdp",))
