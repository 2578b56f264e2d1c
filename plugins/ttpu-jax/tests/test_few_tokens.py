"""Experts of few tokens give what grouped products give, on one device and on several; on a CPU their kernels are
interpreted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moe_cases import BASE, HIDDEN, KINDS, arrays, assert_close, assert_same, module, run_with_gradients, tokens
from strategies import FAMILIES

from ttpu import AutoModelForTPU
from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_core.sharding.experts import FEW
from ttpu_core.sharding.strategy import DEFAULT_STRATEGY, Strategy
from ttpu_core.spec import ActivationSpec, MoESpec, RouterSpec, axes
from ttpu_jax.model.moe import MoE
from ttpu_jax.ops import few_tokens, few_tokens_tpu
from ttpu_jax.ops.few_tokens import Router, run_few
from ttpu_jax.ops.moe import ExpertKernels, choose_experts, weigh_experts
from ttpu_jax.params.placement import local_placement

KERNELS = ExpertKernels(jnp.zeros((8, 2, 12, HIDDEN)), jnp.zeros((8, HIDDEN, 12)))
SERVED = [kind for kind, spec in KINDS.items() if not spec.identity_experts]


def step(batch: int = 8) -> jax.Array:
    return tokens(batch, 1)


def served(layer: MoE, x: jax.Array) -> bool:
    return layer.experts.why_not_few(x) is None


@pytest.mark.parametrize("kind", SERVED)
def test_output_and_gradients_are_those_of_grouped_products(kind: str) -> None:
    spec = KINDS[kind]
    values, x = arrays(spec), step()
    assert served(module(spec, values, form="few"), x)
    assert_same(run_with_gradients(spec, values, x, form="few"), run_with_gradients(spec, values, x, form="grouped"))


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [("topk_softmax", "expert=4,tensor=2"), ("ungated", "tensor=4"), ("sigmoid_on_input", "data=2,expert=2,tensor=2")],
)
def test_a_mesh_changes_nothing(kind: str, mesh: str) -> None:
    spec = KINDS[kind]
    values, x = arrays(spec), step()
    few = run_with_gradients(spec, values, x, mesh, form="few")
    assert_same(few, run_with_gradients(spec, values, x, form="grouped"))


def test_tokens_are_gathered_where_experts_are_cut_along_the_batch() -> None:
    rules = {**dict(DEFAULT_STRATEGY.rules), axes.EXPERT: ("data", "tensor")}
    placement = local_placement("data=2,tensor=4", Strategy(tuple(rules.items())))
    values, x = arrays(BASE), step()
    by_device = jax.jit(lambda values, x: module(BASE, values, placement, "few")(x))(values, x)
    assert_close(by_device, module(BASE, values, form="grouped")(x))


@pytest.mark.parametrize("inner", [256, 200])
def test_kernels_of_several_blocks_and_in_bfloat16(inner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_tokens, "BLOCK_BYTES", 1)
    spec = replace(KINDS["topk_softmax"], intermediate_size=inner)
    values = {path: array.astype(jnp.bfloat16) for path, array in arrays(spec).items()}
    x = step(5).astype(jnp.bfloat16)
    few, grouped = (module(spec, values, form=form)(x) for form in ("few", "grouped"))
    exact = module(spec, {path: array.astype(jnp.float32) for path, array in values.items()}, form="grouped")(
        x.astype(jnp.float32)
    )
    scale = float(jnp.abs(exact).max())
    assert few.dtype == jnp.bfloat16
    assert float(jnp.abs(few - exact).max()) <= max(float(jnp.abs(grouped - exact).max()), 0.01 * scale)


@pytest.mark.parametrize(
    "router",
    [RouterSpec(), RouterSpec(score="sigmoid", correction_bias=True), RouterSpec(score="topk_softmax")],
    ids=lambda router: router.score,
)
def test_equal_scores_and_infinities_are_chosen_as_top_k_chooses_and_nan_is_kept(router: RouterSpec) -> None:
    logits = np.random.default_rng(0).integers(-2, 3, size=(16, 12)).astype(np.float32)
    logits[3, :10], logits[4, 2] = -np.inf, np.nan
    bias = jnp.linspace(0, 0.3, 12) if router.correction_bias else None
    chosen, weights = choose_experts(jnp.asarray(logits), router, 4, bias)
    expected = np.zeros_like(logits)
    np.put_along_axis(expected, np.asarray(chosen), np.asarray(weights), axis=-1)
    found = weigh_experts(jnp.asarray(logits), router, 4, bias)
    numbers = np.arange(16) != 4
    np.testing.assert_allclose(found[numbers], expected[numbers], atol=1e-6)
    assert np.isnan(found[4]).any()  # platforms differ in where top_k puts it


def test_only_experts_that_a_token_chose_are_visited() -> None:
    logits = jnp.full((3, 8), -9.0).at[:, jnp.array([1, 4])].set(5.0).at[2, 6].set(7.0)
    spec = BASE
    _, visits, count = few_tokens_tpu.route(logits, spec, 2, 4, None, None, interpret=True)
    assert (visits.tolist(), int(count[0])) == ([4, *[-1] * 7], 1)  # of experts 2 to 5, only 4 was chosen
    _, visits, count = few_tokens_tpu.route(logits, spec, 0, 8, None, None, interpret=True)
    assert (visits.tolist(), int(count[0])) == ([1, 4, 6, *[-1] * 5], 3)


def test_a_device_without_work_adds_nothing() -> None:
    values, x = arrays(BASE), step()[:, 0]
    kernels = ExpertKernels(values["experts.gate_up.kernel"][4:], values["experts.down.kernel"][4:])
    logits = jnp.zeros((len(x), 8)).at[:, :4].set(9.0)
    out = run_few(x, logits, kernels, 4, Router(), BASE, "cpu")
    assert not np.asarray(out).any()


def test_what_a_token_does_not_choose_cannot_spoil_it() -> None:
    values, x = arrays(BASE), step(4)
    values["experts.gate_up.kernel"] = values["experts.gate_up.kernel"].at[0].mul(1e30)
    few, grouped = (module(BASE, values, form=form)(x) for form in ("few", "grouped"))
    assert np.isfinite(grouped).any()
    np.testing.assert_array_equal(np.isfinite(few), np.isfinite(grouped))


def test_the_form_is_taken_for_few_tokens_on_tpus() -> None:
    layer = module(BASE, arrays(BASE))
    assert "TPU" in (layer.experts.why_not_few(step()) or "")
    many = module(BASE, arrays(BASE), form="few").experts
    assert many.why_not_few(jnp.zeros((FEW + 1, 1, HIDDEN))) is None
    assert few_tokens.why_not_few(BASE, KERNELS, FEW, "tpu", "auto") is None
    assert "more than 128" in (few_tokens.why_not_few(BASE, KERNELS, FEW + 1, "tpu", "auto") or "")
    assert "VMEM" in (few_tokens.why_not_few(BASE, KERNELS, 2**16, "tpu", "few") or "")
    assert "another" in (few_tokens.why_not_few(BASE, KERNELS, 1, "tpu", "grouped") or "")


BY_ERF = replace(BASE, activation=ActivationSpec("gelu"))


@pytest.mark.parametrize(
    ("spec", "platform", "why"),
    [
        (BY_ERF, "tpu", "error function"),
        (KINDS["identities"], "tpu", "return their input"),
        (BASE, "gpu", "kernel for TPUs"),
    ],
)
def test_what_is_not_served_is_refused_where_it_is_asked_for_and_else_grouped(
    spec: MoESpec, platform: str, why: str
) -> None:
    assert why in (few_tokens.why_not_few(spec, KERNELS, 32, platform, "auto") or "")
    with pytest.raises(UnsupportedError, match=f"experts='few' was asked for, but .*{why}: use 'auto' or 'grouped'"):
        few_tokens.why_not_few(spec, KERNELS, 32, platform, "few")


def test_a_model_is_loaded_with_experts_in_the_form_that_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["mistral"]))

    def logits(form: str) -> np.ndarray:
        model = AutoModelForTPU.from_pretrained(tmp_path, backend="jax", random_seed=0, dtype="float32", experts=form)
        assert model.programs.runtime.experts == form
        return np.asarray(model(np.arange(1, 6, dtype=np.int32)[None]).logits)

    np.testing.assert_allclose(logits("few"), logits("grouped"), atol=1e-5)
    with pytest.raises(RequestError, match="one of the forms auto, grouped, few, exchanged: write one of them"):
        AutoModelForTPU.from_pretrained(tmp_path, backend="jax", random_seed=0, experts="all")
