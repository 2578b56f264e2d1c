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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from ttpu_core.errors import MappingError
from ttpu_core.padding import Padding
from ttpu_core.strides import Layout, covers_once

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


@dataclass(frozen=True)
class FlaxMapping:
    """All rules of one model.

    `rules` pairs a Flax path with its expression. `tied` names checkpoint tensors that repeat a parameter and are not
    read. `ignored` are regular expressions of extras (rotary tables, multi-token-prediction heads). `prefixes` renames
    leading parts of checkpoint names, first match wins, where a checkpoint's tensors are not under the usual names.
    `alternatives` are sets of rules that stand in for those of the same paths where a checkpoint holds their tensors
    (experts published as one tensor, and saved again as one per expert): see `suited_to`.
    """

    rules: tuple[tuple[str, Expression], ...]
    tied: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    prefixes: tuple[tuple[str, str], ...] = ()
    alternatives: tuple[tuple[tuple[str, Expression], ...], ...] = ()
    _by_path: dict[str, Expression] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_path", dict(self.rules))
        if len(self._by_path) != len(self.rules):
            twice = [path for path, count in Counter(path for path, _ in self.rules).items() if count > 1]
            raise MappingError(
                f"the mapping has more than one rule for {_some(twice)}, but a parameter is made by one: remove the "
                "others from `ttpu_flax_mapping`."
            )

    def __getitem__(self, path: str) -> Expression:
        return self._by_path[path]

    def suited_to(self, available: Iterable[str]) -> FlaxMapping:
        """The mapping for a checkpoint that holds tensors of these names: with the first of the `alternatives` of which
        it holds any, or with the usual rules."""
        held = list(available)
        for rules in self.alternatives:
            wanted = {leaf.name: leaf.shape for _, rule in rules for leaf in rule.leaves()}
            if any(self._canonical(name, wanted) in wanted for name in held):
                instead = dict(rules)
                chosen = tuple((path, instead.get(path, rule)) for path, rule in self.rules)
                return replace(self, rules=chosen, alternatives=())
        return replace(self, alternatives=()) if self.alternatives else self

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
                f"the mapping has a rule for {_some(unknown)}, but the architecture has no such "
                f"parameter{_s(unknown)}: remove it from `ttpu_flax_mapping`, or describe what uses it."
            )
        for path, rule in self.rules:
            if rule.result_shape != parameters[path].shape:
                raise MappingError(
                    f"the mapping makes {path} of shape {rule.result_shape}, but the architecture needs "
                    f"{parameters[path].shape}: correct the rule for it in `ttpu_flax_mapping`."
                )
        self._check_tensors()
        for rules in self.alternatives:
            self.suited_to(leaf.name for _, rule in rules for leaf in rule.leaves()).check_parameters(parameters)

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
            if name in found:
                raise MappingError(
                    f"{source} holds both {found[name]!r} and {actual!r} for the tensor {name!r}, but one is needed: "
                    "remove the other from the checkpoint."
                )
            if name in wanted:
                if tuple(shape) != wanted[name]:
                    raise MappingError(
                        f"tensor {actual!r} in {source} has shape {tuple(shape)}, but the config asks for "
                        f"{wanted[name]}: config.json and the weights belong to different models, or one is damaged."
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

    def canonical(self, available: Iterable[str]) -> dict[str, str]:
        """From the names that the rules use, those of tied tensors included, to the names in a checkpoint."""
        wanted = self.tensors
        found = {self._canonical(actual, wanted): actual for actual in available}
        return {name: actual for name, actual in found.items() if name in wanted or name in self.tied}

    def _check_tensors(self) -> None:
        """Every checkpoint tensor has one shape, and each of its elements is used once."""
        users: dict[str, list[Tensor]] = defaultdict(list)
        for _, rule in self.rules:
            for leaf in rule.leaves():
                users[leaf.name].append(leaf)
        for name, leaves in users.items():
            shape, size = leaves[0].shape, prod(leaves[0].shape)
            others = [leaf.shape for leaf in leaves if leaf.shape != shape]
            if others:
                raise MappingError(
                    f"the mapping gives {name!r} the shape {shape} in one rule and {others[0]} in another, but a "
                    "tensor has one shape on disk: correct `ttpu_flax_mapping`."
                )
            used = sum(prod(leaf.result_shape) for leaf in leaves)
            if used != size:
                raise MappingError(
                    f"the mapping uses {used:,} of the {size:,} elements of {name!r}, but every element must be used "
                    "once: complete the rules that slice it in `ttpu_flax_mapping`."
                )
            if any(leaf.is_part for leaf in leaves) and not covers_once(size, [leaf.layout for leaf in leaves]):
                raise MappingError(
                    f"the mapping uses some elements of {name!r} more than once and leaves as many out, but every "
                    "element must be used once: correct the rules that slice it in `ttpu_flax_mapping`."
                )

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
    return replace(mapping, rules=tuple(rules), alternatives=())


def pad_mapping(mapping: FlaxMapping, paddings: Mapping[str, Padding]) -> FlaxMapping:
    """The mapping for parameters that are padded as `ttpu_core.plan.padding` says, by Flax path."""

    def padded(rules: tuple[tuple[str, Expression], ...]) -> tuple[tuple[str, Expression], ...]:
        return tuple((path, Padded(rule, paddings[path]) if path in paddings else rule) for path, rule in rules)

    alternatives = tuple(padded(rules) for rules in mapping.alternatives)
    return replace(mapping, rules=padded(mapping.rules), alternatives=alternatives)


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


def _s(names: list[str]) -> str:
    return "s" if len(names) > 1 else ""


def _some(names: Iterable[str], limit: int = 4) -> str:
    listed = list(names)
    text = ", ".join(repr(name) for name in listed[:limit])
    return text if len(listed) <= limit else f"{text} and {len(listed) - limit} more"
