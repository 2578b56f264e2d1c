"""One weight of a quantized checkpoint as its decoded parts, and the decoding of scales, which all schemes share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ttpu_core.checkpoint.decoded import DecodedTensor, raw_rows, raw_tensor
from ttpu_core.checkpoint.header import TensorInfo, TensorReader
from ttpu_core.errors import CheckpointError
from ttpu_core.quantization.packing import floats
from ttpu_core.spec.kernel_format import ActivationFormat, KernelFormat, PartName, ValueDtype

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

Source = TensorInfo | DecodedTensor
FLOAT32, INT8 = np.dtype(np.float32), np.dtype(np.int8)
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class QuantizedTensor:
    """A weight [*lead, out, in] of a quantized checkpoint.

    Attributes:
        name: the name that the weight would have in a dense checkpoint.
        shape: of the weight.
        dtype: of the values.
        group_size: number of neighbouring inputs, in the stored order, that share a scale; None for one scale per
            output channel.
        scale_dtype: the dtype that holds the scales exactly.
        activation: how the input of the product is quantized.
        parts: values in the weight's shape; scale and zero_point [*lead, out, groups], groups = 1 without groups;
            input_order [in]; input_scale [1].
        order: the content of input_order, where inputs are stored in another order.
        scale_width: inputs of a stored scale, where these are more than a group (blocks that do not divide the inputs).
        dense_inputs_first: whether a dense checkpoint has the weight as [*lead, in, out], and its mapping reads it so.
    """

    name: str
    shape: tuple[int, ...]
    dtype: ValueDtype
    group_size: int | None
    scale_dtype: str
    parts: Mapping[PartName, Source]
    activation: ActivationFormat | None = None
    order: Array | None = field(default=None, compare=False)
    scale_width: int | None = None
    dense_inputs_first: bool = False

    @property
    def dense_shape(self) -> tuple[int, ...]:
        """The weight's shape in a dense checkpoint."""
        *lead, out, inputs = self.shape
        return (*lead, inputs, out) if self.dense_inputs_first else self.shape

    @property
    def format(self) -> KernelFormat:
        """The format of a kernel made of this weight alone."""
        return KernelFormat(
            self.dtype,
            self.group_size,
            "zero_point" not in self.parts,
            self.scale_dtype,
            self.order is not None,
            self.activation,
        )


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """The tensors of a quantized checkpoint.

    Attributes:
        source: the checkpoint's name, for error messages.
        scheme: in words, such as "GPTQ".
        weights: dense name → quantized weight.
        dense: the other tensors, by name.
    """

    source: str
    scheme: str
    weights: Mapping[str, QuantizedTensor]
    dense: Mapping[str, TensorInfo]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor of the dense checkpoint that this one stands for."""
        return {name: one.dense_shape for name, one in self.weights.items()} | {
            name: info.shape for name, info in self.dense.items()
        }


def scale_source(info: TensorInfo, shape: tuple[int, ...], block: tuple[int, int] | None = None) -> DecodedTensor:
    """The scales [*lead, out, groups] of a weight, float32 and finite.

    Args:
        info: stored [*lead, out, groups], with 1 group for one per channel, one number for the whole weight, [out], or
            [*lead, blocks of outputs, blocks of inputs].
        shape: the weight's, [*lead, out, in].
        block: outputs and inputs of a block.

    Raises:
        CheckpointError: the stored shape fits none of these.
    """
    *lead, out, inputs = shape
    if block is not None:
        high, wide = block
        groups = -(-inputs // wide)
        expected = (*lead, -(-out // high), groups)
        if info.shape != expected:
            raise wrong_shape(info, expected, f"blocks of {high} x {wide} of a weight {shape}")
        per_lead = expected[-2]

        def blocks(reader: TensorReader, start: int, stop: int) -> Array:
            numbers = np.arange(start, stop)
            rows = numbers // out * per_lead + numbers % out // high
            first = int(rows[0])
            return _finite(info, raw_rows(reader, info, first, int(rows[-1]) + 1))[rows - first]

        return DecodedTensor(info.name, (*lead, out, groups), FLOAT32, blocks)
    if info.size == 1:

        def one(reader: TensorReader, start: int, stop: int) -> Array:
            return np.broadcast_to(_finite(info, raw_tensor(reader, info).reshape(1, 1)), (stop - start, 1))

        return DecodedTensor(info.name, (*lead, out, 1), FLOAT32, one)
    flat = info.shape == (*lead, out)
    if not flat and info.shape[:-1] != (*lead, out):
        raise wrong_shape(info, (*lead, out, 1), f"the scales of a weight {shape}")
    columns = 1 if flat else info.shape[-1]
    whole = TensorInfo(info.name, info.dtype, (*lead, out, columns), info.file, info.start, info.nbytes)

    def rows(reader: TensorReader, start: int, stop: int) -> Array:
        return _finite(whole, raw_rows(reader, whole, start, stop))

    return DecodedTensor(info.name, whole.shape, FLOAT32, rows)


def checked_scales(name: str, scales: Array) -> Array:
    """The scales.

    Raises:
        CheckpointError: one is NaN or infinite.
    """
    if not np.isfinite(scales).all():
        raise CheckpointError(
            f"the scales {name!r} were asked for, but some of them are NaN or infinite: take another copy of the "
            "checkpoint, or quantize the model anew."
        )
    return scales


def _finite(info: TensorInfo, raw: Array) -> Array:
    return checked_scales(info.name, floats(raw, info.dtype))


def group_size_of(name: str, inputs: int, groups: int, said: int | None = None) -> int | None:
    """Number of inputs that share a scale; None for one group.

    Raises:
        CheckpointError: the groups do not divide the inputs, or the config says another size.
    """
    if groups == 1 and said in (None, -1, inputs):
        return None
    size = inputs // groups if groups else 0
    if groups < 1 or inputs % groups or (said is not None and said != size):
        asked = f"groups of {said}" if said is not None else f"{groups} groups"
        raise CheckpointError(
            f"{name!r} has {inputs} inputs and {groups} scales per output channel, but {asked} were announced by the "
            "config: config.json and the weights belong to different models, or one is damaged."
        )
    return size


def order_of(name: str, index: Array, groups: int, size: int) -> Array | None:
    """The order in which inputs lie group by group: int32 [in], or None where they lie so already.

    Args:
        name: the tensor's, for error messages.
        index: the group of each input, [in].
        groups: number of groups.
        size: inputs of each group.

    Raises:
        CheckpointError: an index is out of range, or a group has another number of inputs.
    """
    if index.size and (index.min() < 0 or index.max() >= groups):
        wrong = int(index[(index < 0) | (index >= groups)][0])
        raise CheckpointError(
            f"the group index {name!r} has the entry {wrong}, but the weight has the groups 0 to {groups - 1}: take "
            "another copy of the checkpoint, or quantize the model anew."
        )
    counts = np.bincount(index, minlength=groups)
    if (counts != size).any():
        group = int(np.flatnonzero(counts != size)[0])
        raise CheckpointError(
            f"the group index {name!r} puts {int(counts[group])} inputs into group {group}, but each group has {size}: "
            "take another copy of the checkpoint, or quantize the model anew."
        )
    order = np.argsort(index, kind="stable").astype(np.int32)
    return None if np.array_equal(order, np.arange(len(order))) else order


def order_source(name: str, order: Array) -> DecodedTensor:
    """An input order [in] that is known already."""

    def rows(reader: TensorReader, start: int, stop: int) -> Array:
        return order[None]

    return DecodedTensor(name, order.shape, np.dtype(np.int32), rows)


def exact_scale_dtype(info: TensorInfo) -> str:
    """The dtype that devices hold the scales in: bfloat16 if they are stored so, else float32."""
    return "bfloat16" if info.dtype == "BF16" else "float32"


def wrong_shape(info: TensorInfo, expected: tuple[int, ...], what: str) -> CheckpointError:
    """The error for a tensor of another shape than `what` has."""
    return CheckpointError(
        f"tensor {info.name!r} has shape {info.shape}, but {what} have {expected}: config.json and the weights belong "
        "to different models, or one is damaged."
    )


def missing(name: str, needed: str) -> CheckpointError:
    """The error for a quantized weight without one of its parts."""
    return CheckpointError(
        f"{name!r} is quantized, but the checkpoint has no {needed!r} beside it: the download is incomplete, or the "
        "model was saved without its scales."
    )


