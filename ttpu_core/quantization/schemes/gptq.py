"""GPTQ files (arXiv 2210.17323) as AutoGPTQ and GPTQModel write them: `qweight`, `qzeros`, `scales` and `g_idx` of each
linear layer, where several weights share an int32 word along the inputs. The first version of the format stores each
zero point less one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ttpu_core.checkpoint.decoded import DecodedTensor, raw_columns, raw_tensor
from ttpu_core.checkpoint.header import TensorInfo, TensorReader
from ttpu_core.config import ModelConfig
from ttpu_core.errors import CheckpointError, UnsupportedError
from ttpu_core.quantization.packing import floats, signed, unpack
from ttpu_core.quantization.schemes.section import group_size_of_config
from ttpu_core.quantization.schemes.tensor import (
    FLOAT32,
    INT8,
    QuantizedCheckpoint,
    QuantizedTensor,
    Source,
    checked_scales,
    exact_scale_dtype,
    group_size_of,
    missing,
    order_of,
    order_source,
    wrong_shape,
)
from ttpu_core.spec.kernel_format import PartName

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

VERSIONS = {"gptq": 1, "gptq_v2": 0}
"""What is added to stored zero points, by the name of the file format."""


def read_gptq(source: str, config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> QuantizedCheckpoint:
    """Read a GPTQ checkpoint; no weight is read.

    Raises:
        CheckpointError: a part is missing or has a wrong shape, or a group index is out of range.
        ConfigError: a key of `config` has a value of another kind.
        UnsupportedError: other than 4 or 8 bits, or another file format.
    """
    bits, version = gptq_bits(source, config), config.text("checkpoint_format", default="gptq")
    if version not in VERSIONS:
        raise UnsupportedError(
            f"{source} holds GPTQ weights in the file format {version!r}, but {', '.join(VERSIONS)} are read: take "
            "such a checkpoint."
        )
    weights: dict[str, QuantizedTensor] = {}
    used: set[str] = set()
    with TensorReader() as reader:
        for name in tensors:
            if name.endswith(".qweight"):
                module = name.removesuffix(".qweight")
                weights[f"{module}.weight"] = _weight(module, bits, VERSIONS[version], config, tensors, reader)
                used |= {f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")}
    dense = {name: info for name, info in tensors.items() if name not in used}
    return QuantizedCheckpoint(source, "GPTQ", weights, dense)


def gptq_bits(source: str, config: ModelConfig) -> int:
    """Bits of a weight: 4 or 8.

    Raises:
        ConfigError: the config says no number.
        UnsupportedError: it says another number.
    """
    bits = config.positive_int("bits")
    if bits not in (4, 8):
        raise UnsupportedError(
            f"{source} holds GPTQ weights of {bits} bits, but those of 4 and 8 bits are read: take such a checkpoint."
        )
    return bits


def _weight(
    module: str,
    bits: int,
    offset: int,
    config: ModelConfig,
    tensors: Mapping[str, TensorInfo],
    reader: TensorReader,
) -> QuantizedTensor:
    parts: dict[str, TensorInfo] = {}
    for part in ("qweight", "qzeros", "scales"):
        if f"{module}.{part}" not in tensors:
            raise missing(f"{module}.qweight", f"{module}.{part}")
        parts[part] = tensors[f"{module}.{part}"]
    qweight, scales, zeros = parts["qweight"], parts["scales"], parts["qzeros"]
    each = 32 // bits
    if len(qweight.shape) != 2 or len(scales.shape) != 2:
        raise wrong_shape(qweight, (0, 0), "packed weights and their scales")
    groups, out = scales.shape
    inputs = qweight.shape[0] * each
    if qweight.shape[1] != out or qweight.dtype != "I32":
        raise wrong_shape(qweight, (qweight.shape[0], out), f"words of {each} inputs for scales {scales.shape}")
    if zeros.shape != (groups, -(-out // each)):
        raise wrong_shape(zeros, (groups, -(-out // each)), f"zero points for scales {scales.shape}")
    size = group_size_of(scales.name, inputs, groups, group_size_of_config(config, "group_size"))
    order = None
    index = tensors.get(f"{module}.g_idx")
    if index is not None:
        if index.shape != (inputs,):
            raise wrong_shape(index, (inputs,), f"the group index of {inputs} inputs")
        order = order_of(index.name, raw_tensor(reader, index), groups, inputs // groups)
    symmetric = config.flag("sym", default=False)

    def values(reader: TensorReader, start: int, stop: int) -> Array:
        words = raw_columns(reader, qweight, start, stop)
        found = signed(unpack(words.T, bits), bits)
        return found if order is None else found[:, order]

    def zero_points(reader: TensorReader, start: int, stop: int) -> Array:
        first = start // each
        words = raw_columns(reader, zeros, first, -(-stop // each))
        found = unpack(words, bits)[:, start - first * each : stop - first * each].astype(np.int16)
        centred = found + offset - (1 << (bits - 1))
        if centred.size and centred.max() > 127:
            raise CheckpointError(
                f"the zero points {zeros.name!r} have the entry {int(centred.max()) + 128}, but 8 bits hold 0 to 255: "
                "take another copy of the checkpoint, or one in the format gptq_v2."
            )
        return centred.T.astype(np.int8)

    def scale(reader: TensorReader, start: int, stop: int) -> Array:
        if symmetric and zero_points(reader, start, stop).any():
            raise CheckpointError(
                f"the zero points {zeros.name!r} are not in the middle of the range, but config.json says sym: true: "
                "set it to false in quantization_config."
            )
        return checked_scales(scales.name, floats(raw_columns(reader, scales, start, stop), scales.dtype)).T

    found: dict[PartName, Source] = {
        "values": DecodedTensor(qweight.name, (out, inputs), INT8, values),
        "scale": DecodedTensor(scales.name, (out, groups), FLOAT32, scale),
    }
    if not symmetric:
        found["zero_point"] = DecodedTensor(zeros.name, (out, groups), INT8, zero_points)
    if order is not None and index is not None:
        found["input_order"] = order_source(index.name, order)
    return QuantizedTensor(
        f"{module}.weight",
        (out, inputs),
        "int4" if bits == 4 else "int8",
        size,
        exact_scale_dtype(scales),
        found,
        order=order,
    )
