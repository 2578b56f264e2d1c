"""Maps the weights of a quantized checkpoint to the parts of quantized kernels, padded and regrouped as a mesh needs
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ttpu_core.checkpoint.decoded import DecodedTensor
from ttpu_core.checkpoint.header import TensorInfo, TensorReader
from ttpu_core.errors import MappingError, UnsupportedError
from ttpu_core.mapping import Expression, FlaxMapping, Padded, Stack, Tensor
from ttpu_core.mapping.padding import Padding, merged_runs
from ttpu_core.quantization.grouping import Grouping, places_of
from ttpu_core.quantization.reading import dequantized, largest_scale, regrouped
from ttpu_core.quantization.schemes import QuantizedCheckpoint, QuantizedTensor
from ttpu_core.quantization.schemes.tensor import Source
from ttpu_core.spec import ArchitectureSpec, axes
from ttpu_core.spec.kernel_format import KernelFormat, PartName, parts_of

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class StoredMapping:
    """How the arrays on devices come from a quantized checkpoint.

    Attributes:
        mapping: rules for `ttpu_core.spec.kernel_format.stored_parameters`.
        sources: the tensors of the rules by name, without those that are stored dense.
        dense: the rules' names of dense tensors → the checkpoint's.
    """

    mapping: FlaxMapping
    sources: Mapping[str, Source]
    dense: Mapping[str, TensorInfo]


def formats_of(spec: ArchitectureSpec, mapping: FlaxMapping, held: QuantizedCheckpoint) -> ArchitectureSpec:
    """The architecture with the format of each kernel as the checkpoint stores it. A kernel that consists of several
    weights, of which some are not quantized or are quantized in another way, has none (`mixed_kernels`).

    Args:
        spec: the architecture.
        mapping: its rules, suited to the checkpoint (`FlaxMapping.suited_to`).
        held: the checkpoint.

    Raises:
        MappingError: tensors are missing, unknown or have other shapes.
    """
    names = mapping.resolve(held.shapes, held.source)
    formats = []
    for path, rule in mapping.rules:
        weights = [held.weights.get(names[leaf.name]) for leaf in rule.leaves()]
        form = common_format([None if one is None else one.format for one in weights])
        if form is not None:
            formats.append((path, form))
    return replace(spec, kernel_formats=tuple(formats))


def mixed_kernels(spec: ArchitectureSpec, mapping: FlaxMapping, held: QuantizedCheckpoint) -> tuple[str, ...]:
    """Paths of the kernels that have no format although the checkpoint quantizes weights in them.

    Args:
        spec: the architecture with the checkpoint's formats (`formats_of`).
        mapping: its rules, suited to the checkpoint.
        held: the checkpoint.
    """
    names = mapping.resolve(held.shapes, held.source)
    formats = dict(spec.kernel_formats)
    return tuple(
        path
        for path, rule in mapping.rules
        if path not in formats and any(names[leaf.name] in held.weights for leaf in rule.leaves())
    )


def stored_mapping(
    spec: ArchitectureSpec,
    padded: ArchitectureSpec,
    mapping: FlaxMapping,
    paddings: Mapping[str, Padding],
    groupings: Mapping[str, Grouping],
    held: QuantizedCheckpoint,
) -> StoredMapping:
    """The rules by which parameters are read from a quantized checkpoint.

    Args:
        spec: the architecture with the checkpoint's formats (`formats_of`).
        padded: the architecture for the mesh.
        mapping: the rules of the architecture before padding.
        paddings: Flax path → padding.
        groupings: Flax path → how the groups fit the mesh (`ttpu_core.quantization.grouping.fit_formats`).
        held: the checkpoint.

    Raises:
        MappingError: a rule's views cannot be followed by scales.
    """
    names = mapping.resolve(held.shapes, held.source)
    formats = dict(padded.kernel_formats)
    rules: list[tuple[str, Expression]] = []
    sources: dict[str, Source] = {}
    dense: dict[str, TensorInfo] = {}
    for path, dense_rule in mapping.rules:
        rule = _mapped(dense_rule, lambda leaf: _as_stored(leaf, held.weights.get(names[leaf.name])))
        padding = paddings.get(path)
        if path not in formats:
            rules.append((path, rule if padding is None else Padded(rule, padding)))
            for leaf in rule.leaves():
                stored = held.weights.get(names[leaf.name])
                if stored is None:
                    dense[leaf.name] = held.dense[names[leaf.name]]
                else:
                    sources[leaf.name] = dequantized(stored)
            continue
        weights = {leaf.name: held.weights[names[leaf.name]] for leaf in rule.leaves()}
        one = _Kernel(path, rule, weights, groupings[path], padding)
        parameter = padded.parameters[path]
        lead = sum(axis in (axes.LAYERS, axes.EXPERT) for axis in parameter.axes)
        for part, _ in parts_of(parameter):
            rules.append((f"{path}.{part}", one.rule(part, lead)))
        sources |= one.sources
    return StoredMapping(FlaxMapping(tuple(rules)), sources, dense)


def common_format(formats: Sequence[KernelFormat | None]) -> KernelFormat | None:
    """The format that holds all weights of a kernel exactly. None if there is none: some are not quantized, or they
    differ in how their inputs are quantized, or in their dtype otherwise than in the bits of integers."""
    found = [form for form in formats if form is not None]
    dtypes = {form.dtype for form in found}
    mixed = len({form.activation for form in found}) != 1 or (len(dtypes) > 1 and dtypes != {"int4", "int8"})
    if len(found) < len(formats) or mixed:
        return None
    first = found[0]
    scales = {form.scale_dtype for form in found}
    sizes = [form.group_size for form in found if form.group_size is not None]
    return KernelFormat(
        first.dtype if len(dtypes) == 1 else "int8",
        gcd(*sizes) if sizes else None,
        all(form.symmetric for form in found),
        first.scale_dtype if len(scales) == 1 else "float32",
        any(form.input_order for form in found),
        first.activation,
    )


@dataclass
class _Kernel:
    """The rules of one kernel's parts. Names of tensors are those of the dense rule with the part behind "::"."""

    path: str
    dense_rule: Expression
    weights: Mapping[str, QuantizedTensor]
    grouping: Grouping
    padding: Padding | None

    def __post_init__(self) -> None:
        self.sources: dict[str, Source] = {}

    def rule(self, part: PartName, lead: int) -> Expression:
        """The rule of one part; `lead` is the number of leading dimensions of layers and experts."""
        if part == "values":
            for leaf in self.dense_rule.leaves():
                self.sources[leaf.name] = self.weights[leaf.name].parts["values"]
            return self.dense_rule if self.padding is None else Padded(self.dense_rule, self._of_columns(self.padding))
        if part in ("scale", "zero_point"):
            return self._of_groups(part)
        return self._of_inputs(part, self.dense_rule, lead)

    def _of_columns(self, padding: Padding) -> Padding:
        """The padding of the values, whose columns keep their order if the kernel has an input order: those of zeros
        come last."""
        if padding.original[-1] == padding.shape[-1] or all(weight.order is None for weight in self.weights.values()):
            return padding
        inputs, added = padding.original[-1], padding.shape[-1] - padding.original[-1]
        original, axis = padding.original, len(padding.original) - 1
        return Padding(original, padding.shape, original, axis, ((0, inputs), (-1, added)))

    def _of_groups(self, part: PartName) -> Expression:
        grouping = self.grouping
        groups = None if grouping.fitted is None else grouping.inputs // grouping.fitted

        def leaf_rule(leaf: Tensor) -> Tensor:
            weight = self.weights[leaf.name]
            name = f"{leaf.name}::{part}"
            columns = groups or 1
            self.sources[name] = regrouped(weight, part, columns, grouping.fitted)
            changed = _with_inputs(leaf, name, weight.shape[-1], columns)
            return changed if groups is not None else changed.reshape(*changed.result_shape[:-1])

        rule = _mapped(self.dense_rule, leaf_rule)
        padding = self.padding
        if padding is None:
            return rule
        moved = padding.original[-1] != padding.shape[-1]
        if groups is None:
            return rule if moved else Padded(rule, _last(padding, None))
        if not moved:
            return Padded(rule, _last(padding, groups))
        runs = merged_runs((source, 1) for source in grouping.sources)
        before = (*padding.original[:-1], groups)
        after = (*padding.shape[:-1], len(grouping.sources))
        return Padded(rule, Padding(before, after, before, len(before) - 1, runs))

    def _of_inputs(self, part: PartName, rule: Expression, lead: int) -> Expression:
        """The rule of a part that all outputs share: one for each index of the leading dimensions."""
        if lead:
            if not isinstance(rule, Stack) or rule.axis != 0:
                raise _cannot_follow(self.path)
            return Stack(tuple(self._of_inputs(part, one, lead - 1) for one in rule.parts))
        leaves = [leaf.name for leaf in rule.leaves()]
        found = [self.weights[name] for name in leaves]
        name = f"{leaves[0]}::{part}"
        if part == "input_scale":
            self.sources[name] = largest_scale(name, [weight.parts["input_scale"] for weight in found])
            return Tensor(name, (1,)).reshape()
        orders = [weight.order for weight in found]
        for other, weight in zip(orders[1:], found[1:], strict=True):
            if not _same_order(orders[0], other):
                raise UnsupportedError(
                    f"{found[0].name!r} and {weight.name!r} are read into one kernel {self.path!r}, but their inputs "
                    "are stored in different orders (activation order): take a checkpoint that was quantized without "
                    "desc_act, or with one order for them."
                )
        inputs = found[0].shape[-1]
        known = orders[0] if orders[0] is not None else np.arange(inputs, dtype=np.int32)
        if self.padding is not None and self.padding.original[-1] != self.padding.shape[-1]:
            places = places_of(self.padding, inputs, self.padding.shape[-1])
            moved = np.flatnonzero(places >= 0)[np.argsort(places[places >= 0])]
            known = np.concatenate([moved[known], np.flatnonzero(places < 0)]).astype(np.int32)

        def rows(reader: TensorReader, start: int, stop: int) -> Array:
            return known[None]

        self.sources[name] = DecodedTensor(name, known.shape, np.dtype(np.int32), rows)
        return Tensor(name, known.shape)


def _same_order(one: Array | None, other: Array | None) -> bool:
    if one is None or other is None:
        return one is other
    return bool(np.array_equal(one, other))


def _mapped(rule: Expression, change: Any) -> Expression:
    """The rule with every leaf changed."""
    if isinstance(rule, Tensor):
        changed: Tensor = change(rule)
        return changed
    if isinstance(rule, Padded):
        raise AssertionError("rules are changed before they are padded")
    parts = tuple(_mapped(part, change) for part in rule.parts)
    return replace(rule, parts=parts)


def _as_stored(leaf: Tensor, weight: QuantizedTensor | None) -> Tensor:
    """The leaf of a dense rule as a view of the tensor that the quantized checkpoint stores."""
    if weight is None or not weight.dense_inputs_first:
        return leaf
    *lead, before_last, last = range(len(weight.shape))
    result = Tensor(leaf.name, weight.shape).transpose(*lead, last, before_last)
    for operation, argument in leaf.views:
        if operation == "reshape":
            result = result.reshape(*argument)
        elif operation == "transpose":
            result = result.transpose(*argument)
        else:
            result = result[_indices(argument)]
    return result


def _with_inputs(leaf: Tensor, name: str, inputs: int, columns: int) -> Tensor:
    """The same views of a tensor that has `columns` columns for the inputs of this one, which are its last dimension
    on disk.

    Raises:
        MappingError: the views split or cut the inputs, or these are not the last dimension in the end.
    """
    result = Tensor(name, (*leaf.shape[:-1], columns))
    shape, place = leaf.shape, len(leaf.shape) - 1
    for operation, argument in leaf.views:
        if operation == "reshape":
            before = prod(shape[:place])
            places = [axis for axis, size in enumerate(argument) if size == inputs and prod(argument[:axis]) == before]
            if not places:
                raise _cannot_follow(leaf.name)
            place, shape = places[0], argument
            result = result.reshape(*argument[:place], columns, *argument[place + 1 :])
        elif operation == "transpose":
            result, place = result.transpose(*argument), argument.index(place)
            shape = tuple(shape[axis] for axis in argument)
        else:
            parts = _indices(argument)
            if len(parts) > place and parts[place] != slice(None):
                raise _cannot_follow(leaf.name)
            result = result[parts]
            place -= sum(isinstance(part, int) for part in parts[:place])
            kept = [len(range(size)[part]) for part, size in zip(parts, shape, strict=False) if isinstance(part, slice)]
            shape = (*kept, *shape[len(parts) :])
    if place != len(shape) - 1:
        raise _cannot_follow(leaf.name)
    return result


def _indices(argument: Sequence[Any]) -> tuple[int | slice, ...]:
    return tuple(part if isinstance(part, int) else slice(*part) for part in argument)


def _cannot_follow(name: str) -> MappingError:
    return MappingError(
        f"the mapping moves or cuts the inputs of {name!r}, which the scales of a quantized checkpoint cannot follow: "
        "take the original weights, or correct `ttpu_flax_mapping` so that inputs stay the last dimension."
    )


def _last(padding: Padding, size: int | None) -> Padding:
    """A padding that leaves the last dimension as it is, for another size of that dimension, or without it."""
    end = () if size is None else (size,)
    original, shape, view = ((*one[:-1], *end) for one in (padding.original, padding.shape, padding.view))
    return Padding(original, shape, view, padding.axis, padding.runs)


