"""Microscaling 4-bit floats (OCP MX 1.0): two e2m1 numbers in a byte, and for every 32 of them one power of two.
gpt-oss stores its experts so, as `*_blocks` and `*_scales`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ttpu_core.checkpoint.decoded import DecodedTensor, raw_rows
from ttpu_core.checkpoint.header import TensorInfo, TensorReader
from ttpu_core.config import ModelConfig
from ttpu_core.quantization.packing import E2M1, nibbles
from ttpu_core.quantization.schemes.tensor import (
    FLOAT32,
    QuantizedCheckpoint,
    QuantizedTensor,
    missing,
    scale_source,
    wrong_shape,
)

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

GROUP = 32


def read_mxfp4(source: str, config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> QuantizedCheckpoint:
    """Read a checkpoint whose experts are stored as gpt-oss' are; no weight is read. `name_blocks` [experts, out,
    groups, 16] and `name_scales` hold the weight `name` [experts, out, in], which gpt-oss' dense checkpoints have as
    [experts, in, out].

    Raises:
        CheckpointError: scales are missing or have a wrong shape.
    """
    weights: dict[str, QuantizedTensor] = {}
    used: set[str] = set()
    for name, info in tensors.items():
        if name.endswith("_blocks"):
            dense_name = name.removesuffix("_blocks")
            scales = tensors.get(f"{dense_name}_scales")
            if scales is None:
                raise missing(name, f"{dense_name}_scales")
            if info.shape[-1:] != (GROUP // 2,):
                raise wrong_shape(info, (*info.shape[:-1], GROUP // 2), "blocks of 32 numbers of 4 bits")
            *lead, groups, width = info.shape
            merged = TensorInfo(name, info.dtype, (*lead, groups * width), info.file, info.start, info.nbytes)
            weights[dense_name] = replace(mxfp4_weight(dense_name, merged, scales), dense_inputs_first=True)
            used |= {name, scales.name}
    dense = {name: info for name, info in tensors.items() if name not in used}
    return QuantizedCheckpoint(source, "mxfp4", weights, dense)


def mxfp4_weight(name: str, packed: TensorInfo, scales: TensorInfo) -> QuantizedTensor:
    """A weight [*lead, out, in] from bytes [*lead, out, in / 2] and exponents [*lead, out, in / 32].

    Raises:
        CheckpointError: the scales have a wrong shape.
    """
    *lead, half = packed.shape
    shape = (*lead, 2 * half)
    if scales.shape != (*lead, 2 * half // GROUP):
        raise wrong_shape(scales, (*lead, 2 * half // GROUP), f"scales of 32 numbers each of a weight {shape}")

    def values(reader: TensorReader, start: int, stop: int) -> Array:
        return E2M1[nibbles(raw_rows(reader, packed, start, stop))]

    parts: Any = {
        "values": DecodedTensor(packed.name, shape, FLOAT32, values),
        "scale": scale_source(scales, shape),
    }
    return QuantizedTensor(name, shape, "float4_e2m1fn", GROUP, "float8_e8m0fnu", parts)
