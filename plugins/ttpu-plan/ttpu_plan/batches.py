"""Proposes the rows of an update for some slices: as many as fit, on the mesh and with the recomputation that are
predicted to be fastest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from ttpu_core.sharding.hardware import Topology
from ttpu_core.sharding.training_state import REMATS, Recomputation, UpdateSettings
from ttpu_core.spec import ArchitectureSpec
from ttpu_core.spec.training_flops import training_flops
from ttpu_plan.plan import Plan
from ttpu_plan.planner import Request, meshes, plan_of_mesh
from ttpu_plan.zero import batch_axes

MOST_ROWS = 1024
"""Rows of a device in each part of an update; small models have room for more, but gain nothing from it."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of an update.

    Args:
        plan: for these rows.
        rows_each: of a device that rows are divided over, in each part of an update.
    """

    plan: Plan
    rows_each: int

    @property
    def remat(self) -> str:
        """What the backward pass computes again."""
        return self.plan.programs[0].workload.settings.remat

    @property
    def rows(self) -> int:
        """Rows of an update, of all devices and parts."""
        return self.plan.programs[0].workload.batch

    def mfu(self, spec: ArchitectureSpec) -> float:
        """The share of the devices' FLOPs that the model takes by `training_flops`, by the plan's roofline: 0 to 1."""
        topology = self.plan.slices
        flops = training_flops(spec, self.plan.programs[0].workload.context) * self.plan.tokens_per_second
        return flops / topology.num_devices / topology.chip.bf16_flops


def best_batches(
    spec: ArchitectureSpec, topology: Topology, request: Request, remats: tuple[Recomputation, ...] = REMATS
) -> list[Batch]:
    """Return a batch for each recomputation, those with the most predicted tokens a second first: of each mesh the most
    rows that fit, and of these the best. Empty where not one row a device fits.

    Args:
        spec: the model.
        topology: the slices.
        request: to train; its batch is not read.
        remats: what the backward pass may compute again.
    """

    def rank(one: Batch) -> tuple[float, int]:
        return one.plan.tokens_per_second, -one.plan.memory.total

    every = list(meshes(spec, topology, request))
    found = ([_most_rows(spec, topology, mesh, request, remat) for mesh in every] for remat in remats)
    fitting = [[batch for batch in of_remat if batch is not None] for of_remat in found]
    best = [max(of_remat, key=rank) for of_remat in fitting if of_remat]
    # Where none of a model's layers has what a word keeps, it is the same update as the word before.
    different = {(one.plan.mesh, one.rows, *rank(one)): one for one in reversed(best)}
    return sorted(different.values(), key=rank, reverse=True)


def _most_rows(
    spec: ArchitectureSpec, topology: Topology, mesh: Mapping[str, int], request: Request, remat: Recomputation
) -> Batch | None:
    shards = prod(mesh[axis] for axis in batch_axes(mesh, request.sharding))
    update = replace(request.update or UpdateSettings(), remat=remat)

    def fitting(rows: int) -> Batch | None:
        asked = replace(request, batch=rows * shards * request.parts, update=update)
        plan = plan_of_mesh(spec, topology, dict(mesh), asked)
        return Batch(plan, rows) if plan.fits else None

    best, step = None, 1
    while step < MOST_ROWS and (found := fitting(step)):
        best, step = found, 2 * step
    step //= 2
    while best is not None and step > 1:  # between the most that fitted and the least that did not
        step //= 2
        best = fitting(best.rows_each + step) or best
    return best
