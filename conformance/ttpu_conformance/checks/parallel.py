"""The same logits however the model is laid out: cut over a mesh of eight devices, or with its layers stacked and
scanned over."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ttpu_conformance.case import Case
from ttpu_conformance.check import Measured, check, fail
from ttpu_conformance.environment import missing_virtual_devices
from ttpu_conformance.errors import NotApplicable, NotProven
from ttpu_conformance.measure import FLOAT32, hold, relative_error
from ttpu_core.errors import UnsupportedError
from ttpu_core.plan.strategy import DEFAULT_STRATEGY, parse_mesh
from ttpu_core.spec import ArchitectureSpec, MoESpec

FSDP = ("fsdp=8", "fsdp=4", "fsdp=2")
TENSOR = ("fsdp=2,tensor=4", "data=2,fsdp=2,tensor=2", "fsdp=4,tensor=2", "data=4,tensor=2", "tensor=2")
EXPERT = ("fsdp=2,expert=2,tensor=2", "fsdp=2,expert=2", "expert=2")

REPLICATED = 0.05
"""The most of a model that may lie whole on every device when it is fully sharded: norms and biases are 2 % of the tiny
models."""


@check("sharded", scope="heavy")
def check_sharded_fsdp(case: Case) -> Measured:
    """Logits with parameters cut along `fsdp` are those of one device, and the parameters are really cut."""
    mesh = _first_that_fits(case.architecture.spec, FSDP)
    return _sharded(case, mesh, cut=True)


@check("sharded", scope="heavy")
def check_sharded_tensor(case: Case) -> Measured:
    """Logits with heads, MLP and vocabulary cut along `tensor` are those of one device."""
    return _sharded(case, _first_that_fits(case.architecture.spec, TENSOR))


@check("sharded", scope="heavy")
def check_sharded_experts(case: Case) -> Measured:
    """Logits with experts cut along `expert` are those of one device."""
    if not any(isinstance(layer.mlp, MoESpec) for layer in case.architecture.spec.layers):
        raise NotApplicable("this model has no experts that the core knows of")
    return _sharded(case, _first_that_fits(case.architecture.spec, EXPERT))


@check("numerics", scope="heavy")
def check_stacked_layers(case: Case) -> Measured:
    """Logits with equal layers stacked and scanned over are those of unrolled layers."""
    ours = case.model.stacked_logits(case.reference.token_ids)
    return hold(relative_error(ours, case.logits), FLOAT32, "with layers stacked the logits differ from unrolled ones")


def _sharded(case: Case, mesh: str, *, cut: bool = False) -> Measured:
    missing = missing_virtual_devices()
    if missing:
        raise NotProven(missing)
    ids = np.concatenate([case.reference.token_ids] * 2)  # eight rows, for eight devices
    model = case.load(mesh=mesh)
    if cut and model.replicated_share > REPLICATED:
        fail(
            f"on the mesh {mesh} {model.replicated_share:.0%} of the parameters lie whole on every device, where "
            f"{REPLICATED:.0%} is allowed: name logical axes for the large ones in `ttpu_sharding_rules`, or in the "
            "mixer's parameters."
        )
    wanted = np.concatenate([case.logits] * 2)
    error = relative_error(model.logits(ids), wanted)
    return hold(error, FLOAT32, f"on the mesh {mesh} the logits differ from those of one device")


def _first_that_fits(spec: ArchitectureSpec, meshes: Iterable[str]) -> str:
    """The first mesh whose axes divide every parameter."""
    refused = None
    for text in meshes:
        mesh = parse_mesh(text)
        try:
            for path, parameter in spec.parameters.items():
                DEFAULT_STRATEGY.mesh_axes(parameter.axes, parameter.shape, mesh, path)
        except UnsupportedError as error:
            refused = error
            continue
        return text
    return str(fail(f"no mesh of {', '.join(meshes)} divides the tiny model ({refused}): declare sizes that are even."))
