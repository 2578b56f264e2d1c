"""How much of a model is really cut. In: an architecture, a mesh and a strategy; out: a share of its bytes."""

from __future__ import annotations

from collections.abc import Mapping

from ttpu_core.sharding.padding import pad_architecture
from ttpu_core.sharding.strategy import DEFAULT_STRATEGY, Strategy
from ttpu_core.spec import ArchitectureSpec, Parameter

KEPT_BYTES = {"float64": 8, "float32": 4}


def sharded_share(
    spec: ArchitectureSpec,
    mesh: Mapping[str, int],
    strategy: Strategy = DEFAULT_STRATEGY,
    *,
    bytes_per_element: int = 2,
) -> float:
    """Bytes of the parameters that at least one mesh axis cuts, over the bytes of all, padding included.

    Args:
        spec: it is padded here as the mesh needs it.
        mesh: mesh axis → number of devices along it.
        strategy: logical axis → mesh axes.
        bytes_per_element: of parameters that keep no dtype of their own.

    Raises:
        UnsupportedError: a dimension that the mesh does not divide.
    """
    padded, _ = pad_architecture(spec, mesh, strategy)
    total = cut = 0
    for path, parameter in padded.parameters.items():
        nbytes = parameter.size * _bytes(parameter, bytes_per_element)
        total += nbytes
        cut += nbytes if any(strategy.mesh_axes(parameter.axes, parameter.shape, mesh, path)) else 0
    return cut / total


def _bytes(parameter: Parameter, usual: int) -> int:
    return usual if parameter.dtype is None else KEPT_BYTES.get(parameter.dtype, 2)
