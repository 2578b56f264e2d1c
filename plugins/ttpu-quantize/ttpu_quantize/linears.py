"""Finds the matrices of a checkpoint that are quantized: which tensors they are, in which format, and by which products
of the model they are read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ttpu_core.architecture import Architecture
from ttpu_core.checkpoint import Checkpoint
from ttpu_core.errors import RequestError
from ttpu_core.mapping import Expression, FlaxMapping, Stack, Tensor
from ttpu_core.quantization.config import QuantizationConfig
from ttpu_core.quantization.quantize import choices, described, fitting, why_finer, without_layer
from ttpu_core.spec import Parameter, axes
from ttpu_core.spec.kernel_format import KernelFormat
from ttpu_core.spec.parameters import LAYERS


@dataclass(frozen=True)
class Use:
    """Where a matrix is multiplied: the path of a kernel, and the number of the expert, None if there are none."""

    path: str
    expert: int | None = None


@dataclass(frozen=True)
class Linear:
    """A matrix of the checkpoint that is quantized.

    Attributes:
        name: of its tensor, as the mapping calls it, `<module>.weight`.
        stored: of its tensor in the checkpoint's files.
        shape: (outputs, inputs).
        form: the format it gets; its scales are in the checkpoint's dtype.
        uses: the kernels that it is a part of; all of them read the same input.
    """

    name: str
    stored: str
    shape: tuple[int, int]
    form: KernelFormat
    uses: tuple[Use, ...]

    @property
    def module(self) -> str:
        """The name of the module in the checkpoint's files."""
        return self.stored.removesuffix(".weight")


@dataclass(frozen=True)
class Selection:
    """What is quantized, and a sentence for everything that is not or that is in another format than asked for.

    Attributes:
        linears: by layer, in model order; key None for the matrices outside of layers.
        notes: sentences.
    """

    linears: dict[int | None, tuple[Linear, ...]]
    notes: tuple[str, ...]

    def __iter__(self) -> Iterator[Linear]:
        for group in self.linears.values():
            yield from group


def select(architecture: Architecture, checkpoint: Checkpoint, config: QuantizationConfig) -> Selection:
    """Choose the matrices of a checkpoint.

    Raises:
        RequestError: nothing can be quantized, no group size suits a matrix's inputs, or an entry of `skip` names
            nothing.
    """
    mapping = architecture.mapping.suited_to(checkpoint.tensors)
    resolved = mapping.canonical(checkpoint.tensors)
    found = choices(architecture.spec, _per_channel(config), mapping)
    notes = [f"not quantized, {line}" for line in described(found)]
    form = replace(config.kernel_format, scale_dtype=_scale_dtype(config, checkpoint))
    wanted = {one.path for one in found if one.format is not None}
    uses: dict[str, list[Use]] = {}
    refused: dict[str, dict[str, None]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path, parameter in architecture.spec.parameters.items():
        for leaf, expert in _leaves(mapping, path, parameter):
            reason = None if path in wanted else "shares a tensor with what is not quantized"
            reason = reason or _not_a_matrix(leaf)
            if reason and path in wanted:
                refused.setdefault(reason, {})[without_layer(path)] = None
            if reason:
                refused.setdefault("", {})[leaf.name] = None
            shapes[leaf.name] = leaf.shape
            uses.setdefault(leaf.name, []).append(Use(path, expert))
    notes += [f"not quantized, {reason}: {', '.join(paths)}" for reason, paths in refused.items() if reason]
    linears: dict[int | None, list[Linear]] = {}
    finer: dict[str, dict[str, None]] = {}
    for name, places in uses.items():
        if name in refused.get("", {}):
            continue
        outputs, inputs = shapes[name]
        own = fitting(form, inputs, places[0].path.removesuffix(".kernel"))
        if reason := why_finer(own, form, inputs):
            finer.setdefault(reason, {})[without_layer(places[0].path)] = None
        linear = Linear(name, resolved[name], (outputs, inputs), own, tuple(places))
        linears.setdefault(_layer(places[0].path), []).append(linear)
    notes += [f"{reason}: {', '.join(paths)}" for reason, paths in finer.items()]
    if not linears:
        raise RequestError(
            f"{checkpoint.source} was to be quantized to {config}, but none of its tensors is a matrix that can be: "
            + "; ".join(notes)
        )
    return Selection({layer: tuple(group) for layer, group in linears.items()}, tuple(notes))


def _per_channel(config: QuantizationConfig) -> QuantizationConfig:
    """The configuration without groups, for which every kernel is chosen that may be quantized."""
    values = config.to_dict() | {"group_size": None}
    return config if config.dtype == "mxfp4" else QuantizationConfig.from_dict(values)


def _scale_dtype(config: QuantizationConfig, checkpoint: Checkpoint) -> str:
    own = config.kernel_format.scale_dtype
    return checkpoint.dtype if own == "float32" else own


def _layer(path: str) -> int | None:
    return int(path.split(".", 2)[1]) if path.startswith(LAYERS) else None


def _leaves(mapping: FlaxMapping, path: str, parameter: Parameter) -> Iterator[tuple[Tensor, int | None]]:
    """The checkpoint tensors of a parameter, each with the expert that it belongs to."""
    rule: Expression = mapping[path]
    if axes.EXPERT in parameter.axes[:1] and isinstance(rule, Stack) and rule.axis == 0:
        for expert, part in enumerate(rule.parts):
            for leaf in part.leaves():
                yield leaf, expert
        return
    for leaf in rule.leaves():
        yield leaf, None


def _not_a_matrix(leaf: Tensor) -> str | None:
    """Why a tensor cannot be stored as a quantized matrix [outputs, inputs], or None."""
    if not leaf.name.endswith(".weight"):
        return "its tensor is no `weight` of a module"
    if len(leaf.shape) != 2:
        return f"its tensor has {len(leaf.shape)} dimensions and a quantized one has 2"
    layout = leaf.layout
    if not layout.shape or layout.strides[-1] != 1 or layout.shape[-1] != leaf.shape[1]:
        return "its tensor holds it transposed"
    return None


def pattern_of(module: str) -> str:
    """A regular expression, marked as compressed-tensors marks one, for a module and its like in all layers."""
    return "re:" + re.sub(r"\d+", r"\\d+", re.escape(module)) + "$"
