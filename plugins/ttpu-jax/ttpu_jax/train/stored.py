"""Master weights and optimizer state as checkpoints hold them: by name, and without the mesh's padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax

from ttpu_core.spec import Parameter
from ttpu_core.spec.parameters import stacked_parameters
from ttpu_jax.train.held import HeldParameters


@dataclass(frozen=True, eq=False)
class StoredArrays:
    """Takes padding off arrays and puts it on again. An array is a parameter or a moment of its shape, which has the
    parameter's path at the end of its name; others have no padding.

    Attributes:
        held: how parameters are padded.
    """

    held: HeldParameters

    @cached_property
    def _padded(self) -> Mapping[str, Parameter]:
        return stacked_parameters(self.held.padded)

    def shapes(self, arrays: Mapping[str, jax.Array]) -> dict[str, Any]:
        """Shapes, dtypes and shardings of `without_padding`."""
        return {name: self._shape(name, array) for name, array in arrays.items()}

    def without_padding(self, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Arrays without padding, by the same names."""

        def stored(name: str, array: jax.Array) -> jax.Array:
            path = self._path(name, array.shape, self._padded)
            if path is None:
                return array
            sharding = self._shape(name, array).sharding
            return jax.jit(partial(self.held.unpadded, path), out_shardings=sharding)(array)

        return {name: stored(name, array) for name, array in arrays.items()}

    def with_padding(self, arrays: Mapping[str, jax.Array], shardings: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Undo `without_padding`.

        Args:
            arrays: name → array without padding.
            shardings: name → the sharding of the padded array.
        """

        def padded(name: str, array: jax.Array) -> jax.Array:
            path = self._path(name, array.shape, self.held.stored)
            if path is None:
                return array
            return jax.jit(partial(self.held.repadded, path), out_shardings=shardings[name])(array)

        return {name: padded(name, array) for name, array in arrays.items()}

    def _path(self, name: str, shape: tuple[int, ...], table: Mapping[str, Parameter]) -> str | None:
        """The parameter whose padding an array has."""
        for path in self.held.paddings_by_path:
            if (name == path or name.endswith(f".{path}")) and table[path].shape == shape:
                return path
        return None

    def _shape(self, name: str, array: jax.Array) -> jax.ShapeDtypeStruct:
        path = self._path(name, array.shape, self._padded)
        if path is None:
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        sharding = self.held.stored_sharding(path, array.sharding)
        return jax.ShapeDtypeStruct(self.held.stored[path].shape, array.dtype, sharding=sharding)


def named(tree: Any) -> dict[str, jax.Array]:
    """The arrays of a tree by the names of their places."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
