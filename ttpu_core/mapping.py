"""The mapping language between Hugging Face tensors and Flax parameters. A rule says how one parameter is made of
checkpoint tensors; because every operation is a view, the same rule read backwards writes the checkpoint again, bit
for bit.

    Tensor("q_proj.weight", (H * D, E)).reshape(KV, G, D, E)                 rename and reshape
    Tensor("c_attn.weight", (E, 3 * E)).transpose(1, 0)[:E]                  transpose, and split by slicing
    Concat((q, k, v), axis=1)                                                fuse (grouped by KV head: axis 1)
    Stack(tuple(expert(i) for i in range(X)))                                stack experts, or layers
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

from ttpu_core.errors import MappingError

if TYPE_CHECKING:
    import numpy as np

    from ttpu_core.spec import ArchitectureSpec, Parameter

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
        if prod(shape) != prod(self.result_shape):
            raise MappingError(
                f"the mapping reshapes {self.name!r} from {self.result_shape} to {shape}, which hold different numbers "
                "of elements: correct `ttpu_flax_mapping` or the sizes in the config."
            )
        return self._then("reshape", shape, shape)

    def transpose(self, *order: int) -> Tensor:
        """Permute the dimensions."""
        return self._then("transpose", order, tuple(self.result_shape[axis] for axis in order))

    def __getitem__(self, index: slice | int | tuple[slice | int, ...]) -> Tensor:
        """Take a part; the other parts must be taken by other rules or by other leaves of this one."""
        parts = index if isinstance(index, tuple) else (index,)
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

    def view(self, array: np.ndarray) -> np.ndarray:
        """The views applied to an array of `shape`; always shares memory with it."""
        for operation, argument in self.views:
            if operation == "reshape":
                array = array.reshape(argument, copy=False)
            elif operation == "transpose":
                array = array.transpose(argument)
            else:
                array = array[tuple(part if isinstance(part, int) else slice(*part) for part in argument)]
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

    @property
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
            yield part, array[(slice(None),) * self.axis + (slice(start, stop),)]
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

    @property
    def result_shape(self) -> Shape:
        """Shape of the whole."""
        shapes = {part.result_shape for part in self.parts}
        if len(shapes) != 1:
            raise MappingError(
                f"the mapping stacks tensors of the shapes {', '.join(map(str, sorted(shapes)))}, but stacked parts must "
                "be equal: correct `ttpu_flax_mapping` or the sizes in the config."
            )
        first = shapes.pop()
        return (*first[: self.axis], len(self.parts), *first[self.axis :])

    def split(self, array: np.ndarray) -> Iterator[tuple[Expression, np.ndarray]]:
        """Each part with its region of `array`."""
        for index, part in enumerate(self.parts):
            yield part, array[(slice(None),) * self.axis + (index,)]

    def leaves(self) -> Iterator[Tensor]:
        """Every checkpoint tensor below."""
        for part in self.parts:
            yield from part.leaves()


Expression = Tensor | Concat | Stack
ReadTensor = Callable[[str], "np.ndarray"]


def gather(expression: Expression, read: ReadTensor, out: np.ndarray) -> None:
    """HF → Flax: fill `out` (result shape, any dtype) from checkpoint tensors, one in memory at a time."""
    if isinstance(expression, Tensor):
        out[...] = expression.view(read(expression.name))
    else:
        for part, region in expression.split(out):
            gather(part, read, region)


def scatter(expression: Expression, value: np.ndarray, buffer: Callable[[Tensor], np.ndarray]) -> None:
    """Flax → HF: write `value` into the checkpoint arrays that `buffer` hands out, one per tensor name."""
    if isinstance(expression, Tensor):
        expression.view(buffer(expression))[...] = value
    else:
        for part, region in expression.split(value):
            scatter(part, region, buffer)


@dataclass(frozen=True)
class FlaxMapping:
    """All rules of one model.

    `rules` pairs a Flax path with its expression. `tied` names checkpoint tensors that repeat a parameter and are not
    read. `ignored` are regular expressions of extras (rotary tables, multi-token-prediction heads). `prefixes` renames
    leading parts of checkpoint names, first match wins, where a checkpoint's tensors are not under the usual names.
    """

    rules: tuple[tuple[str, Expression], ...]
    tied: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    prefixes: tuple[tuple[str, str], ...] = ()
    _by_path: dict[str, Expression] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_path", dict(self.rules))

    def __getitem__(self, path: str) -> Expression:
        return self._by_path[path]

    @property
    def tensors(self) -> dict[str, Shape]:
        """Every checkpoint tensor that the rules read, with its shape on disk."""
        return {leaf.name: leaf.shape for _, rule in self.rules for leaf in rule.leaves()}

    def check_parameters(self, parameters: Mapping[str, Parameter]) -> None:
        """Hold the rules against the parameter table.

        Raises:
            MappingError: a parameter without a rule, a rule without a parameter, a shape that does not agree, or a
                checkpoint tensor of which the rules use only a part.
        """
        missing = [path for path in parameters if path not in self._by_path]
        if missing:
            raise MappingError(
                f"the mapping has no rule for the parameter{_s(missing)} {_some(missing)}: add to `ttpu_flax_mapping`."
            )
        unknown = [path for path in self._by_path if path not in parameters]
        if unknown:
            raise MappingError(
                f"the mapping has a rule for {_some(unknown)}, but the architecture has no such parameter{_s(unknown)}: "
                "remove it from `ttpu_flax_mapping`, or describe what uses it."
            )
        used: dict[str, int] = defaultdict(int)
        for path, rule in self.rules:
            if rule.result_shape != parameters[path].shape:
                raise MappingError(
                    f"the mapping makes {path} of shape {rule.result_shape}, but the architecture needs "
                    f"{parameters[path].shape}: correct the rule for it in `ttpu_flax_mapping`."
                )
            for leaf in rule.leaves():
                used[leaf.name] += prod(leaf.result_shape)
        for name, shape in self.tensors.items():
            if used[name] != prod(shape):
                raise MappingError(
                    f"the mapping uses {used[name]:,} of the {prod(shape):,} elements of {name!r}, but every element must "
                    "be used once: complete the rules that slice it in `ttpu_flax_mapping`."
                )

    def resolve(self, available: Mapping[str, Shape], source: str = "the checkpoint") -> dict[str, str]:
        """From the names that the rules use to the names in a checkpoint.

        Raises:
            MappingError: a tensor is missing, has another shape, or is accounted for by no rule.
        """
        wanted = self.tensors
        found: dict[str, str] = {}
        extras: list[str] = []
        ignored = [re.compile(pattern) for pattern in self.ignored]
        for actual, shape in available.items():
            name = self._canonical(actual, wanted)
            if name in wanted:
                if tuple(shape) != wanted[name]:
                    raise MappingError(
                        f"tensor {actual!r} in {source} has shape {tuple(shape)}, but the config asks for {wanted[name]}: "
                        "config.json and the weights belong to different models, or one of them is damaged."
                    )
                found[name] = actual
            elif name not in self.tied and not any(pattern.fullmatch(actual) for pattern in ignored):
                extras.append(actual)
        missing = [name for name in wanted if name not in found]
        if missing:
            raise MappingError(
                f"{source} has no tensor{_s(missing)} {_some(missing)}, which the architecture needs: the download is "
                "incomplete, or config.json belongs to another model."
            )
        if extras:
            raise MappingError(
                f"{source} holds {_some(extras)}, which no rule accounts for: config.json belongs to another model, or "
                "the family plugin must map or ignore it."
            )
        return found

    def _canonical(self, name: str, wanted: Mapping[str, Shape]) -> str:
        if name in wanted or name in self.tied:
            return name
        for old, new in self.prefixes:
            if name.startswith(old) and (new + name[len(old) :] in wanted or new + name[len(old) :] in self.tied):
                return new + name[len(old) :]
        return name


def stack_layers(mapping: FlaxMapping, spec: ArchitectureSpec) -> FlaxMapping:
    """The mapping for parameters stacked over equal layers: `groups.<g>.<position>.<path>` with a leading layers axis
    instead of `layers.<i>.<path>`, as a decoder that scans over layers stores them."""
    rules: list[tuple[str, Expression]] = [rule for rule in mapping.rules if not rule[0].startswith("layers.")]
    by_layer: dict[int, list[tuple[str, Expression]]] = defaultdict(list)
    for path, rule in mapping.rules:
        if path.startswith("layers."):
            _, index, rest = path.split(".", 2)
            by_layer[int(index)].append((rest, rule))
    for number, group in enumerate(spec.groups()):
        period = len(group.unit)
        for position in range(period):
            copies = [dict(by_layer[group.start + position + turn * period]) for turn in range(group.repeats)]
            for rest in copies[0]:
                rules.append((f"groups.{number}.{position}.{rest}", Stack(tuple(copy[rest] for copy in copies))))
    return replace(mapping, rules=tuple(rules))


def _without(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], *shape[axis + 1 :])


def _s(names: list[str]) -> str:
    return "s" if len(names) > 1 else ""


def _some(names: Iterable[str], limit: int = 4) -> str:
    listed = list(names)
    text = ", ".join(repr(name) for name in listed[:limit])
    return text if len(listed) <= limit else f"{text} and {len(listed) - limit} more"
