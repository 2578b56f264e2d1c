"""The service "planner" (`ttpu_core.services.Planner`), by which a backend has a mesh chosen."""

from __future__ import annotations

from collections.abc import Callable

from ttpu_core.errors import UnsupportedError
from ttpu_core.sharding.hardware import Topology
from ttpu_core.sharding.parallelism import Parallelism
from ttpu_core.sharding.strategy import Strategy
from ttpu_core.sharding.workload import Quantization
from ttpu_core.spec import ArchitectureSpec
from ttpu_plan.planner import Purpose, Request, plans, why_nothing_fits


class PlannerService:
    """Chooses meshes to serve a model on."""

    def fastest_mesh(
        self,
        spec: ArchitectureSpec,
        topology: Topology,
        *,
        strategy: Strategy,
        dtype: str,
        quantization: Quantization | None = None,
        served: bool = False,
        accepts: Callable[[Parallelism], bool] | None = None,
    ) -> Parallelism | None:
        """See `ttpu_core.services.Planner`."""
        purpose: Purpose = "inference" if served else "generation"
        request = Request(purpose, dtype=dtype, quantization=quantization, strategy=strategy, one_replica=served)
        found = plans(spec, topology, request)
        usable = [one for one in found if accepts is None or accepts(one.parallelism)]
        if not usable:
            return None
        if not usable[0].fits:
            raise UnsupportedError(str(why_nothing_fits(spec, topology, request, usable)))
        return usable[0].parallelism


PLANNER = PlannerService()
