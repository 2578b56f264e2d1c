"""The formats that the config of a quantized checkpoint announces for its weights, for plans where no weights lie
beside the config. What only the files say is taken as it usually is."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any

from ttpu_core.config import ModelConfig
from ttpu_core.errors import UnsupportedError
from ttpu_core.quantization.schemes.awq import refuse_layout
from ttpu_core.quantization.schemes.compressed_tensors import group_of
from ttpu_core.quantization.schemes.config_groups import InputArguments, config_groups
from ttpu_core.quantization.schemes.gptq import gptq_bits
from ttpu_core.quantization.schemes.section import (
    BLOCK,
    block,
    first_present,
    group_size_of_config,
    names_of,
    patterns_of,
)
from ttpu_core.spec.kernel_format import ActivationFormat, KernelFormat

Announced = Callable[[str, tuple[int, ...]], KernelFormat | None]
"""module, shape of its weight [*lead, out, in] → its format, or None if it is not quantized."""

HEAD = "lm_head"


def announced(source: str, config: ModelConfig, dtype: str) -> Announced:
    """The format of each module's weight by a `quantization_config`.

    Args:
        source: the config's name, for error messages.
        config: the `quantization_config`, of a scheme that is read.
        dtype: of the model's other weights.

    Raises:
        ConfigError: a key of `config` has a value of another kind.
        UnsupportedError: a variant that is not read, or a scheme whose config does not say which weights are quantized.
    """
    method = config.text("quant_method")
    if method == "compressed-tensors":
        return _compressed_tensors(source, config, "bfloat16" if dtype == "bfloat16" else "float32")
    if method == "mxfp4":
        return _stacked_experts
    if method not in ("gptq", "awq", "fp8"):
        raise unannounced(source, method)
    size = group_size_of_config(config, first_present(config, "group_size", "q_group_size"))
    skipped = names_of(config, "modules_to_not_convert")
    blocks = config.converted("weight_block_size", BLOCK, block, None)
    has_head = config.flag(HEAD, default=False)
    bits = gptq_bits(source, config) if method == "gptq" else 4
    if method == "awq":
        refuse_layout(source, config)

    def of_module(module: str, shape: tuple[int, ...]) -> KernelFormat | None:
        if any(name in module for name in skipped) or (module == HEAD and not has_head):
            return None
        inputs = shape[-1]
        if method == "fp8":
            groups = None if blocks is None or inputs <= blocks[1] else gcd(blocks[1], inputs)
            return KernelFormat("float8_e4m3fn", groups)
        fitted = None if size == inputs else size
        if method == "awq":
            return KernelFormat("int4", fitted, not config.flag("zero_point", default=True))
        ordered = config.flag("desc_act", default=False) and fitted is not None
        symmetric = config.flag("sym", default=False)
        return KernelFormat("int8" if bits == 8 else "int4", fitted, symmetric, input_order=ordered)

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


def _compressed_tensors(source: str, config: ModelConfig, scale: str) -> Announced:
    groups, ignored = config_groups(source, config), patterns_of(config, "ignore")

    def of_module(module: str, shape: tuple[int, ...]) -> KernelFormat | None:
        group = group_of(module, groups, ignored)
        if group is None:
            return None
        weights, inputs = group.weights, shape[-1]
        if group.format == "mxfp4-pack-quantized":
            return KernelFormat("float4_e2m1fn", 32, scale_dtype="float8_e8m0fnu")
        size = weights.group_size if weights.block is None else gcd(weights.block[1], inputs)
        size = None if size is None or size >= inputs else size
        ordered = size is not None and weights.ordered
        kind: Any = "float8_e4m3fn" if weights.floating else "int8" if weights.bits == 8 else "int4"
        symmetric = weights.floating or weights.symmetric
        return KernelFormat(kind, size, symmetric, scale, ordered, _activation(group.inputs))

    return of_module


def _activation(arguments: InputArguments | None) -> ActivationFormat | None:
    if arguments is None or not arguments.coarse:
        return None
    return ActivationFormat("float8_e4m3fn" if arguments.floating else "int8", static=not arguments.dynamic)
