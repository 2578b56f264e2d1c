"""The programs of a serving engine in a plan: asks a capable backend for their sizes on a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from ttpu_core.backend import Plans
from ttpu_core.errors import MissingDependencyError, TTPUError
from ttpu_core.plugin_records import BACKENDS
from ttpu_core.registry import Registry, default_registry
from ttpu_core.services import Quantization
from ttpu_core.sharding.serving import ServedShapes, ServingLimits
from ttpu_core.sharding.strategy import Strategy
from ttpu_core.spec import ArchitectureSpec
from ttpu_plan.plan import REPLICAS
from ttpu_plan.shards import ModelShards
from ttpu_plan.workload import Workload


def planning_backend() -> Plans:
    """Return the preferred backend whose engine can be planned for.

    Raises:
        MissingDependencyError: no installed backend can.
    """
    return _planning_backend(default_registry())


@lru_cache(maxsize=1)
def _planning_backend(registry: Registry) -> Plans:
    found = capable_backend(registry, Plans)
    if not isinstance(found, Plans):
        raise MissingDependencyError(
            "a plan to serve was asked for, but no installed backend says what its engine compiles: "
            '`pip install "ttpu-core[jax]"`, or plan for generate() with `--task generation`.'
        )
    return found


def capable_backend(registry: Registry, capability: type) -> object | None:
    """Return the preferred installed backend with a capability, or None. Backends that fail to import are skipped.

    Args:
        capability: a protocol of `ttpu_core.backend`.
    """
    names = sorted({record.name for record in registry.plugins(BACKENDS) if record.usable})
    try:
        names.sort(key=lambda name: name != registry.default_backend())
    except TTPUError:
        return None
    for name in names:
        try:
            backend = registry.backend(name)
        except TTPUError:
            continue
        if isinstance(backend, capability):
            return backend
    return None


def limits_for(rows: int, context: int, mesh: Mapping[str, int], kv_cache: str | None = None) -> ServingLimits:
    """Return the limits of each replica's engine, for `rows` sequences over all replicas."""
    return ServingLimits.of(rows // mesh.get(REPLICAS, 1), context, kv_cache)


def served_workloads(
    shapes: ServedShapes, limits: ServingLimits, dtype: str, quantization: Quantization | None
) -> tuple[Workload, Workload]:
    """Return the decode step of all sequences of a replica, and its largest step, which also reads prompts."""
    decode = Workload(
        "decode",
        limits.max_num_seqs,
        limits.max_model_len,
        dtype,
        quantization=quantization,
        step=shapes.decode,
        kv_cache=limits.kv_cache,
    )
    return decode, replace(decode, task="mixed", step=shapes.mixed)


def shapes_for(backend: Plans, model: ModelShards, limits: ServingLimits, dtype: str) -> ServedShapes:
    """Return the sizes of the steps and caches that the backend's engine keeps on one replica's devices.

    Raises:
        UnsupportedError: an engine cannot serve the model.
    """
    # A backend is hashable like any object, which its protocol does not say.
    return _shapes(backend, model.spec, tuple(model.mesh.items()), model.strategy, limits, dtype)  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def _shapes(
    backend: Plans,
    spec: ArchitectureSpec,
    mesh: tuple[tuple[str, int], ...],
    strategy: Strategy,
    limits: ServingLimits,
    dtype: str,
) -> ServedShapes:
    return backend.served_shapes(spec, dict(mesh), strategy, limits, dtype)
