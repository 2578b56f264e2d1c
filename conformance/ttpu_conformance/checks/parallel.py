"""Checks that logits do not depend on the layout of the model: sharded over a mesh of eight devices, or with its layers
stacked and scanned over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from ttpu_conformance.case import Case
from ttpu_conformance.check import check
from ttpu_conformance.environment import VIRTUAL_DEVICES
from ttpu_conformance.errors import NotApplicable, NotProven, fail
from ttpu_conformance.measure import FLOAT32, Measured, hold, relative_error
from ttpu_conformance.model_under_test import ShowsSharding, StacksLayers, able
from ttpu_core.errors import UnsupportedError
from ttpu_core.spec import MoESpec

FSDP = ("fsdp=8", "fsdp=4", "fsdp=2")
TENSOR = ("fsdp=2,tensor=4", "data=2,fsdp=2,tensor=2", "fsdp=4,tensor=2", "data=4,tensor=2", "tensor=2")
EXPERT = ("fsdp=2,expert=2,tensor=2", "fsdp=2,expert=2", "expert=2")

REPLICATED = 0.05
"""The most of a model that may lie whole on every device when it is fully sharded: norms and biases are 2 % of the tiny
models."""

WHOLE = 0.15
"""The most of the kernels' elements that a mesh axis may leave whole: routers and projections of low rank are, up to
11 % of a tiny model (gemma3n_text)."""

LARGE = 0.05
"""From this share of the elements on, each kernel (all layers' together) must be sharded: the largest that families
leave whole has 2.5 %, the smallest of attention, MLP and vocabulary in a tiny llama 9 %."""

MOST_NAMED = 4


@check("sharded", scope="heavy")
def check_sharded_fsdp(case: Case) -> Measured:
    """Logits with parameters sharded along `fsdp` equal those of one device, and the parameters are really sharded."""
    mesh = _first_that_fits(case, FSDP)
    model, error = _sharded(case, mesh)
    share = model.replicated_share()
    if share > REPLICATED:
        fail(
            f"on the mesh {mesh} {share:.0%} of the parameters lie whole on every device, where "
            f"{REPLICATED:.0%} is allowed: name logical axes for the large ones in `ttpu_sharding_rules`, or in the "
            "mixer's parameters."
        )
    return _held(mesh, error, f"{share:.1%} of the parameters lie whole on every device")


@check("sharded", scope="heavy")
def check_sharded_tensor(case: Case) -> Measured:
    """Logits with heads, MLP and vocabulary sharded along `tensor` equal those of one device, and the kernels are
    really sharded."""
    return _sharded_along(case, _first_that_fits(case, TENSOR), "tensor")


@check("sharded", scope="heavy")
def check_sharded_experts(case: Case) -> Measured:
    """Logits with experts sharded along `expert` equal those of one device, and the experts are really sharded.

    Raises:
        CheckFailure: they differ, or the experts are not sharded.
        NotApplicable: the model has no experts that the core knows.
    """
    if not any(isinstance(layer.mlp, MoESpec) for layer in case.architecture.spec.layers):
        raise NotApplicable("this model has no experts that the core knows of")
    return _sharded_along(case, _first_that_fits(case, EXPERT), "expert", within=".experts.")


@check("numerics", scope="heavy")
def check_stacked_layers(case: Case) -> Measured:
    """Logits with equal layers stacked and scanned over are those of unrolled layers.

    Raises:
        NotApplicable: the backend cannot stack these layers.
    """
    model = able(case.model, StacksLayers, "runs its layers one by one")
    try:
        ours = model.stacked_logits(case.reference.token_ids)
    except UnsupportedError as error:
        raise NotApplicable(str(error)) from error
    return hold(relative_error(ours, case.logits), FLOAT32, "with layers stacked the logits differ from unrolled ones")


def _sharded_along(case: Case, mesh: str, axis: str, within: str = "") -> Measured:
    """The logits on a mesh, if the kernels whose paths contain `within` are sharded along one of its axes."""
    model, error = _sharded(case, mesh)
    share, whole = model.sharded_share(axis, within)
    if share is None:
        fail(
            f"no kernel's path contains {within!r}, so that none can be sharded along {axis!r}: give such parameters "
            "that path in `ttpu_mlp`, or in the block's own parameters."
        )
    assert share is not None
    if 1 - share > WHOLE or max(whole.values(), default=0.0) >= LARGE:
        named = ", ".join(f"{path} ({part:.0%})" for path, part in list(whole.items())[:MOST_NAMED])
        fail(
            f"on the mesh {mesh} {1 - share:.0%} of the kernels' elements are not sharded along {axis!r}, where "
            f"{WHOLE:.0%} is allowed and {LARGE:.0%} for any one kernel; whole are {named}: name the logical axes that "
            f"{axis!r} shards in `ttpu_sharding_rules`, or in the mixer's parameters."
        )
    return _held(mesh, error, f"{share:.1%} of the kernels' elements are sharded along {axis!r}")


def _sharded(case: Case, mesh: str) -> tuple[ShowsSharding, float]:
    """The model on a mesh, and the error of its logits."""
    ids = np.concatenate([case.reference.token_ids] * 2)  # eight rows, for eight devices
    model = case.load(mesh=mesh)
    error = relative_error(model.logits(ids), np.concatenate([case.logits] * 2))
    return able(model, ShowsSharding, "does not show how its parameters are sharded"), error


def _held(mesh: str, error: float, note: str) -> Measured:
    measured = hold(error, FLOAT32, f"on the mesh {mesh} the logits differ from those of one device")
    return replace(measured, note=f"{mesh}: {note}")


def _first_that_fits(case: Case, meshes: Iterable[str]) -> str:
    """The first mesh on which the backend can shard the model."""
    missing = case.backend.missing_devices(VIRTUAL_DEVICES)
    if missing:
        raise NotProven(missing)
    refused = None
    for mesh in meshes:
        try:
            case.backend.refuse_mesh(case.architecture.spec, mesh)
        except UnsupportedError as error:
            refused = error
            continue
        return mesh
    return str(fail(f"no mesh of {', '.join(meshes)} divides the tiny model ({refused}): declare sizes that are even."))
