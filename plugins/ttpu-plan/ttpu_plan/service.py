"""The planner as a service (`ttpu_core.services.Planner`), which backends call to choose a mesh or to read a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict

from ttpu_core.errors import UnsupportedError
from ttpu_core.loading import Purpose
from ttpu_core.services import Quantization
from ttpu_core.sharding.hardware import Topology
from ttpu_core.sharding.parallelism import Parallelism
from ttpu_core.sharding.strategy import STAGE, Strategy
from ttpu_core.sharding.training_state import PlannedUpdate
from ttpu_core.spec import ArchitectureSpec
from ttpu_plan import planner
from ttpu_plan.given_plan import plan_for, planned_update
from ttpu_plan.memory import estimate_memory
from ttpu_plan.planner import Request, plans, why_nothing_fits
from ttpu_plan.workload import Workload

PURPOSES: dict[Purpose, planner.Purpose] = {"generate": "generation", "serve": "inference", "train": "training"}
"""What a model is opened for → the purpose of its plan."""


class PlannerService:
    """Chooses meshes to run a model on, and reads plans."""

    def fastest_mesh(
        self,
        spec: ArchitectureSpec,
        topology: Topology,
        *,
        strategy: Strategy,
        dtype: str,
        quantization: Quantization | None = None,
        purpose: Purpose = "generate",
        accepts: Callable[[Parallelism], bool] | None = None,
    ) -> Parallelism | None:
        """Return the fastest mesh of these slices on which the model is predicted to fit.

        Args:
            spec: the architecture.
            topology: the slices.
            strategy: the mesh axes that shard each logical axis.
            dtype: of weights, activations and cache.
            quantization: of the layers' weights.
            purpose: what the model is opened for; "serve" is one serving engine over all devices.
            accepts: whether the backend can run a mesh; None accepts all.

        Returns:
            None if the backend accepts no mesh.

        Raises:
            UnsupportedError: the model fits on no mesh; the message says by how much, and what would help.
        """
        request = Request(
            PURPOSES[purpose],
            dtype=dtype,
            quantization=quantization,
            strategy=strategy,
            one_replica=purpose == "serve",
        )
        found = plans(spec, topology, request)
        usable = [one for one in found if accepts is None or accepts(one.parallelism)]
        if not usable:
            return None
        if not usable[0].fits:
            raise UnsupportedError(str(why_nothing_fits(spec, topology, request, usable)))
        return usable[0].parallelism

    plan_for = staticmethod(plan_for)
    planned_update = staticmethod(planned_update)

    def training_memory(self, spec: ArchitectureSpec, planned: PlannedUpdate, dtype: str) -> Mapping[str, int]:
        """Predict the bytes of each device at the peak of a training step, by purpose: "weights" (masters) and
        "optimizer", which are held between steps, and others.

        Args:
            spec: the architecture.
            planned: the step.
            dtype: of activations and of the weights that they are multiplied with.

        Raises:
            UnsupportedError: a mesh that does not divide the model, or that divides the layers.
        """
        mesh, strategy = dict(planned.parallelism.mesh), planned.parallelism.strategy
        if mesh.get(STAGE, 1) > 1:
            raise UnsupportedError(
                f"the memory of a training step on {planned.parallelism} was to be predicted, but that of stages of "
                f"layers is not known: take a mesh without {STAGE}, or the compiler's figures."
            )
        step = Workload("train", planned.rows, planned.length, dtype, "scan", update=planned.settings)
        return asdict(estimate_memory(spec, mesh, step, strategy))


PLANNER = PlannerService()
