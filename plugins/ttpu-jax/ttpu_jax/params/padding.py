"""Padding of an architecture for a placement, and projection of gradients so that a training step keeps parameters
padded."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_core.mapping.padding import Padding
from ttpu_core.quantization.grouping import fit_formats
from ttpu_core.sharding.padding import Paddings, pad_architecture, stacked_paddings
from ttpu_core.spec import ArchitectureSpec
from ttpu_jax.params.placement import Placement


def pad_for(spec: ArchitectureSpec, placement: Placement) -> tuple[ArchitectureSpec, Paddings]:
    """`pad_architecture` for the placement's mesh and strategy, with groups of quantized kernels that fit it. Nothing
    is padded for one device."""
    mesh = {} if placement.mesh is None else dict(placement.mesh.shape)
    padded, paddings = pad_architecture(spec, mesh, placement.strategy)
    return fit_formats(padded, spec, paddings, mesh, placement.strategy)[0], paddings


def project_gradients(
    gradients: Mapping[str, jax.Array], padded: ArchitectureSpec, paddings: Paddings, *, stacked: bool = False
) -> dict[str, jax.Array]:
    """`Padding.project_gradient` of each padded parameter: the gradients of copies are summed and the sum is given
    to each copy, and the gradient of zeros stays zero. For use inside jit.

    Args:
        gradients: Flax path → array, of a decoder over `padded`; of all parameters or of some.
        padded: the padded architecture.
        paddings: paddings of the unstacked parameters.
        stacked: whether the parameters are stacked over equal layers.
    """
    result = dict(gradients)
    for path, padding in paddings.items():
        if path in result:
            result[path] = _project(result[path], padding)
    if stacked:
        for path, copies in stacked_paddings(padded, paddings).items():
            if path in result:
                result[path] = _project_stacked(result[path], copies)
    return result


def squared_norm(
    gradients: Mapping[str, jax.Array], padded: ArchitectureSpec, paddings: Paddings, *, stacked: bool = False
) -> jax.Array:
    """The sum of the squares of projected gradients, as the unpadded parameters have it: of equal copies one counts. A
    float32 scalar, for use inside jit; the arguments are those of `project_gradients`."""
    copies: dict[str, tuple[Padding | None, ...]] = {path: (one,) for path, one in paddings.items()}
    if stacked:
        copies |= stacked_paddings(padded, paddings)
    total = jnp.float32(0)
    for path, gradient in gradients.items():
        squares = jnp.square(gradient.astype(jnp.float32))
        if path not in copies or not any(one is not None and one.has_replicas for one in copies[path]):
            total += squares.sum()
        elif path in paddings:
            total += (_shares(paddings[path]) * squares.reshape(paddings[path].taken)).sum()
        else:
            for one, square in zip(copies[path], squares, strict=True):
                total += square.sum() if one is None else (_shares(one) * square.reshape(one.taken)).sum()
    return total


def _shares(padding: Padding) -> np.ndarray:
    """What each entry counts, along the padding's axis: equal copies count 1 together."""
    index = np.asarray(padding.index)
    counts = np.bincount(index[index >= 0], minlength=padding.view[padding.axis])
    shares = np.where(index >= 0, 1 / counts[index], 0).astype(np.float32)
    return np.expand_dims(shares, [axis for axis in range(len(padding.taken)) if axis != padding.axis])


def _project_stacked(gradient: jax.Array, copies: tuple[Padding | None, ...]) -> jax.Array:
    first = copies[0]
    if first is not None and all(copy == first for copy in copies):
        return jax.vmap(lambda one: _project(one, first))(gradient)
    # Padding made layers of different sizes equal.
    parts = [one if copy is None else _project(one, copy) for one, copy in zip(gradient, copies, strict=True)]
    return jnp.stack(parts)


def _project(gradient: jax.Array, padding: Padding) -> jax.Array:
    index = np.asarray(padding.index)
    if padding.has_replicas:
        gradient = _sum_replicas(gradient, index)
    if (index >= 0).all():
        return gradient
    # A mask instead of a gather, so that each device keeps its shard.
    real = np.expand_dims(index >= 0, [axis for axis in range(len(padding.taken)) if axis != padding.axis])
    return jnp.where(real, gradient.reshape(padding.taken), 0).reshape(padding.shape)


def _sum_replicas(gradient: jax.Array, index: np.ndarray) -> jax.Array:
    """The sum over replicas, at each of them. Heads are the first dimension and sharded over devices. The replicas
    of an entry are the entries at the same place of other heads (`ttpu_core.sharding.heads`). Queries have no
    replicas and are not exchanged."""
    heads = gradient.shape[0]
    places = index.reshape(heads, -1)  # entries of the axis, by head
    # Each zero entry gets its own number; zeros are masked afterwards.
    numbers = np.where(places < 0, -1 - np.arange(places.size).reshape(places.shape), places)
    repeated = [len(set(column.tolist())) < heads for column in numbers.T]
    parts, begin = [], 0
    by_place = gradient.reshape(heads, places.shape[1], -1)
    while begin < len(repeated):
        end = begin
        while end < len(repeated) and repeated[end] == repeated[begin]:
            end += 1
        part = by_place[:, begin:end]
        if repeated[begin]:
            # All entries of a head have their replicas in the same heads.
            equal = numbers[:, begin, None] == numbers[None, :, begin]
            part = _sum_equal(part, equal)
        parts.append(part)
        begin = end
    return jnp.concatenate(parts, axis=1).reshape(gradient.shape)


def _sum_equal(part: jax.Array, equal: np.ndarray) -> jax.Array:
    """part [heads, ...] summed over the heads that `equal` [heads, heads] marks as equal."""
    heads = len(equal)
    run = int(equal[0].sum())
    if heads % run == 0 and (equal == np.kron(np.eye(heads // run, dtype=bool), np.ones((run, run), bool))).all():
        # Equal heads are neighbours in groups of one size: devices exchange within each group only.
        groups = part.reshape(heads // run, run, *part.shape[1:])
        return jnp.broadcast_to(groups.sum(1, keepdims=True), groups.shape).reshape(part.shape)
    return jnp.einsum("ij,j...->i...", equal.astype(part.dtype), part, precision=jax.lax.Precision.HIGHEST)
