"""Policies that keep activations by name: gradients are those of computing everything again, less is computed again
from policy to policy, and what is kept is what the planner counts."""

from __future__ import annotations

import importlib.resources
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.interpreters import partial_eval

from ttpu_core.config import ModelConfig
from ttpu_core.errors import RequestError
from ttpu_core.registry import default_registry
from ttpu_core.sharding.training_state import REMATS, SAVED, Recomputation, UpdateSettings
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, EmbeddingSpec, HeadSpec, LayerSpec, MLPSpec, NormSpec
from ttpu_core.spec.parts import BlockSpec
from ttpu_jax.cli.compile_report import RematChoice
from ttpu_jax.model.causal_model import causal_model
from ttpu_jax.model.loss import next_token_loss
from ttpu_jax.model.modules import Runtime, different_ropes
from ttpu_jax.ops.saved import policy_of
from ttpu_jax.params.initialize import random_parameters
from ttpu_jax.params.placement import local_placement
from ttpu_jax.train.remat import compiled_that_fits, different

LAYERS, ROWS, SEQ, HIDDEN, INNER, HEADS, KV_HEADS, DIM = 2, 2, 128, 48, 80, 4, 2, 16
NORM = NormSpec()
ATTENTION = AttentionSpec(HEADS, KV_HEADS, DIM)
LAYER = LayerSpec(ATTENTION, MLPSpec(INNER), NORM)
SPEC = ArchitectureSpec("tiny", EmbeddingSpec(64, HIDDEN), (LAYER,) * LAYERS, NORM, HeadSpec(), SEQ)
GEMMA = replace(
    SPEC,
    layers=(
        replace(
            LAYER,
            mixer=replace(ATTENTION, q_norm=NORM, k_norm=NORM),
            block=BlockSpec(placement="sandwich"),
        ),
    )
    * LAYERS,
)
"""With norms of queries, of keys, and behind both sub-layers."""

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (ROWS, SEQ)), jnp.int32)
REAL = jnp.ones((ROWS, SEQ), bool)
SPLASH = "splash_attention"


def gradient_of(
    remat: Recomputation, spec: ArchitectureSpec, attention: str, *, trains: bool, stacked: bool = True
) -> Any:
    placement = local_placement()
    runtime = Runtime(placement, attention, different_ropes(spec.layers), trains=trains)
    model = causal_model(spec, runtime, stacked=stacked, remat=remat)
    params = random_parameters(model.parameters, placement, np.dtype(np.float32))
    return jax.grad(lambda params: next_token_loss(model, params, TOKENS, REAL)), params


def traced(remat: Recomputation, spec: ArchitectureSpec = SPEC, *, stacked: bool = True) -> Any:
    """The jaxpr of a gradient, without what nothing reads."""
    gradient, params = gradient_of(remat, spec, SPLASH, trains=True, stacked=stacked)
    jaxpr = jax.make_jaxpr(gradient)(params).jaxpr
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def equations(jaxpr: Any) -> Iterator[Any]:
    """Those of a jaxpr and of what it calls; the inside of kernels is left out."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name != "pallas_call":
            for inner in jaxprs_in_params(equation.params):
                yield from equations(inner)


def counted(remat: Recomputation, *, stacked: bool = True) -> Counter[str]:
    """How often each operation is in a gradient."""
    return Counter(one.primitive.name for one in equations(traced(remat, stacked=stacked)))


def kept_bytes(remat: Recomputation, spec: ArchitectureSpec = SPEC) -> int:
    """Bytes that the loop over layers leaves for the backward pass, of all layers."""
    loop = next(one for one in equations(traced(remat, spec)) if one.primitive.name == "scan")
    stacked = [one.aval for one in loop.outvars if one.aval.shape[:1] == (LAYERS,)]
    return sum(prod(one.shape) * one.dtype.itemsize for one in stacked if jnp.issubdtype(one.dtype, jnp.floating))


@pytest.mark.parametrize(
    ("spec", "attention", "trains"), [(SPEC, "eager", False), (SPEC, SPLASH, True), (GEMMA, "eager", True)]
)
def test_gradients_are_those_of_computing_all_again(spec: ArchitectureSpec, attention: str, trains: bool) -> None:
    gradient, params = gradient_of("full", spec, attention, trains=trains)
    expected = jax.jit(gradient)(params)
    for remat in REMATS[1:]:
        found = jax.jit(gradient_of(remat, spec, attention, trains=trains)[0])(params)
        for path, value in expected.items():
            np.testing.assert_allclose(found[path], value, rtol=2e-4, atol=2e-6, err_msg=f"{remat} {path}")


def test_unrolled_layers_keep_them_too() -> None:
    full, mlp = (counted(remat, stacked=False) for remat in ("full", "mlp"))
    assert (full["pallas_call"], mlp["pallas_call"]) == (4 * LAYERS, 3 * LAYERS)
    assert full["dot_general"] - mlp["dot_general"] == 4 * LAYERS


def test_less_is_computed_again_from_policy_to_policy() -> None:
    """Forward a layer has five products and one kernel, and their gradients are ten products and two kernels. Its last
    product is never computed again."""
    found = {remat: counted(remat) for remat in REMATS}
    kernels = {remat: found[remat]["pallas_call"] for remat in REMATS}
    assert kernels == {"full": 4, "attention": 3, "gate": 3, "dots": 4, "mlp": 3, "none": 3}
    again = {remat: found[remat]["dot_general"] - found["none"]["dot_general"] for remat in REMATS}
    assert again == {"full": 4, "attention": 2, "gate": 1, "dots": 0, "mlp": 0, "none": 0}


@pytest.mark.parametrize("spec", [SPEC, GEMMA])
def test_kept_is_what_the_planner_counts(spec: ArchitectureSpec) -> None:
    from ttpu_plan.activations import kept_beside_input
    from ttpu_plan.shards import shard_model
    from ttpu_plan.workload import Workload

    step = Workload("train", ROWS, SEQ, dtype="float32", layers="scan")
    model, full = shard_model(spec, {}), kept_bytes("full", spec)
    (kind,) = model.layers
    for remat in ("attention", "gate", "dots", "mlp"):
        counted = kept_beside_input(model, kind, replace(step, update=UpdateSettings(remat=remat)))
        assert kept_bytes(remat, spec) - full == LAYERS * counted > 0, remat


def test_attention_keeps_its_products_its_result_and_its_statistics() -> None:
    products = (HEADS + 2 * KV_HEADS) * DIM + HIDDEN
    each = 4 * (products + HEADS * DIM + HEADS)
    assert kept_bytes("attention") - kept_bytes("full") == LAYERS * ROWS * SEQ * each
    assert kept_bytes("gate") - kept_bytes("attention") == LAYERS * ROWS * SEQ * 4 * INNER
    assert kept_bytes("mlp") - kept_bytes("gate") == LAYERS * ROWS * SEQ * 4 * INNER


def test_names_of_policies_are_known_to_all() -> None:
    assert set(SAVED) < set(REMATS)
    assert [one.value for one in RematChoice] == list(REMATS)
    assert policy_of("full") is None and all(policy_of(remat) is not None for remat in REMATS[1:-1])
    with pytest.raises(RequestError, match=r"remat 'mlps' .* one of auto, full, attention, gate, dots, mlp, none"):
        UpdateSettings(remat="mlps")


def test_policies_that_keep_the_same_of_a_mixture_are_tried_once() -> None:
    def published(package: str, name: str) -> ArchitectureSpec:
        path = importlib.resources.files(package) / "configs" / name
        return default_registry().architecture(ModelConfig.from_dict(json.loads(path.read_text()))).spec

    assert different(published("ttpu_llama", "llama-3.1-8b.json")) == REMATS
    assert different(published("ttpu_mistral", "mixtral-8x7b.json")) == ("full", "attention", "dots", "none")
    assert different(published("ttpu_qwen", "qwen1.5-moe-a2.7b.json")) == REMATS, "its shared expert is dense"
    tried: list[str] = []
    device = SimpleNamespace(platform="tpu", memory_stats=lambda: {"bytes_limit": 1})
    sizes = dict.fromkeys(("argument", "output", "temp"), 1) | {"alias": 0}
    analysis = SimpleNamespace(**{f"{name}_size_in_bytes": size for name, size in sizes.items()})

    def compiled(remat: str) -> Any:
        tried.append(remat)
        return SimpleNamespace(memory_analysis=lambda: analysis)

    chosen, _ = compiled_that_fits(compiled, device, ("full", "attention", "none"))  # type: ignore[arg-type]
    assert (chosen, tried) == ("full", ["none", "attention", "full"])
