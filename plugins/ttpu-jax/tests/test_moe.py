"""A mixture of experts gives each token what its own experts give it, on one device and on several."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from moe_cases import (
    BASE,
    HIDDEN,
    KINDS,
    Arrays,
    arrays,
    assert_close,
    assert_same,
    loss,
    module,
    reference,
    reference_weights,
    run,
    run_with_gradients,
    table,
    tokens,
)

from ttpu_core.sharding.strategy import DEFAULT_STRATEGY, Strategy
from ttpu_core.spec import ActivationSpec, MLPSpec, MoESpec, RouterSpec, axes
from ttpu_core.spec.kernel_format import ActivationDtype, ActivationFormat
from ttpu_jax.ops import moe
from ttpu_jax.ops.few_tokens import ExpertsForm
from ttpu_jax.ops.grouped import grouped_linear
from ttpu_jax.ops.kernels import INT8, QuantizedKernel
from ttpu_jax.ops.moe import choose_experts
from ttpu_jax.params.placement import local_placement


@pytest.mark.parametrize("kind", KINDS)
def test_output_and_gradients_are_those_of_all_experts_masked(kind: str) -> None:
    spec = KINDS[kind]
    values, x = arrays(spec), tokens()
    gradients = jax.jit(jax.grad(lambda values, x: loss(reference(spec, values, x)), argnums=(0, 1)))(values, x)
    assert_same(run_with_gradients(spec, values, x), (reference(spec, values, x), *gradients))


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("topk_softmax", "fsdp=8"),
        ("sigmoid_on_input", "fsdp=2,tensor=4"),
        ("topk_softmax", "expert=4,tensor=2"),
        ("sigmoid_on_input", "expert=4,tensor=2"),
        ("corrected_groups", "expert=4,tensor=2"),
        ("identities", "expert=4,tensor=2"),
    ],
)
def test_a_mesh_changes_neither_output_nor_gradients(kind: str, mesh: str) -> None:
    spec = replace(KINDS[kind], shared=MLPSpec(8))
    values, x = arrays(spec), tokens()
    assert_same(run_with_gradients(spec, values, x, mesh), on_one_device(spec))


@cache
def on_one_device(spec: MoESpec) -> tuple[jax.Array, Arrays, jax.Array]:
    return run_with_gradients(spec, arrays(spec), tokens())


@pytest.mark.parametrize("form", ["grouped", "auto"])
@pytest.mark.parametrize(("mesh", "dtype"), [("tensor=4", "int8"), ("expert=4,tensor=2", "float8_e4m3fn")])
def test_a_mesh_changes_no_step_of_rounded_activations(mesh: str, form: ExpertsForm, dtype: ActivationDtype) -> None:
    """A device used to round the features that it has in steps of the largest of those, not of the whole row's."""
    spec = replace(BASE, router=RouterSpec(score="sigmoid"))
    values, x = arrays(spec), tokens()
    for path in ("experts.gate_up.kernel", "experts.down.kernel"):
        scale = jnp.abs(values[path]).max(-1) / 127
        whole = jnp.round(values[path] / scale[..., None]).astype(jnp.int8)
        values[path] = QuantizedKernel(whole, scale, format=replace(INT8, activation=ActivationFormat(dtype)))
    there = module(spec, values, local_placement(mesh), form)
    assert_close(jax.jit(lambda x: there(x))(x), module(spec, values)(x), 2e-5)


def test_tokens_that_a_mesh_does_not_divide_are_computed_all_the_same() -> None:
    spec, x = BASE, tokens(batch=3, seq=1)
    values = arrays(spec)
    assert_same(run_with_gradients(spec, values, x, "fsdp=2,expert=4"), run_with_gradients(spec, values, x))


def test_a_strategy_may_cut_experts_along_the_axis_of_the_batch() -> None:
    rules = {**dict(DEFAULT_STRATEGY.rules), axes.EXPERT: ("data",)}
    placement = local_placement("data=4,tensor=2", Strategy(tuple(rules.items())))
    spec, x = KINDS["renormalized"], tokens()
    values = arrays(spec)
    placed = {path: jax.device_put(a, placement.parameter(path, table(spec)[path])) for path, a in values.items()}
    out = jax.jit(lambda values, x: module(spec, values, placement)(x))(placed, x)
    assert placed["experts.down.kernel"].addressable_shards[0].data.shape == (2, HIDDEN, 6)
    assert_close(out, reference(spec, values, x))


def test_a_token_does_not_depend_on_those_beside_it() -> None:
    spec = KINDS["renormalized"]
    values, x = arrays(spec), tokens()
    whole = run(spec, values, x)
    assert_close(run(spec, values, x[2:3]), whole[2:3])
    assert_close(run(spec, values, x[5:6, 3:4]), whole[5:6, 3:4])
    others = x.at[0].set(100.0)
    assert_close(run(spec, values, others)[1:], whole[1:])


def test_the_router_can_read_something_else_than_the_experts() -> None:
    spec = KINDS["renormalized"]
    values, x, other = arrays(spec), tokens(), tokens(seed=7)
    weights, _ = reference_weights(spec, values, other)
    alone = [
        reference(replace(spec, num_experts=1, experts_per_token=1, router=RouterSpec()), values_of(values, e), x)
        for e in range(8)
    ]
    expected = sum(weights[..., e : e + 1] * out for e, out in enumerate(alone))
    assert_close(module(spec, values)(x, other), expected)


def values_of(values: Arrays, expert: int) -> Arrays:
    return {path: a[expert : expert + 1] for path, a in values.items()}


def test_in_bfloat16_results_are_as_near_as_bfloat16_allows() -> None:
    spec = KINDS["corrected_groups"]
    values = arrays(spec, dtype=jnp.bfloat16)
    x = tokens().astype(jnp.bfloat16)
    out, to_values, to_x = run_with_gradients(spec, values, x)
    assert (out.dtype, to_x.dtype, to_values["experts.down.kernel"].dtype) == (jnp.bfloat16,) * 3
    wide = {path: a.astype(jnp.float32) for path, a in values.items()}
    expected = run_with_gradients(spec, wide, x.astype(jnp.float32))
    assert_close(out, expected[0], 0.02)  # a few roundings of 2 ** -8
    assert_close(to_x, expected[2], 0.02)


def test_large_logits_of_a_sigmoid_router_still_differ() -> None:
    chosen, weights = choose_experts(jnp.array([30.0, 40.0, 35.0]), RouterSpec(score="sigmoid"), 1)
    assert (int(chosen[0]), float(weights[0])) == (1, 1.0)


def test_a_correction_bias_changes_the_choice_and_not_the_weights() -> None:
    logits, bias = jnp.array([0.3, 0.2, 0.1]), jnp.array([0.0, 0.0, 1.0])
    chosen, weights = choose_experts(logits, RouterSpec(score="sigmoid", correction_bias=True), 1, bias)
    assert int(chosen[0]) == 2
    assert_close(weights, jax.nn.sigmoid(logits[2:]))


def test_weights_are_divided_by_a_least_sum() -> None:
    logits = jnp.array([2.0, 1.0, 0.0])
    plain = jax.nn.softmax(logits)[:2]
    for least, divisor in ((0.5, plain.sum()), (4.0, 4.0)):
        _, weights = choose_experts(logits, RouterSpec(renormalize=True, renormalize_min=least), 2)
        assert_close(weights, plain / divisor)


def test_a_router_in_float32_tells_logits_apart_that_bfloat16_rounds_to_one() -> None:
    spec = replace(BASE, router=RouterSpec(fp32=True))
    assert table(spec)["router.kernel"].dtype == "float32"
    values, x = arrays(spec, dtype=jnp.bfloat16), jnp.ones((1, 1, HIDDEN), jnp.bfloat16)
    slopes = 1 + jnp.arange(8, dtype=jnp.float32)[:, None] * 2.0**-12
    values["router.kernel"] = jnp.broadcast_to(slopes, (8, HIDDEN))
    chosen, _ = module(spec, values).router(x)
    assert chosen.ravel().tolist() == [7, 6, 5][: spec.experts_per_token]


def test_every_parameter_is_held_under_its_own_path() -> None:
    for spec in KINDS.values():
        state = nnx.to_flat_state(nnx.state(module(spec, arrays(spec)), nnx.Param))
        held = {".".join(map(str, path)): variable.get_metadata("axis_names") for path, variable in state}
        assert held == {path: parameter.axes for path, parameter in table(spec).items()}


GATED = {
    "few": (40, 24, 16, [5, 0, 11, 3]),
    "many_in_one_group": (300, 256, 128, [0, 0, 50, 250, 0]),
    "a_block_is_several_groups": (300, 100, 96, [100, 0, 0, 7, 130, 13]),
    "several_blocks_of_the_kernel": (64, 384, 4224, [20, 30]),
    "a_block_that_the_output_does_not_fill": (40, 1100, 2112, [5, 35]),
    "none": (16, 8, 8, [0, 0]),
}


@pytest.mark.parametrize("case", GATED)
def test_gated_features_of_one_kernel_and_their_gradients_are_those_of_products(case: str) -> None:
    rows, out, inner, sizes = GATED[case]
    rng = np.random.default_rng(0)
    x, up = rng.normal(size=(rows, inner)), rng.normal(size=(len(sizes), 2, out, inner)) / inner**0.5
    weight, gradient = rng.normal(size=rows), rng.normal(size=(rows, out))
    used, spec = sum(sizes), replace(BASE, activation=ActivationSpec("gelu_tanh"))
    x[used:], gradient[used:], weight[used:] = np.nan, np.nan, 0  # what comes after the last group must not matter
    given = [jnp.asarray(each, jnp.float32) for each in (x, up, weight)]
    counts = jnp.asarray(sizes, jnp.int32)
    one_kernel = moe._gated(*given, counts, spec, "tpu-interpreted")[:used]

    def plain(x: jax.Array, up: jax.Array, weight: jax.Array) -> jax.Array:
        return moe._activated(grouped_linear(x, up, counts, "cpu"), weight[:, None], spec)

    expected, back = jax.vjp(plain, *given)
    assert_close(one_kernel, expected[:used]) if used else None
    _, back_too = jax.vjp(lambda *each: moe._gated(*each, counts, spec, "tpu-interpreted"), *given)
    ours, theirs = (each(jnp.asarray(gradient, jnp.float32)) for each in (back_too, back))
    for path, part, other in zip(("x", "up", "weight"), ours, theirs, strict=True):
        within = slice(None) if path == "up" else slice(used)
        assert_close(part[within], other[within]) if used else None


@pytest.mark.parametrize("kind", ["softmax", "topk_softmax", "ungated", "sigmoid_on_input", "normed_and_scaled"])
def test_a_tpu_computes_what_a_cpu_computes(kind: str) -> None:
    spec, x = KINDS[kind], tokens()[0]
    values, up = arrays(spec), "gate_up" if KINDS[kind].gated else "up"
    kernels = [values.get(f"experts.{name}") for name in (f"{up}.kernel", "down.kernel", f"{up}.bias", "down.bias")]
    half = moe.ExpertKernels(*(None if each is None else each[4:] for each in kernels))  # others lie elsewhere
    chosen, weights = choose_experts(x @ values["router.kernel"].T, spec.router, spec.experts_per_token)
    tpu, cpu = (
        moe.run_experts(x, chosen, weights, half, spec, platform, 4) for platform in ("tpu-interpreted", "cpu")
    )
    assert_close(tpu, cpu)
