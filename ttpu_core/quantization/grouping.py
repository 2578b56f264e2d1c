"""Makes the groups of quantized kernels fit a mesh. A group whose inputs lie on two devices, or are partly padding, is
split into smaller groups with the same scale, so that results equal those of one device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import TYPE_CHECKING

from ttpu_core.errors import UnsupportedError
from ttpu_core.mapping.padding import Padding
from ttpu_core.sharding.strategy import DEFAULT_STRATEGY, Strategy
from ttpu_core.spec import ArchitectureSpec
from ttpu_core.spec.kernel_format import KernelFormat

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Grouping:
    """How the groups of a padded kernel come from those of the original.

    Attributes:
        inputs: number of inputs of the original kernel.
        size: group size of the original; None for one scale per output channel.
        fitted: group size of the padded kernel.
        sources: for each group of the padded kernel, the number of the original's group of the size `fitted`, or -1 for
            padding. Empty if `fitted` is None.
    """

    inputs: int
    size: int | None
    fitted: int | None
    sources: tuple[int, ...] = ()

    @property
    def original_groups(self) -> tuple[int, ...]:
        """For each group of the padded kernel, the number of the original group that has its scale, or -1."""
        if self.size is None or self.fitted is None:
            return ()
        return tuple(source * self.fitted // self.size if source >= 0 else -1 for source in self.sources)


def fit_formats(
    padded: ArchitectureSpec,
    spec: ArchitectureSpec,
    paddings: Mapping[str, Padding],
    mesh: Mapping[str, int],
    strategy: Strategy = DEFAULT_STRATEGY,
) -> tuple[ArchitectureSpec, dict[str, Grouping]]:
    """The padded architecture with group sizes that its inputs and the mesh divide, and the grouping of each quantized
    kernel by Flax path.

    Args:
        padded: result of `ttpu_core.sharding.padding.pad_architecture`.
        spec: the architecture before padding.
        paddings: the paddings that it returned.
        mesh: mesh axis → number of devices along it.
        strategy: the mesh axes that shard each logical axis.

    Raises:
        UnsupportedError: no groups of two or more inputs fit.
    """
    plain = replace(padded, kernel_formats=())
    formats: dict[str, KernelFormat] = {}
    groupings: dict[str, Grouping] = {}
    for path, form in spec.kernel_formats:
        parameter, inputs = plain.parameters[path], spec.parameters[path].shape[-1]
        by_dimension = strategy.mesh_axes(parameter.axes, parameter.shape, mesh, path)
        local = parameter.shape[-1] // prod(mesh[axis] for axis in by_dimension[-1])
        groupings[path] = _grouping(path, form, inputs, parameter.shape[-1], local, paddings.get(path))
        formats[path] = replace(form, group_size=groupings[path].fitted)
    if not formats or tuple(formats.items()) == padded.kernel_formats:
        return padded, groupings
    return replace(padded, kernel_formats=tuple(formats.items())), groupings


def _grouping(
    path: str, form: KernelFormat, inputs: int, padded: int, local: int, padding: Padding | None
) -> Grouping:
    size = form.group_size
    moved = padded != inputs
    if size is None:
        return Grouping(inputs, None, None)
    places = places_of(padding, inputs, padded) if moved and padding is not None else None
    if form.input_order and moved:  # columns are added behind the stored ones, and the order says where they belong
        places = None
    fitted = gcd(size, local)
    while fitted > 1 and not (local % fitted == 0 and size % fitted == 0 and _fits(places, fitted)):
        fitted -= 1
    if fitted < 2:
        raise UnsupportedError(
            f"{path} has groups of {size} inputs that share a scale, but a device of this mesh would hold parts of "
            f"groups with less than 2 inputs: use fewer devices on the axes that shard its {padded} inputs."
        )
    if places is None:
        added = (-1,) * ((padded - inputs) // fitted)
        return Grouping(inputs, size, fitted, (*range(inputs // fitted), *added))
    firsts = places[::fitted]
    return Grouping(inputs, size, fitted, tuple(int(first) // fitted if first >= 0 else -1 for first in firsts))


def places_of(padding: Padding, inputs: int, padded: int) -> np.ndarray:
    """For each input of the padded kernel, its number in the original, or -1 for padding: int [padded]."""
    import numpy as np

    places = np.full(padded, -1)
    for target, source in padding.boxes():
        (begin, end), (first, last) = target[-1], source[-1]
        places[begin:end] = np.arange(first, last)
    return places


def _fits(places: np.ndarray | None, size: int) -> bool:
    """Whether each group of this size is padding, or one group of the original."""
    if places is None:
        return True
    import numpy as np

    groups = places.reshape(-1, size)
    real = groups[:, 0] >= 0
    steady = np.where(real[:, None], groups == groups[:, :1] + np.arange(size), groups < 0)
    return bool(steady.all() and (groups[real, 0] % size == 0).all())
