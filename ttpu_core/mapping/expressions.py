"""The mapping language between Hugging Face tensors and Flax parameters. A rule says how one parameter is made of
checkpoint tensors. Every operation is a view, so the same rule read backwards writes the checkpoint again, bit
for bit.

    Tensor("q_proj.weight", (H * D, E)).reshape(KV, G, D, E)                 rename and reshape
    Tensor("c_attn.weight", (E, 3 * E)).transpose(1, 0)[:E]                  transpose, and split by slicing
    Concat((q, k, v), axis=1)                                                fuse (grouped by KV head: axis 1)
    Stack(tuple(expert(i) for i in range(X)))                                stack experts, or layers"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from ttpu_core.errors import MappingError
from ttpu_core.mapping.padding import Padding
from ttpu_core.mapping.strides import Layout

if TYPE_CHECKING:
    import numpy as np


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """A checkpoint tensor with its name and its shape on disk, seen through a chain of view operations."""

    name: str
    shape: Shape
    views: tuple[tuple[str, Any], ...] = ()
    result: Shape | None = None

    def reshape(self, *shape: int) -> Tensor:
        """Split or merge neighbouring dimensions.

        Raises:
            MappingError: the number of elements differs, or the dimensions to merge are not neighbours on disk.
        """
        if prod(shape) != prod(self.result_shape) or min(shape, default=0) < 0:
            raise MappingError(
                f"the mapping reshapes {self.name!r} from {self.result_shape} to {shape}, which hold different numbers "
                "of elements: correct `ttpu_flax_mapping` or the sizes in the config."
            )
        if self.views and self.layout.reshape(shape) is None:
            raise MappingError(
                f"the mapping reshapes a view of {self.name!r} from {self.result_shape} to {shape}, which merges "
                "dimensions that are not neighbours on disk and so could not be written back: reshape before the "
                "transpose or slice, or give the parameter these dimensions apart."
            )
        return self._then("reshape", shape, shape)

    def transpose(self, *order: int) -> Tensor:
        """Permute the dimensions.

        Raises:
            MappingError: `order` is not a permutation of the dimensions.
        """
        rank = len(self.result_shape)
        if sorted(order) != list(range(rank)):
            raise MappingError(
                f"the mapping transposes {self.name!r} of shape {self.result_shape} by {order}, but each of the "
                f"dimensions {', '.join(map(str, range(rank)))} is needed once: correct `ttpu_flax_mapping`."
            )
        return self._then("transpose", order, tuple(self.result_shape[axis] for axis in order))

    def __getitem__(self, index: slice | int | tuple[slice | int, ...]) -> Tensor:
        """Take a part. Other rules, or other leaves of this rule, must take the remaining parts.

        Raises:
            MappingError: an index is out of range, or there are more indices than dimensions.
        """
        parts = index if isinstance(index, tuple) else (index,)
        outside = any(
            isinstance(part, int) and not -dim <= part < dim
            for part, dim in zip(parts, self.result_shape, strict=False)
        )
        if outside or len(parts) > len(self.result_shape):
            raise MappingError(
                f"the mapping takes the part {index} of {self.name!r}, whose shape there is {self.result_shape}: "
                "correct `ttpu_flax_mapping` or the sizes in the config."
            )
        frozen = tuple(part if isinstance(part, int) else (part.start, part.stop, part.step) for part in parts)
        shape: list[int] = []
        for part, dim in zip(parts, self.result_shape, strict=False):
            if isinstance(part, slice):
                shape.append(len(range(*part.indices(dim))))
        shape.extend(self.result_shape[len(parts) :])
        return self._then("take", frozen, tuple(shape))

    @property
    def result_shape(self) -> Shape:
        """Shape after the views."""
        return self.shape if self.result is None else self.result

    @property
    def layout(self) -> Layout:
        """Where the view's elements lie in the tensor on disk."""
        layout: Layout | None = Layout.contiguous(self.shape)
        for operation, argument in self.views:
            assert layout is not None  # `reshape` refuses views that have no layout
            if operation == "reshape":
                layout = layout.reshape(argument)
            elif operation == "transpose":
                layout = layout.transpose(argument)
            else:
                layout = layout.take(_parts(argument))
        assert layout is not None
        return layout

    @property
    def is_part(self) -> bool:
        """Whether the views may leave some elements out."""
        return any(operation == "take" for operation, _ in self.views)

    def view(self, array: np.ndarray) -> np.ndarray:
        """Apply the views to `array`: [*shape]. The result: [*result_shape] shares memory with it."""
        for operation, argument in self.views:
            if operation == "reshape":
                array = array.reshape(argument, copy=False)
            elif operation == "transpose":
                array = array.transpose(argument)
            else:
                array = array[(*_parts(argument), ...)]  # the ellipsis keeps a single element a view
        return array

    def leaves(self) -> Iterator[Tensor]:
        """This tensor."""
        yield self

    def _then(self, operation: str, argument: Any, result: Shape) -> Tensor:
        return replace(self, views=(*self.views, (operation, argument)), result=result)


@dataclass(frozen=True)
class Concat:
    """Expressions joined along an existing axis."""

    parts: tuple[Expression, ...]
    axis: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "axis", _axis("joins", self.parts, self.axis, new=0))

    @cached_property
    def result_shape(self) -> Shape:
        """Shape of the joined array.

        Raises:
            MappingError: the parts differ in another dimension than `axis`.
        """
        shapes = [part.result_shape for part in self.parts]
        first = shapes[0]
        for shape in shapes[1:]:
            if len(shape) != len(first) or _without(shape, self.axis) != _without(first, self.axis):
                raise MappingError(
                    f"the mapping joins shapes {', '.join(map(str, shapes))} along axis {self.axis}, which differ "
                    "elsewhere: correct `ttpu_flax_mapping` or the sizes in the config."
                )
        return (*first[: self.axis], sum(shape[self.axis] for shape in shapes), *first[self.axis + 1 :])

    def split(self, array: np.ndarray) -> Iterator[tuple[Expression, np.ndarray]]:
        """Yield each part with its region of `array`: [*result_shape]."""
        start = 0
        for part in self.parts:
            stop = start + part.result_shape[self.axis]
            yield part, array[(*(slice(None),) * self.axis, slice(start, stop))]
            start = stop

    def leaves(self) -> Iterator[Tensor]:
        """Every checkpoint tensor below."""
        for part in self.parts:
            yield from part.leaves()


@dataclass(frozen=True)
class Stack:
    """Expressions of equal shape joined along a new axis."""

    parts: tuple[Expression, ...]
    axis: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "axis", _axis("stacks", self.parts, self.axis, new=1))

    @cached_property
    def result_shape(self) -> Shape:
        """Shape of the stacked array.

        Raises:
            MappingError: the parts differ in shape.
        """
        shapes = {part.result_shape for part in self.parts}
        if len(shapes) != 1:
            raise MappingError(
                f"the mapping stacks tensors of the shapes {', '.join(map(str, sorted(shapes)))}, but stacked parts "
                "must be equal: correct `ttpu_flax_mapping` or the sizes in the config."
            )
        first = shapes.pop()
        return (*first[: self.axis], len(self.parts), *first[self.axis :])

    def split(self, array: np.ndarray) -> Iterator[tuple[Expression, np.ndarray]]:
        """Yield each part with its region of `array`: [*result_shape]."""
        for index, part in enumerate(self.parts):
            region: tuple[Any, ...] = (*(slice(None),) * self.axis, index, ...)
            yield part, array[region]

    def leaves(self) -> Iterator[Tensor]:
        """Every checkpoint tensor below."""
        for part in self.parts:
            yield from part.leaves()


@dataclass(frozen=True)
class Padded:
    """Another expression with entries repeated and zeros inserted, as a mesh needs it."""

    part: Expression
    padding: Padding

    @property
    def result_shape(self) -> Shape:
        """Shape with the padding."""
        return self.padding.shape

    def leaves(self) -> Iterator[Tensor]:
        """Every checkpoint tensor below."""
        yield from self.part.leaves()


Expression = Tensor | Concat | Stack | Padded
ReadTensor = Callable[[str], "np.ndarray"]


def gather(expression: Expression, read: ReadTensor, out: np.ndarray) -> None:
    """HF → Flax: fill `out`: [*result_shape], of any dtype, from checkpoint tensors. At most one tensor is in memory
    at a time."""
    if isinstance(expression, Tensor):
        out[...] = expression.view(read(expression.name))
    elif isinstance(expression, Padded):
        import numpy as np

        original = np.empty(expression.part.result_shape, out.dtype)
        gather(expression.part, read, original)
        out[...] = expression.padding.pad(original)
    else:
        for part, region in expression.split(out):
            gather(part, read, region)


def scatter(expression: Expression, value: np.ndarray, buffer: Callable[[Tensor], np.ndarray]) -> None:
    """Flax → HF: write `value`: [*result_shape] into the checkpoint arrays that `buffer` returns, one per tensor
    name."""
    if isinstance(expression, Tensor):
        expression.view(buffer(expression))[...] = value
    elif isinstance(expression, Padded):
        scatter(expression.part, expression.padding.unpad(value), buffer)
    else:
        for part, region in expression.split(value):
            scatter(part, region, buffer)


def _parts(frozen: tuple[Any, ...]) -> tuple[int | slice, ...]:
    """The indices with slices restored from triples (slices are not hashable before Python 3.12)."""
    return tuple(part if isinstance(part, int) else slice(*part) for part in frozen)


def _axis(verb: str, parts: tuple[Expression, ...], axis: int, new: int) -> int:
    """`axis` counted from the front. `new` is 1 if the result has one dimension more than a part, else 0."""
    if not parts:
        raise MappingError(
            f"the mapping {verb} an empty list of tensors, but one or more are needed: correct `ttpu_flax_mapping`."
        )
    rank = len(parts[0].result_shape) + new
    if not -rank <= axis < rank:
        raise MappingError(
            f"the mapping {verb} tensors of shape {parts[0].result_shape} along axis {axis}, but the result has {rank} "
            "dimensions: correct `ttpu_flax_mapping`."
        )
    return axis % rank


def _without(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], *shape[axis + 1 :])
