"""A strategy maps logical axes to mesh axes: which mesh axes shard each dimension of a parameter or an activation.
All backends use the same table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from ttpu_core.errors import UnsupportedError
from ttpu_core.sharding.shares import LANES, shared_dimension
from ttpu_core.spec import axes

STAGE = "stage"
"""The mesh axis along which the layers of a training step are divided."""

MESH_AXES = (STAGE, "data", "fsdp", "expert", "sequence", "tensor")
"""Mesh axes from the slowest links to the fastest. Stages of a pipeline communicate least; tensor parallelism
communicates most, so its devices are neighbours."""

MeshAxes = tuple[str, ...]


@dataclass(frozen=True)
class Strategy:
    """Logical axis → the mesh axes that shard it. A logical axis that is not listed is not sharded, but for
    `axes.LOOKED_UP`, see `_of_looked_up`."""

    rules: tuple[tuple[str, MeshAxes], ...]

    def mesh_axes(
        self, logical: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mapping[str, int], name: str
    ) -> tuple[MeshAxes, ...]:
        """The mesh axes that shard each dimension; () for a dimension that every device holds whole. Mesh axes of
        size 1 are omitted. What shards features shards another dimension of experts' kernels, see `shared_dimension`,
        and what shards the vocabulary shards the features of a table that is only looked up, see `_of_looked_up`.

        Args:
            logical: the logical axis of each dimension.
            shape: the size of each dimension.
            mesh: mesh axis → number of devices along it.
            name: name of the array for the error message.

        Raises:
            UnsupportedError: the devices do not divide a dimension.
        """
        table = self._table(logical, shape, mesh)
        taken: set[str] = set()
        result: list[MeshAxes] = []
        for axis, size in zip(logical, shape, strict=True):
            wanted = tuple(a for a in table.get(axis or "", ()) if mesh.get(a, 1) > 1 and a not in taken)
            devices = 1
            for mesh_axis in wanted:
                devices *= mesh[mesh_axis]
            if size % devices:
                valid = [str(count) for count in range(1, size + 1) if size % count == 0 and count <= 256]
                raise UnsupportedError(
                    f"mesh axis {'×'.join(wanted)!r} has {devices} devices, but {name} has {size} {axis}: use "
                    f"{', '.join(valid)} devices on that axis."
                )
            taken.update(wanted)
            result.append(wanted)
        return tuple(result)

    def _table(
        self, logical: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mapping[str, int]
    ) -> dict[str, MeshAxes]:
        """The rules for an array of these logical axes."""
        table = dict(self.rules)
        if axes.LOOKED_UP in logical and axes.LOOKED_UP not in table:
            return self._of_looked_up(logical, shape, mesh)
        if axes.EXPERT not in logical or axes.EMBED not in logical:
            return table
        others = {mesh_axis for axis in logical if axis != axes.EMBED for mesh_axis in table.get(axis or "", ())}
        sharing = tuple(a for a in table.get(axes.EMBED, ()) if a not in others and mesh.get(a, 1) > 1)
        rest = {**table, axes.EMBED: ()}
        ways = [prod(mesh.get(a, 1) for a in rest.get(axis or "", ())) for axis in logical]
        place = shared_dimension(logical, shape, ways, prod(mesh[a] for a in sharing))
        instead = None if place is None else logical[place]
        if not sharing or instead is None or instead == axes.EMBED:
            return table
        return {**rest, instead: (*rest.get(instead, ()), *sharing)}

    def _of_looked_up(
        self, logical: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mapping[str, int]
    ) -> dict[str, MeshAxes]:
        """The rules for a table that is only looked up, where none is listed for `axes.LOOKED_UP`.

        What shards the vocabulary shards its features, so that devices exchange the parts of rows that they have, and
        not sums of whole rows of which all but one are zero. Without whole lanes of features for each device the rows
        are sharded: a TPU stores such a table by feature, and would copy it before it looks up rows.
        """
        table = dict(self.rules)
        vocabulary, features = table.get(axes.VOCAB, ()), table.get(axes.EMBED, ())
        both = (*features, *(a for a in vocabulary if a not in features))
        devices = prod(mesh.get(a, 1) for a in both)
        if axes.EMBED in logical and shape[logical.index(axes.EMBED)] % (LANES * devices) == 0:
            return {**table, axes.EMBED: both}
        return {**table, axes.LOOKED_UP: vocabulary}


DEFAULT_STRATEGY = Strategy(
    (
        (axes.LAYERS, (STAGE,)),
        (axes.BATCH, ("data", "fsdp")),
        (axes.SEQUENCE, ("sequence",)),
        (axes.VOCAB, ("tensor",)),
        (axes.KV_HEADS, ("tensor",)),
        (axes.Q_HEADS, ("tensor",)),
        (axes.MLP, ("tensor",)),
        (axes.EXPERT, ("expert",)),
        (axes.EMBED, ("fsdp",)),
        (axes.LATENT, ("fsdp",)),
    )
)
"""Megatron tensor parallelism (arXiv 1909.08053) along `tensor`, fully sharded parameters along `fsdp`, and the
stacked layers of a training step along `stage`."""

_WEIGHTS = ("fsdp", "expert")
_TRAINING = {axes.BATCH: ("data", *_WEIGHTS), axes.EMBED: _WEIGHTS, axes.LATENT: _WEIGHTS}
SHARES_WEIGHTS = frozenset(_WEIGHTS)
"""Mesh axes that divide a training step's weights by default, if they divide its rows."""

TRAINING_STRATEGY = Strategy((
    *((axis, _TRAINING.get(axis, by)) for axis, by in DEFAULT_STRATEGY.rules),
    (axes.LOOKED_UP, ("tensor",)),
))  # fmt: skip
"""`DEFAULT_STRATEGY` for a training step: devices along `expert` have their own rows, which they exchange for their
experts, and share the other parameters as devices along `fsdp` do. Tables that are only looked up are divided by rows:
a step takes as long, and what an optimizer keeps of them has more features on a device."""


def usual_strategy(*, trains: bool) -> Strategy:
    """Return how the axes of a mesh divide a model that is opened to train, or for something else, unless rules say
    otherwise."""
    return TRAINING_STRATEGY if trains else DEFAULT_STRATEGY
