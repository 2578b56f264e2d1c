"""Parameters as a training step holds them, stacked over equal layers and padded for the mesh, as a loaded model holds
them, one array for each layer, and as checkpoints hold them, stacked without padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from ttpu_core.errors import UnsupportedError
from ttpu_core.mapping.padding import Padding
from ttpu_core.sharding.padding import Paddings, stacked_paddings
from ttpu_core.spec import ArchitectureSpec, Parameter
from ttpu_core.spec.parameters import stacked_parameters, stacked_paths


@dataclass(frozen=True, eq=False)
class HeldParameters:
    """How the three forms of a model's parameters become each other.

    Attributes:
        original: the architecture without padding.
        padded: the architecture padded for the mesh.
        paddings: of the parameters of single layers.
    """

    original: ArchitectureSpec
    padded: ArchitectureSpec
    paddings: Paddings

    def __post_init__(self) -> None:
        """Check that checkpoints can be read on other meshes.

        Raises:
            UnsupportedError: padding makes layers of different sizes equal.
        """
        if list(self.stored) != list(stacked_parameters(self.padded)):
            raise UnsupportedError(
                f"a {self.original.model_type} model was to be trained on a mesh that pads layers of different sizes "
                "to one size, but its checkpoints could not be read on other meshes: use a mesh whose tensor axis "
                "divides the layers' sizes."
            )

    @cached_property
    def stored(self) -> Mapping[str, Parameter]:
        """The table of stacked parameters without padding."""
        return stacked_parameters(self.original)

    @cached_property
    def copies(self) -> Mapping[str, tuple[str, ...]]:
        """Stacked path → the paths of its layers; parameters outside of layers have none."""
        return dict(stacked_paths(self.padded, self.padded.parameters))

    @cached_property
    def paddings_by_path(self) -> Mapping[str, tuple[Padding | None, ...]]:
        """The padding of each layer, by stacked path; of one for a parameter outside of layers."""
        single = {path: (one,) for path, one in self.paddings.items() if path in self.stored}
        return {**single, **stacked_paddings(self.padded, self.paddings)}

    def taken_over(
        self, params: dict[str, Any], shardings: Mapping[str, Any], dtypes: Mapping[str, np.dtype[Any]]
    ) -> dict[str, Any]:
        """Stack a loaded model's parameters one after another, and take them out of `params` as they are converted.

        Args:
            params: path → array or quantized kernel, of single layers; empty afterwards.
            shardings: of the stacked parameters.
            dtypes: of the stacked parameters; quantized kernels keep theirs.
        """

        def convert(path: str) -> Any:
            sharding, dtype, layers = shardings[path], dtypes[path], self.copies.get(path)
            parts = [params.pop(layer) for layer in layers or (path,)]
            plain = isinstance(parts[0], jax.Array)
            if (
                layers is None
                and plain
                and parts[0].dtype == dtype
                and parts[0].sharding.is_equivalent_to(sharding, parts[0].ndim)
            ):
                return parts[0]

            def stack(*parts: Any) -> Any:
                cast = [part.astype(dtype) if plain else part for part in parts]
                return jax.tree.map(lambda *arrays: jnp.stack(arrays), *cast) if layers is not None else cast[0]

            converted = jax.block_until_ready(jax.jit(stack, out_shardings=sharding)(*parts))
            for array in jax.tree.leaves(parts):
                array.delete()
            return converted

        return {path: convert(path) for path in stacked_parameters(self.padded)}

    def unstacked(
        self, params: Mapping[str, Any], shardings: Mapping[str, Any], dtypes: Mapping[str, np.dtype[Any]]
    ) -> dict[str, Any]:
        """Copies of stacked parameters as a loaded model holds them; `shardings` and `dtypes` are those of single
        layers, and kernels that are no arrays keep their dtypes."""
        result: dict[str, Any] = {}
        for path, value in params.items():
            layers = self.copies.get(path)
            names = layers or (path,)

            def split(value: Any, names: tuple[str, ...] = names, stacked: bool = layers is not None) -> Any:
                count = range(len(names))
                parts = [jax.tree.map(lambda array, i=i: array[i], value) for i in count] if stacked else [value]
                if isinstance(value, jax.Array):
                    parts = [part.astype(dtypes[name]) for name, part in zip(names, parts, strict=True)]
                return tuple(parts)

            parts = jax.jit(split, out_shardings=tuple(shardings[name] for name in names))(value)
            if layers is None:  # what was neither cut nor converted may be the same buffer, which updates overwrite
                parts = (jax.tree.map(lambda new, old: jnp.copy(new) if new is old else new, parts[0], value),)
            result.update(zip(names, parts, strict=True))
        return {path: result[path] for path in shardings}

    def unpadded(self, path: str, value: jax.Array) -> jax.Array:
        """A parameter, or a moment of its shape, `value` [*padded shape] without padding: [*stored shape]. For use
        inside jit."""
        return self._each(path, value, unpad)

    def repadded(self, path: str, value: jax.Array) -> jax.Array:
        """Undo `unpadded`: `value` [*stored shape] padded to [*padded shape]. For use inside jit."""
        return self._each(path, value, pad)

    def stored_sharding(self, path: str, sharding: Sharding) -> Sharding:
        """The sharding of a parameter without padding: where devices do not divide a dimension it is whole."""
        if path not in self.paddings_by_path or not isinstance(sharding, NamedSharding):
            return sharding
        sizes, shape = dict(sharding.mesh.shape), self.stored[path].shape
        spec = [(by,) if isinstance(by, str) else tuple(by or ()) for by in sharding.spec]
        kept = [
            by if size % int(np.prod([sizes[axis] for axis in by], dtype=int)) == 0 else ()
            for by, size in zip(spec, shape, strict=False)
        ]
        return NamedSharding(sharding.mesh, PartitionSpec(*(by or None for by in kept)))

    def _each(self, path: str, value: jax.Array, change: Any) -> jax.Array:
        paddings = self.paddings_by_path.get(path)
        if paddings is None:
            return value
        if path not in self.copies:
            return change(value, paddings[0])
        if all(one == paddings[0] for one in paddings):
            return jax.vmap(lambda one: change(one, paddings[0]))(value)
        return jnp.stack(
            [one if padding is None else change(one, padding) for one, padding in zip(value, paddings, strict=True)]
        )


def unpad(value: jax.Array, padding: Padding) -> jax.Array:
    """`Padding.unpad` inside jit: value [*padding.shape] → [*padding.original]."""
    first = {number: place for place, number in reversed(list(enumerate(padding.index)))}
    places = np.array([first[number] for number in range(padding.view[padding.axis])])
    return value.reshape(padding.taken).take(places, axis=padding.axis).reshape(padding.original)


def pad(value: jax.Array, padding: Padding) -> jax.Array:
    """`Padding.pad` inside jit: value [*padding.original] → [*padding.shape]."""
    index = np.asarray(padding.index)
    taken = value.reshape(padding.view).take(np.maximum(index, 0), axis=padding.axis)
    real = np.expand_dims(index >= 0, [axis for axis in range(taken.ndim) if axis != padding.axis])
    return jnp.where(real, taken, 0).reshape(padding.shape)
