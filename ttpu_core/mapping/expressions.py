"""The mapping language between Hugging Face tensors and Flax parameters. A rule says how one parameter is made of
checkpoint tensors; because every operation is a view, the same rule read backwards writes the checkpoint again, bit
for bit.

    Tensor("q_proj.weight", (H * D, E)).reshape(KV, G, D, E)                 rename and reshape
    Tensor("c_attn.weight", (E, 3 * E)).transpose(1, 0)[:E]                  transpose, and split by slicing
    Concat((q, k, v), axis=1)                                                fuse (grouped by KV head: axis 1)
    Stack(tuple(expert(i) for i in range(X)))                                stack experts, or layers
"""

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
    """A checkpoint tensor by name, with the shape it has on disk, seen through a chain of view operations."""

    name: str
    shape: Shape
    views: tuple[tuple[str, Any], ...] = ()
    result: Shape | None = None

    def reshape(self, *shape: int) -> Tensor:
        """Split or merge neighbouring dimensions."""
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
        """Permute the dimensions."""
        rank = len(self.result_shape)
        if sorted(order) != list(range(rank)):
            raise MappingError(
                f"the mapping transposes {self.name!r} of shape {self.result_shape} by {order}, but each of the "
                f"dimensions {', '.join(map(str, range(rank)))} is needed once: correct `ttpu_flax_mapping`."
            )
        return self._then("transpose", order, tuple(self.result_shape[axis] for axis in order))

    def __getitem__(self, index: slice | int | tuple[slice | int, ...]) -> Tensor:
        """Take a part; the other parts must be taken by other rules or by other leaves of this one."""
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
            assert layout is not None  # `reshape` has refused what has no layout
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
        """The views applied to an array of `shape`; always shares memory with it."""
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
    """Parts joined along an existing axis."""

    parts: tuple[Expression, ...]
    axis: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "axis", _axis("joins", self.parts, self.axis, new=0))

    @cached_property
    def result_shape(self) -> Shape:
        """Shape of the whole."""
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
        """Each part with its region of `array`."""
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
    """Equal parts joined along a new axis."""

    parts: tuple[Expression, ...]
    axis: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "axis", _axis("stacks", self.parts, self.axis, new=1))

    @cached_property
    def result_shape(self) -> Shape:
        """Shape of the whole."""
        shapes = {part.result_shape for part in self.parts}
        if len(shapes) != 1:
            raise MappingError(
                f"the mapping stacks tensors of the shapes {', '.join(map(str, sorted(shapes)))}, but stacked parts "
                "must be equal: correct `ttpu_flax_mapping` or the sizes in the config."
            )
        first = shapes.pop()
        return (*first[: self.axis], len(self.parts), *first[self.axis :])

    def split(self, array: np.ndarray) -> Iterator[tuple[Expression, np.ndarray]]:
        """Each part with its region of `array`."""
        for index, part in enumerate(self.parts):
            region: tuple[Any, ...] = (*(slice(None),) * self.axis, index, ...)
            yield part, array[region]

    def leaves(self) -> Iterator[Tensor]:
        """Every checkpoint tensor below."""
        for part in self.parts:
            yield from part.leaves()


@dataclass(frozen=True)
class Padded:
    """Another expression with parts of it repeated and zeros between them, as a mesh needs it."""

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
    """HF → Flax: fill `out` (result shape, any dtype) from checkpoint tensors, one in memory at a time."""
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
    """Flax → HF: write `value` into the checkpoint arrays that `buffer` hands out, one per tensor name."""
    if isinstance(expression, Tensor):
        expression.view(buffer(expression))[...] = value
    elif isinstance(expression, Padded):
        scatter(expression.part, expression.padding.unpad(value), buffer)
    else:
        for part, region in expression.split(value):
            scatter(part, region, buffer)


def _parts(frozen: tuple[Any, ...]) -> tuple[int | slice, ...]:
    """Indices as they were written; slices are kept as triples because they could not be hashed before Python 3.12."""
    return tuple(part if isinstance(part, int) else slice(*part) for part in frozen)


def _axis(verb: str, parts: tuple[Expression, ...], axis: int, new: int) -> int:
    """`axis` counted from the front; `new` is 1 where the result has one dimension more than a part."""
    if not parts:
        raise MappingError(
            f"the mapping {verb} an empty list of tensors, but needs one or more: correct `ttpu_flax_mapping`."
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
