"""Writes quantized matrices as compressed-tensors stores them: packed or 8-bit values with scales, and the entry
`quantization_config` of config.json. `compressed_tensors` itself is not needed; the tests compare with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ttpu_core.errors import UnsupportedError
from ttpu_core.quantization.config import QuantizationConfig
from ttpu_core.spec.kernel_format import KernelFormat, PartName
from ttpu_quantize.linears import Linear, pattern_of

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]
    Parts = Mapping[PartName, Array]

VERSION = "0.15.0"
"""The oldest release of compressed-tensors that transformers 5 reads with."""


def check_scheme(config: QuantizationConfig) -> None:
    """Refuse what this writer has no layout for.

    Raises:
        UnsupportedError: a format of weights, or of the cache.
    """
    if config.dtype == "mxfp4":
        raise UnsupportedError(
            "a checkpoint in mxfp4 was asked for, but int4, int8 and fp8 checkpoints are written: use w4a16-g32, or "
            "quantize while loading with quantization='mxfp4'."
        )
    if config.embeddings:
        raise UnsupportedError(
            "quantized embeddings were asked for, but compressed-tensors checkpoints quantize linear layers: leave it "
            "out, or quantize while loading."
        )
    if config.kv_cache is not None:
        raise UnsupportedError(
            "a quantized cache was asked for, but that is chosen when a model is served: leave kv_cache out."
        )


def pack(values: Array, bits: int, axis: int = 1) -> Array:
    """Pack signed integers into int32 words, the first in the lowest bits.

    Args:
        values: int8 [rows, columns], in the range of `bits` bits.
        bits: of a value; 4 or 8.
        axis: the axis along which neighbours share a word.
    """
    if axis == 0:
        return np.ascontiguousarray(pack(values.T, bits).T)
    per_word = 32 // bits
    rows, columns = values.shape
    words = -(-columns // per_word)
    unsigned = np.zeros((rows, words * per_word), np.uint32)
    unsigned[:, :columns] = values.astype(np.int32) + (1 << (bits - 1))
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
    packed: Array = np.bitwise_or.reduce(unsigned.reshape(rows, words, per_word) << shifts, axis=-1)
    return packed.view(np.int32)


def unpack(words: Array, bits: int, columns: int, axis: int = 1) -> Array:
    """The int8 values [rows, columns] of packed words; the inverse of `pack`. With axis 0, `columns` are rows."""
    if axis == 0:
        return np.ascontiguousarray(unpack(words.T, bits, columns).T)
    per_word = 32 // bits
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
    unsigned = (words.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    signed = unsigned.reshape(len(words), -1)[:, :columns].astype(np.int32) - (1 << (bits - 1))
    return signed.astype(np.int8)


def stored_tensors(linear: Linear, parts: Parts) -> dict[str, Array]:
    """The tensors of a quantized matrix by their names in the file.

    Args:
        linear: the matrix, [outputs, inputs].
        parts: as `ttpu_core.quantization.rounding.round_kernel` returns them, and perhaps `input_order`.
    """
    form, module = linear.form, linear.module
    outputs, inputs = linear.shape
    scale = parts["scale"].astype(_dtype(form.scale_dtype)).reshape(outputs, form.groups(inputs))
    tensors: dict[str, Array] = {f"{module}.weight_scale": scale}
    values = parts["values"]
    zero = parts.get("zero_point")
    order = parts.get("input_order")
    if order is not None:
        assert form.group_size is not None
        group_of = np.empty(inputs, np.int32)
        group_of[order] = np.arange(inputs, dtype=np.int32) // form.group_size
        tensors[f"{module}.weight_g_idx"] = group_of
        in_place = np.empty_like(values)
        in_place[:, order] = values
        values = in_place
    if is_packed(form):
        bits = bits_of(form)
        tensors[f"{module}.weight_packed"] = pack(values, bits)
        tensors[f"{module}.weight_shape"] = np.array(linear.shape, np.int64)
        if zero is not None:
            tensors[f"{module}.weight_zero_point"] = pack(zero.reshape(scale.shape), bits, axis=0)
    else:
        tensors[f"{module}.weight"] = values.astype(_dtype(form.dtype) if form.dtype != "int4" else np.int8)
        if zero is not None:
            tensors[f"{module}.weight_zero_point"] = zero.reshape(scale.shape)
    return tensors


def read_parts(linear: Linear, tensors: Mapping[str, Array]) -> dict[PartName, Array]:
    """The parts of a matrix from its tensors; the inverse of `stored_tensors`."""
    form, module = linear.form, linear.module
    outputs, inputs = linear.shape
    groups = form.groups(inputs)
    shape = (outputs, groups) if form.group_size is not None else (outputs,)
    zero = tensors.get(f"{module}.weight_zero_point")
    if is_packed(form):
        values = unpack(tensors[f"{module}.weight_packed"], bits_of(form), inputs)
        zero = None if zero is None else unpack(zero, bits_of(form), outputs, axis=0)
    else:
        values = tensors[f"{module}.weight"]
    scale = tensors[f"{module}.weight_scale"].astype(np.float32).reshape(shape)
    parts: dict[PartName, Array] = {"values": values, "scale": scale}
    if zero is not None:
        parts["zero_point"] = zero.reshape(shape)
    group_of = tensors.get(f"{module}.weight_g_idx")
    if group_of is not None:
        order = np.argsort(group_of, kind="stable").astype(np.int32)
        parts["values"], parts["input_order"] = values[:, order], order
    return parts


def quantization_config(linears: Iterable[Linear], ignored: Iterable[str]) -> dict[str, Any]:
    """The entry of config.json.

    Args:
        linears: everything that is quantized.
        ignored: names of the modules that have a matrix and are not.
    """
    modules: dict[KernelFormat, list[str]] = {}
    for linear in linears:
        modules.setdefault(linear.form, []).append(linear.module)
    usual = max(modules, key=lambda form: len(modules[form]))
    groups = {}
    for number, form in enumerate(sorted(modules, key=lambda form: form is usual)):  # readers take the first match
        others = [module for other in modules if other is not form for module in modules[other]]
        targets = ["Linear"] if form is usual else _targets(modules[form], others)
        groups[f"group_{number}"] = _group(form, targets)
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(_targets(ignored, [module for group in modules.values() for module in group])),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "version": VERSION,
    }


def is_packed(form: KernelFormat) -> bool:
    """Whether values share 32-bit words: integers whose product has an input that is not quantized."""
    return form.dtype.startswith("int") and form.activation is None


def bits_of(form: KernelFormat) -> int:
    """Bits of a value."""
    return 4 if form.dtype == "int4" else 8


def _targets(modules: Iterable[str], others: Iterable[str]) -> list[str]:
    """What names `modules` and none of `others`: a pattern for the modules of all layers, or the name itself where the
    pattern would match one of the others."""
    taken = {pattern_of(module) for module in others}
    found = [module if pattern_of(module) in taken else pattern_of(module) for module in modules]
    return list(dict.fromkeys(found))


def _group(form: KernelFormat, targets: list[str]) -> dict[str, Any]:
    weights: dict[str, Any] = {
        "num_bits": bits_of(form),
        "type": "int" if form.dtype.startswith("int") else "float",
        "symmetric": form.symmetric,
        "strategy": "channel" if form.group_size is None else "group",
        "group_size": form.group_size,
        "dynamic": False,
        "actorder": "group" if form.input_order else None,
    }
    inputs = None
    if form.activation is not None:
        inputs = {
            "num_bits": 8,
            "type": "int" if form.activation.dtype == "int8" else "float",
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        }
    packed = "pack-quantized" if is_packed(form) else None
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
        "format": packed or ("int-quantized" if form.dtype.startswith("int") else _float_format(form)),
    }


def _float_format(form: KernelFormat) -> str:
    return "float-quantized" if form.activation is not None else "naive-quantized"


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)
