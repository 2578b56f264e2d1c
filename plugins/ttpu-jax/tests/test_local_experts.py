"""A device that gathers the rows of its own experts gives what it gives of all rows, however unevenly tokens choose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moe_cases import (
    BASE,
    KINDS,
    Arrays,
    arrays,
    assert_close,
    assert_same,
    loss,
    module,
    run_with_gradients,
    table,
    tokens,
)

from ttpu_core.sharding import experts
from ttpu_core.sharding.strategy import DEFAULT_STRATEGY, Strategy
from ttpu_core.spec import MoESpec, axes
from ttpu_core.spec.kernel_format import ActivationFormat
from ttpu_jax.model import moe
from ttpu_jax.ops import local_experts
from ttpu_jax.ops.kernels import INT8, QuantizedKernel
from ttpu_jax.ops.local_experts import run_local, why_not_local
from ttpu_jax.ops.moe import ExpertKernels, run_experts
from ttpu_jax.params.placement import Placement, local_placement

BY_TENSOR = {axes.EXPERT: ("tensor",)}


def placed(mesh: str, rules: dict[str, tuple[str, ...]]) -> Placement:
    return local_placement(mesh, Strategy(tuple({**dict(DEFAULT_STRATEGY.rules), **rules}.items())))


def run_on(spec: MoESpec, values: Arrays, x: jax.Array, placement: Placement) -> jax.Array:
    values = {path: jax.device_put(a, placement.parameter(path, table(spec)[path])) for path, a in values.items()}
    return jax.jit(lambda values, x: module(spec, values, placement)(x))(values, x)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each call."""
    found: list[int] = []

    def run(x: jax.Array, *rest: Any) -> jax.Array:
        found.append(len(x))
        return run_local(x, *rest)

    monkeypatch.setattr(moe, "run_local", run)
    return found


@pytest.mark.parametrize(
    ("kind", "mesh", "rules"),
    [
        ("topk_softmax", "tensor=8", BY_TENSOR),
        ("sigmoid_on_input", "tensor=4", BY_TENSOR),
        ("corrected_groups", "expert=4,tensor=2", {}),
        ("identities", "expert=4", {}),
        ("ungated", "expert=2,tensor=2", {}),
        ("clamped", "tensor=4", BY_TENSOR),
        ("all_experts", "expert=8", {}),
        ("gated_shared", "data=2,expert=4", {}),
        ("topk_softmax", "expert=2,tensor=4", {axes.EXPERT: ("expert", "tensor")}),
        ("clamped", "expert=2,tensor=4", {axes.EXPERT: ("tensor", "expert")}),
    ],
)
@pytest.mark.parametrize("room", [0.3, 1.5])
def test_output_is_that_of_one_device(
    kind: str, mesh: str, rules: dict[str, tuple[str, ...]], room: float, monkeypatch: pytest.MonkeyPatch,
    calls: list[int],
) -> None:  # fmt: skip
    """Also where most rows have no room at first."""
    monkeypatch.setattr(experts, "ROOM", room)
    spec = KINDS[kind]
    values = arrays(spec)
    assert_close(run_on(spec, values, tokens(), placed(mesh, rules)), module(spec, values)(tokens()))
    assert calls


def test_all_tokens_may_choose_experts_of_one_device(calls: list[int]) -> None:
    spec = KINDS["topk_softmax"]
    values = arrays(spec)
    values["router.bias"] = values["router.bias"].at[6:].add(1000.0)
    assert_close(run_on(spec, values, tokens(), placed("tensor=4", BY_TENSOR)), module(spec, values)(tokens()))
    assert calls


@pytest.mark.parametrize("kind", ["topk_softmax", "identities"])
def test_gradients_are_those_of_one_device(kind: str, calls: list[int]) -> None:
    spec = KINDS[kind]
    ours = run_with_gradients(spec, arrays(spec), tokens(), "expert=4,tensor=2")
    assert_same(ours, run_with_gradients(spec, arrays(spec), tokens()))
    assert calls


@pytest.mark.parametrize("form", ["grouped", "exchanged"])
def test_other_forms_gather_all_rows(form: Any, calls: list[int]) -> None:
    placement, values = placed("tensor=8", BY_TENSOR), arrays(BASE)
    grouped = module(BASE, values, placement, form)
    assert_close(jax.jit(lambda x: grouped(x))(tokens()), module(BASE, values)(tokens()))
    assert not calls


def test_quantized_experts(calls: list[int]) -> None:
    values = arrays(BASE)
    for path in ("experts.gate_up.kernel", "experts.down.kernel"):
        scale = jnp.abs(values[path]).max(-1) / 127
        values[path] = QuantizedKernel(jnp.round(values[path] / scale[..., None]).astype(jnp.int8), scale)
    there = module(BASE, values, placed("tensor=8", BY_TENSOR))
    assert_close(jax.jit(lambda x: there(x))(tokens()), module(BASE, values)(tokens()), 2e-5)
    assert calls


def test_quantized_experts_give_their_rows_gradients_too(calls: list[int]) -> None:
    values = arrays(BASE)
    for path in ("experts.gate_up.kernel", "experts.down.kernel"):
        scale = jnp.abs(values[path]).max(-1) / 127
        values[path] = QuantizedKernel(jnp.round(values[path] / scale[..., None]).astype(jnp.int8), scale)

    def gradient(placement: Placement | None) -> jax.Array:
        layer = module(BASE, values, placement)
        return jax.jit(jax.grad(lambda x: loss(layer(x))))(tokens())

    assert_close(gradient(placed("tensor=8", BY_TENSOR)), gradient(None), 2e-5)
    assert calls


def test_tokens_of_padding_have_no_rows() -> None:
    """They are alike, and would need room on the same few devices."""
    spec, x = KINDS["renormalized"], tokens()
    real = jnp.arange(x.shape[1]) < jnp.arange(1, x.shape[0] + 1)[:, None]
    layer = module(spec, arrays(spec), placed("tensor=8", BY_TENSOR))
    layer.set_attributes(real_tokens=moe.RealTokens(real), raise_if_not_found=False)
    found, expected = jax.jit(lambda x: layer(x))(x), module(spec, arrays(spec))(x)
    assert_close(found, jnp.where(real[..., None], expected, 0))


def test_devices_share_rows_where_more_than_two_have_many_tokens() -> None:
    assert [experts.gathers_own_rows(*each) for each in [(512, 3), (511, 8), (4096, 2)]] == [True, False, False]


SPEC = MoESpec(num_experts=16, experts_per_token=4, intermediate_size=128)


def kernels_of(first: int, held: int, dtype: Any) -> ExpertKernels:
    rng = np.random.default_rng(3)
    up, down = rng.normal(size=(16, 2, 128, 128), scale=0.1), rng.normal(size=(16, 128, 128), scale=0.1)
    return ExpertKernels(*(jnp.asarray(each[first : first + held], dtype) for each in (up, down)))


def choices(count: int, busiest: int | None = None) -> tuple[jax.Array, jax.Array]:
    """Experts of tokens and their weights; all tokens choose `busiest` and the three after it, if given."""
    rng = np.random.default_rng(4)
    chosen = np.stack([rng.permutation(16)[:4] for _ in range(count)])
    if busiest is not None:
        chosen[:] = np.arange(busiest, busiest + 4)
    return jnp.asarray(chosen, jnp.int32), jnp.asarray(rng.uniform(size=(count, 4)), jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("count", "first", "busiest"), [(300, 4, None), (256, 12, None), (300, 4, 4), (300, 4, 8)])
def test_the_kernels_of_a_tpu_add_the_rows_of_each_token(
    count: int, first: int, busiest: int | None, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are added by a product there. What is not a row of the device's experts does not count."""
    outputs = local_experts.expert_outputs

    def with_nan(rows: jax.Array, weight: jax.Array, expert: jax.Array, sizes: jax.Array, *rest: Any) -> jax.Array:
        found = outputs(rows, weight, expert, sizes, *rest)
        return jnp.where(jnp.arange(len(rows))[:, None] < sizes.sum(), found, jnp.nan)

    monkeypatch.setattr(local_experts, "expert_outputs", with_nan)
    x = jnp.asarray(np.random.default_rng(5).normal(size=(count, 128)), jnp.bfloat16)
    given = x, *choices(count, busiest), kernels_of(first, 4, jnp.bfloat16), SPEC
    found = run_local(*given, "tpu-interpreted", jnp.int32(first), (), jnp.dtype(dtype))
    expected = run_experts(*given, "cpu", first)
    assert found.dtype == dtype
    assert_close(found.astype(jnp.float32), expected, 2e-2)
    assert bool(jnp.isfinite(found).all())
    assert bool((jnp.abs(found).sum(1) == 0).all()) == (busiest == 8)


@pytest.mark.parametrize("wrong", [jnp.nan, jnp.inf, -jnp.inf])
def test_what_is_not_finite_reaches_no_other_token(wrong: float) -> None:
    """A product adds the rows of 128 tokens at once, most of them times zero."""
    x = jnp.asarray(np.random.default_rng(5).normal(size=(256, 128)), jnp.bfloat16)
    kernels = kernels_of(4, 4, jnp.bfloat16)
    rest = *choices(256, 4), kernels, SPEC, "tpu-interpreted", jnp.int32(4), (), jnp.dtype(jnp.float32)
    expected, found = run_local(x, *rest), run_local(x.at[5, 7].set(wrong), *rest)
    others = jnp.arange(256) != 5
    assert bool(jnp.isfinite(found[others]).all()) and bool((found[others] == expected[others]).all())
    assert not bool((jnp.abs(found[5]) < 1e30).any())


def test_experts_that_return_their_input_need_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    outputs = local_experts.expert_outputs
    monkeypatch.setattr(local_experts, "expert_outputs", lambda x, *a: rows.append(len(x)) or outputs(x, *a))
    x, given = jnp.ones((64, 128), jnp.bfloat16), (kernels_of(0, 4, jnp.bfloat16),)
    for identities in (0, 16):
        spec = replace(SPEC, identity_experts=identities)
        run_local(x, *choices(64), *given, spec, "cpu", jnp.int32(0), (), jnp.dtype(jnp.float32))
    assert set(rows) == {96, 48}  # half more than the mean


def test_a_tpu_adds_float32_rows_otherwise() -> None:
    kernels = kernels_of(0, 4, jnp.float32)
    assert "float32" in str(why_not_local(jnp.zeros((8, 128)), kernels, "tpu", ()))
    assert why_not_local(jnp.zeros((8, 128)), kernels, "cpu", ()) is None
    assert why_not_local(jnp.zeros((8, 128), jnp.bfloat16), kernels, "tpu", ("tensor",)) is None


def test_devices_that_exchange_features_of_rows_do_not_repeat_it() -> None:
    kernels = kernels_of(0, 4, jnp.float32)
    order = jnp.tile(jnp.arange(128)[::-1], (4, 1))
    down = QuantizedKernel(jnp.ones((4, 128, 128), jnp.int8), jnp.ones((4, 128)), input_order=order)
    ordered = kernels._replace(down=down)
    assert "repeat" in str(why_not_local(jnp.zeros((8, 128)), ordered, "cpu", ("tensor",)))
    assert why_not_local(jnp.zeros((8, 128)), ordered, "cpu", ()) is None
    for static in (False, True):  # which have the largest of a row's features in common, or need none
        form = replace(INT8, activation=ActivationFormat("int8", static=static))
        rounded = kernels._replace(down=QuantizedKernel(down.values, down.scale, format=form))
        assert (why_not_local(jnp.zeros((8, 128)), rounded, "cpu", ("tensor",)) is None) == static
        assert why_not_local(jnp.zeros((8, 128)), rounded, "cpu", ()) is None
