"""AWQ files (arXiv 2306.00978) in the gemm layout of AutoAWQ: `qweight`, `qzeros` and `scales` of each linear layer,
where 8 outputs share an int32 word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ttpu_core.checkpoint.decoded import DecodedTensor, raw_columns
from ttpu_core.checkpoint.header import TensorInfo, TensorReader
from ttpu_core.config import ModelConfig
from ttpu_core.errors import UnsupportedError
from ttpu_core.quantization.packing import floats, signed, unpack_awq
from ttpu_core.quantization.schemes.section import first_present, group_size_of_config
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
    wrong_shape,
)
from ttpu_core.spec.kernel_format import PartName

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

COLUMNS = 8
"""Outputs that share a word."""


def read_awq(source: str, config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> QuantizedCheckpoint:
    """Read an AWQ checkpoint; no weight is read.

    Raises:
        CheckpointError: a part is missing or has a wrong shape.
        ConfigError: a key of `config` has a value of another kind.
        UnsupportedError: other than 4 bits, or another layout than gemm.
    """
    refuse_layout(source, config)
    asked = group_size_of_config(config, first_present(config, "group_size", "q_group_size"))
    weights: dict[str, QuantizedTensor] = {}
    used: set[str] = set()
    for name in tensors:
        if name.endswith(".qweight"):
            module = name.removesuffix(".qweight")
            weights[f"{module}.weight"] = _weight(module, asked, tensors)
            used |= {f"{module}.{part}" for part in ("qweight", "qzeros", "scales")}
    dense = {name: info for name, info in tensors.items() if name not in used}
    return QuantizedCheckpoint(source, "AWQ", weights, dense)


def refuse_layout(source: str, config: ModelConfig) -> None:
    """Refuse what is not read.

    Raises:
        ConfigError: a key has a value of another kind.
        UnsupportedError: other than 4 bits, or another layout than gemm.
    """
    bits = config.positive_int(first_present(config, "bits", "w_bit"))
    version = config.text("version", default="gemm").lower()
    if bits != 4 or version != "gemm":
        raise UnsupportedError(
            f"{source} holds AWQ weights of {bits} bits in the layout {version!r}, but those of 4 bits in the layout "
            "'gemm' are read: take such a checkpoint."
        )


def _weight(module: str, asked: int | None, tensors: Mapping[str, TensorInfo]) -> QuantizedTensor:
    qweight, scales, zeros = (tensors.get(f"{module}.{part}") for part in ("qweight", "scales", "qzeros"))
    if scales is None or qweight is None:
        raise missing(f"{module}.qweight", f"{module}.scales")
    if len(qweight.shape) != 2 or len(scales.shape) != 2 or qweight.shape[1] * COLUMNS != scales.shape[1]:
        raise wrong_shape(qweight, (qweight.shape[0], scales.shape[-1] // COLUMNS), f"words for scales {scales.shape}")
    inputs, (groups, out) = qweight.shape[0], scales.shape
    if zeros is not None and zeros.shape != (groups, out // COLUMNS):
        raise wrong_shape(zeros, (groups, out // COLUMNS), f"zero points for scales {scales.shape}")
    size = group_size_of(scales.name, inputs, groups, asked)
    packed, scaled = qweight, scales

    def numbers(info: TensorInfo, reader: TensorReader, start: int, stop: int) -> Array:
        first = start // COLUMNS
        found = unpack_awq(raw_columns(reader, info, first, -(-stop // COLUMNS)))
        columns = found[:, start - first * COLUMNS : stop - first * COLUMNS]
        return signed(np.ascontiguousarray(columns.T), 4)

    def values(reader: TensorReader, start: int, stop: int) -> Array:
        return numbers(packed, reader, start, stop)

    def scale(reader: TensorReader, start: int, stop: int) -> Array:
        return checked_scales(scaled.name, floats(raw_columns(reader, scaled, start, stop), scaled.dtype)).T

    found: dict[PartName, Source] = {
        "values": DecodedTensor(qweight.name, (out, inputs), INT8, values),
        "scale": DecodedTensor(scales.name, (out, groups), FLOAT32, scale),
    }
    if zeros is not None:
        stored = zeros

        def zero_points(reader: TensorReader, start: int, stop: int) -> Array:
            return numbers(stored, reader, start, stop)

        found["zero_point"] = DecodedTensor(zeros.name, (out, groups), INT8, zero_points)
    return QuantizedTensor(f"{module}.weight", (out, inputs), "int4", size, exact_scale_dtype(scales), found)
