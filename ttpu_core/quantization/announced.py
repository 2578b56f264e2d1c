"""The formats that the config of a quantized checkpoint announces for its weights, for plans where no weights lie
beside the config. What only the files say is taken as it usually is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import gcd
from typing import Any

from ttpu_core.errors import UnsupportedError
from ttpu_core.quantization.schemes.compressed_tensors import config_groups, group_of
from ttpu_core.spec.kernel_format import ActivationFormat, KernelFormat

Announced = Callable[[str, tuple[int, ...]], KernelFormat | None]
"""module, shape of its weight [*lead, out, in] → its format, or None if it is not quantized."""

HEAD = "lm_head"


def announced(source: str, config: Mapping[str, Any], dtype: str) -> Announced:
    """The format of each module's weight by a `quantization_config`.

    Args:
        source: the config's name, for error messages.
        config: the `quantization_config`, of a scheme that is read.
        dtype: of the model's other weights.

    Raises:
        UnsupportedError: a variant that is not read, or a scheme whose config does not say which weights are quantized.
    """
    method = config["quant_method"]
    if method == "compressed-tensors":
        return _compressed_tensors(source, config, "bfloat16" if dtype == "bfloat16" else "float32")
    if method == "mxfp4":
        return _stacked_experts
    if method not in ("gptq", "awq", "fp8"):
        raise unannounced(source, method)
    size = config.get("group_size", config.get("q_group_size"))
    size = None if size in (None, -1) else int(size)
    skipped = tuple(config.get("modules_to_not_convert") or ())
    block = config.get("weight_block_size")

    def of_module(module: str, shape: tuple[int, ...]) -> KernelFormat | None:
        if any(name in module for name in skipped) or (module == HEAD and not config.get(HEAD)):
            return None
        inputs = shape[-1]
        if method == "fp8":
            groups = None if block is None or inputs <= block[1] else gcd(int(block[1]), inputs)
            return KernelFormat("float8_e4m3fn", groups)
        fitted = None if size == inputs else size
        if method == "awq":
            return KernelFormat("int4", fitted, config.get("zero_point", True) is False)
        ordered = bool(config.get("desc_act")) and fitted is not None
        bits = config.get("bits")
        return KernelFormat("int8" if bits == 8 else "int4", fitted, config.get("sym") is True, input_order=ordered)

    return of_module


def unannounced(source: str, method: str) -> UnsupportedError:
    """The error for a config that does not say which weights are quantized."""
    return UnsupportedError(
        f"{source} announces {method} weights, but which of them are quantized only the files say: pass the "
        "checkpoint's directory with its safetensors files."
    )


def _stacked_experts(module: str, shape: tuple[int, ...]) -> KernelFormat | None:
    """Of gpt-oss: its experts, which are in stacked tensors, and nothing else."""
    return KernelFormat("float4_e2m1fn", 32, scale_dtype="float8_e8m0fnu") if len(shape) == 3 else None


def _compressed_tensors(source: str, config: Mapping[str, Any], scale: str) -> Announced:
    groups, ignored = config_groups(source, config), tuple(config.get("ignore") or ())

    def of_module(module: str, shape: tuple[int, ...]) -> KernelFormat | None:
        group = group_of(module, groups, ignored)
        if group is None:
            return None
        weights, inputs = group["weights"], shape[-1]
        if group["format"] == "mxfp4-pack-quantized":
            return KernelFormat("float4_e2m1fn", 32, scale_dtype="float8_e8m0fnu")
        size = weights.get("group_size") if weights.get("strategy") == "group" else None
        if weights.get("strategy") == "block" and weights.get("block_structure"):
            size = gcd(int(weights["block_structure"][1]), inputs)
        size = None if size in (None, -1) or size >= inputs else int(size)
        ordered = size is not None and weights.get("actorder") in ("group", "dynamic", True)
        floating = weights.get("type") == "float"
        kind: Any = "float8_e4m3fn" if floating else "int8" if weights["num_bits"] == 8 else "int4"
        symmetric = floating or weights.get("symmetric") is not False
        return KernelFormat(kind, size, symmetric, scale, ordered, _activation(group.get("input_activations")))

    return of_module


def _activation(arguments: Mapping[str, Any] | None) -> ActivationFormat | None:
    if not arguments or arguments.get("strategy") in ("group", "tensor_group", "block"):
        return None
    kind: Any = "int8" if arguments.get("type", "int") == "int" else "float8_e4m3fn"
    return ActivationFormat(kind, static=not arguments.get("dynamic", True))
