"""Files of the compressed-tensors library (llm-compressor, vLLM, `ttpu quantize`): int-quantized, pack-quantized,
float-quantized, naive-quantized and mxfp4-pack-quantized weights, each beside its scales. The config groups say which
format the weights of a module have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ttpu_core.checkpoint.decoded import DecodedTensor, raw_rows, raw_tensor
from ttpu_core.checkpoint.header import TensorInfo, TensorReader
from ttpu_core.config import ModelConfig
from ttpu_core.errors import CheckpointError, UnsupportedError
from ttpu_core.quantization.packing import floats, signed, unpack
from ttpu_core.quantization.schemes.config_groups import ConfigGroup, InputArguments, config_groups
from ttpu_core.quantization.schemes.fp8 import fp8_weight
from ttpu_core.quantization.schemes.mxfp4 import mxfp4_weight
from ttpu_core.quantization.schemes.section import patterns_of
from ttpu_core.quantization.schemes.tensor import (
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
    scale_source,
    wrong_shape,
)
from ttpu_core.spec.kernel_format import ActivationFormat, PartName

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

PARTS = (
    "weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "input_scale",
    "input_zero_point", "output_scale", "output_zero_point", "weight_global_scale", "input_global_scale",
)  # fmt: skip
CACHE = (".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point", ".q_zero_point")
"""Scales of a quantized KV cache, which is asked for when a model is served."""


def read_compressed_tensors(
    source: str, config: ModelConfig, tensors: Mapping[str, TensorInfo]
) -> QuantizedCheckpoint:
    """Read a checkpoint in a format of compressed-tensors; no weight is read.

    Raises:
        CheckpointError: a part is missing or has a wrong shape, or a group index is out of range.
        ConfigError: a key of `config` has a value of another kind.
        UnsupportedError: a format that is not read.
    """
    groups = config_groups(source, config)
    ignored = patterns_of(config, "ignore")
    weights: dict[str, QuantizedTensor] = {}
    used = {name for name in tensors if name.endswith(CACHE)}
    with TensorReader() as reader:
        for name, info in tensors.items():
            module, _, part = name.rpartition(".")
            if part != "weight_packed" and not (part == "weight" and info.dtype in ("I8", "F8_E4M3")):
                continue
            group = group_of(module, groups, ignored)
            if group is None:
                raise CheckpointError(
                    f"{name!r} is stored as {info.dtype}, but no config group of quantization_config has it as a "
                    "target: config.json and the weights belong to different models, or one is damaged."
                )
            weights[f"{module}.weight"] = _weight(source, module, info, group, tensors, reader)
            used |= {f"{module}.{one}" for one in PARTS}
    dense = {name: info for name, info in tensors.items() if name not in used}
    return QuantizedCheckpoint(source, "compressed-tensors", weights, dense)


def group_of(module: str, groups: tuple[ConfigGroup, ...], ignored: tuple[str, ...]) -> ConfigGroup | None:
    """The config group that has the module as a target. Names and patterns come before classes."""
    if any(_matches(module, pattern) for pattern in ignored):
        return None
    for group in groups:
        if any(_matches(module, target) for target in group.targets):
            return group
    return next((group for group in groups if "Linear" in group.targets), None)


def _matches(module: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return module == pattern


def _weight(
    source: str,
    module: str,
    stored: TensorInfo,
    group: ConfigGroup,
    tensors: Mapping[str, TensorInfo],
    reader: TensorReader,
) -> QuantizedTensor:
    arguments = group.weights
    name = f"{module}.weight"
    scales = tensors.get(f"{module}.weight_scale")
    if scales is None:
        raise missing(stored.name, f"{module}.weight_scale")
    if group.format == "mxfp4-pack-quantized":
        return mxfp4_weight(name, stored, scales)
    activation, parts = _activation(source, module, group.inputs, tensors)
    if stored.dtype == "F8_E4M3":
        found = fp8_weight(name, stored, arguments.block, tensors, activation)
        return QuantizedTensor(**{**vars(found), "parts": {**found.parts, **parts}})
    bits = arguments.bits
    if stored.name.endswith(".weight_packed"):
        shape, values = _packed(module, stored, bits, tensors, reader)
    else:
        shape, values = stored.shape, stored
    inputs, scale = shape[-1], scale_source(scales, shape)
    size = group_size_of(scales.name, inputs, scale.shape[-1], arguments.group_size)
    order = None
    index = tensors.get(f"{module}.weight_g_idx")
    if index is not None and size is not None:
        if index.shape != (inputs,):
            raise wrong_shape(index, (inputs,), f"the group index of {inputs} inputs")
        groups = raw_tensor(reader, index)
        order = None if (groups == -1).all() else order_of(index.name, groups, inputs // size, size)
    parts = {"values": values, "scale": scale, **parts}
    if not arguments.symmetric:
        parts["zero_point"] = _zero_point(module, shape, scale.shape, bits, stored, tensors)
    if order is not None and index is not None:
        parts["input_order"] = order_source(index.name, order)
        parts["values"] = _reordered(values, shape, order)
    dtype: Any = "int4" if bits == 4 else "int8"
    return QuantizedTensor(name, shape, dtype, size, exact_scale_dtype(scales), parts, activation, order)


def _packed(
    module: str, stored: TensorInfo, bits: int, tensors: Mapping[str, TensorInfo], reader: TensorReader
) -> tuple[tuple[int, ...], Source]:
    told = tensors.get(f"{module}.weight_shape")
    if told is None:
        raise missing(stored.name, f"{module}.weight_shape")
    out, inputs = (int(size) for size in raw_tensor(reader, told).reshape(-1))
    words = -(-inputs * bits // 32)
    if stored.shape != (out, words):
        raise wrong_shape(stored, (out, words), f"words of {32 // bits} numbers for a weight {(out, inputs)}")

    def values(reader: TensorReader, start: int, stop: int) -> Array:
        return signed(unpack(raw_rows(reader, stored, start, stop), bits)[:, :inputs], bits)

    return (out, inputs), DecodedTensor(stored.name, (out, inputs), INT8, values)


def _reordered(values: Source, shape: tuple[int, ...], order: Array) -> Source:
    def rows(reader: TensorReader, start: int, stop: int) -> Array:
        if isinstance(values, DecodedTensor):
            return values.rows(reader, start, stop)[:, order]
        return raw_rows(reader, values, start, stop)[:, order]

    return DecodedTensor(values.name, shape, INT8, rows)


def _zero_point(
    module: str,
    shape: tuple[int, ...],
    of_scales: tuple[int, ...],
    bits: int,
    stored: TensorInfo,
    tensors: Mapping[str, TensorInfo],
) -> Source:
    info = tensors.get(f"{module}.weight_zero_point")
    if info is None:
        raise missing(stored.name, f"{module}.weight_zero_point")
    each = 32 // bits
    out, groups = shape[0], of_scales[-1]
    if info.dtype == "I32":  # packed along the outputs
        if info.shape != (-(-out // each), groups):
            words = f"words of {each} zero points for scales {(out, groups)}"
            raise wrong_shape(info, (-(-out // each), groups), words)

        def packed(reader: TensorReader, start: int, stop: int) -> Array:
            first = start // each
            words = raw_rows(reader, info, first, -(-stop // each))
            found = signed(unpack(words.T, bits), bits).T
            return found[start - first * each : stop - first * each]

        return DecodedTensor(info.name, (out, groups), INT8, packed)
    if info.size != out * groups and info.size != 1:
        raise wrong_shape(info, (out, groups), f"zero points for scales {(out, groups)}")

    def rows(reader: TensorReader, start: int, stop: int) -> Array:
        found = raw_tensor(reader, info).astype(np.int8)
        found = found.reshape((1, 1) if found.size == 1 else (out, groups))
        return np.broadcast_to(found, (out, groups))[start:stop]

    return DecodedTensor(info.name, (out, groups), INT8, rows)


def _activation(
    source: str, module: str, arguments: InputArguments | None, tensors: Mapping[str, TensorInfo]
) -> tuple[ActivationFormat | None, dict[PartName, Source]]:
    """How the input of the module's product is quantized, and the static scale."""
    if arguments is None:
        return None, {}
    if not arguments.symmetric or arguments.bits != 8:
        raise UnsupportedError(
            f"{source} quantizes the inputs of {module!r} to {arguments.bits} bits with"
            f"{'out' if arguments.symmetric else ''} zero points, but inputs are quantized to 8 bits "
            "without: take another checkpoint."
        )
    if not arguments.coarse:
        return None, {}
    dtype: Any = "float8_e4m3fn" if arguments.floating else "int8"
    if arguments.dynamic:
        return ActivationFormat(dtype), {}
    info = tensors.get(f"{module}.input_scale")
    if info is None:
        raise missing(f"{module}.weight", f"{module}.input_scale")

    def one(reader: TensorReader, start: int, stop: int) -> Array:
        return checked_scales(info.name, floats(raw_tensor(reader, info), info.dtype)).reshape(1, -1)[:, :1]

    return ActivationFormat(dtype, static=True), {
        "input_scale": DecodedTensor(info.name, (1,), np.dtype(np.float32), one)
    }
