"""Quantized checkpoints as others write them. In: a dense checkpoint; out: a folder in the scheme, and beside it a
dense one with the weights that the scheme's own definition (or library) makes of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

State = dict[str, torch.Tensor]
Quantize = Callable[[str, torch.Tensor], tuple[State, torch.Tensor]]
"""module, weight → its tensors in the file by their last name, and the weight that they stand for."""

Made = Callable[[Path, Path], tuple[Path, Path]]
"""dense checkpoint, folder → the quantized folder and the dense one of the same numbers."""

SKIPPED = ("lm_head", "embed_tokens", "norm", "mlp.gate.weight", "block_sparse_moe.gate")


def write(dense: Path, folder: Path, config: dict[str, Any], quantize: Quantize) -> tuple[Path, Path]:
    """Return the quantized folder and the dense one of the same numbers."""
    quantized, expected = folder / "quantized", folder / "expected"
    state, files, numbers = load_file(dense / "model.safetensors"), State(), State()
    for name, weight in state.items():
        if weight.ndim != 2 or any(one in name for one in SKIPPED):
            files[name] = numbers[name] = weight
            continue
        module = name.removesuffix(".weight")
        parts, numbers[name] = quantize(module, weight)
        files |= {f"{module}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    for target, tensors in ((quantized, files), (expected, numbers)):
        shutil.copytree(dense, target)
        save_file({name: one.clone() for name, one in tensors.items()}, target / "model.safetensors", {"format": "pt"})
    settings = json.loads((dense / "config.json").read_text()) | {"quantization_config": config}
    (quantized / "config.json").write_text(json.dumps(settings))
    return quantized, expected


# compressed-tensors, by its library


def compressed_tensors(
    dense: Path, folder: Path, weights: dict[str, Any], form: str, activation: dict[str, Any] | None = None, **more: Any
) -> tuple[Path, Path]:
    """Rounded by the library's own observer-free parameters, `weights` being its `QuantizationArgs`."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    arguments = QuantizationArgs(**weights)
    inputs = None if activation is None else QuantizationArgs(**activation)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments, input_activations=inputs)
    library = BaseCompressor.get_value_from_registry(form)
    order = more.get("order")

    def quantize(module: str, weight: torch.Tensor) -> tuple[State, torch.Tensor]:
        grouped, index = weight, None
        if order is not None:
            index = torch.tensor(order(weight.shape[1]), dtype=torch.int32)
            grouped = weight[:, torch.argsort(index, stable=True)]
        if arguments.strategy == "group":
            grouped = grouped.reshape(len(weight), -1, arguments.group_size)
        if arguments.strategy == "block":
            high, wide = arguments.block_structure
            grouped = weight.reshape(len(weight) // high, high, -1, wide).transpose(1, 2).flatten(2)
        tensor = arguments.strategy == "tensor"
        low = weight.min().reshape(1) if tensor else grouped.amin(-1, keepdim=grouped.ndim == 2)
        high_ = weight.max().reshape(1) if tensor else grouped.amax(-1, keepdim=grouped.ndim == 2)
        scale, zero = calculate_qparams(low, high_, arguments)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        if index is not None:
            state["weight_g_idx"] = index
        parts = library.compress(state, scheme)
        whole = library.decompress(parts, scheme)["weight"]
        if inputs is not None and not inputs.dynamic:
            parts["input_scale"] = torch.tensor([0.05])
        return parts, whole.to(torch.float32)

    group = {"targets": ["Linear"], "weights": arguments.model_dump(mode="json"), "input_activations": activation}
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*gate$"],
        "quantization_status": "compressed",
    }
    return write(dense, folder, config, quantize)


# GPTQ and AWQ, by the definition of their files


def _rounded(weight: torch.Tensor, groups: np.ndarray, bits: int, symmetric: bool) -> tuple[Any, Any, Any]:
    """Unsigned numbers [out, in], zero points and float16 scales [groups, out]; `groups` [in] is each input's."""
    array, top = weight.numpy(), 2**bits - 1
    zeros, scales = [], []
    numbers = np.empty(array.shape, np.int64)
    for group in range(groups.max() + 1):
        part = array[:, groups == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if symmetric:
            high = np.maximum(-low, high)
            low = -high
        scale = ((high - low) / top).astype(np.float16).astype(np.float32)
        zero = np.full(len(scale), (top + 1) // 2) if symmetric else np.clip(np.round(-low / scale), 1, top).astype(int)
        numbers[:, groups == group] = np.clip(np.round(part / scale[:, None]) + zero[:, None], 0, top)
        zeros.append(zero)
        scales.append(scale)
    return numbers, np.stack(zeros), np.stack(scales)


def _words(numbers: np.ndarray, bits: int) -> torch.Tensor:
    """Words of 32 bits along the first dimension, lowest bits first."""
    each = 32 // bits
    by_word = numbers.reshape(-1, each, numbers.shape[1]).astype(np.uint64)
    words = (by_word << (np.arange(each, dtype=np.uint64) * np.uint64(bits))[None, :, None]).sum(1)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def gptq(
    dense: Path, folder: Path, *, bits: int = 4, size: int = 16, symmetric: bool, version: str, desc_act: bool
) -> tuple[Path, Path]:
    def quantize(module: str, weight: torch.Tensor) -> tuple[State, torch.Tensor]:
        inputs = weight.shape[1]
        index = np.arange(inputs) // size
        if desc_act:
            index = np.random.default_rng(inputs).permutation(index)
        numbers, zeros, scales = _rounded(weight, index, bits, symmetric)
        stored = zeros - (1 if version == "gptq" else 0)
        parts = {
            "qweight": _words(numbers.T, bits),
            "qzeros": _words(stored.T, bits).T,
            "scales": torch.from_numpy(scales).half(),
            "g_idx": torch.from_numpy(index.astype(np.int32)),
        }
        whole = (numbers - zeros.T[:, index]) * scales.T[:, index]
        return parts, torch.from_numpy(whole.astype(np.float32))

    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": desc_act, "sym": symmetric}
    return write(dense, folder, config | {"checkpoint_format": version}, quantize)


def awq(dense: Path, folder: Path, *, size: int = 16) -> tuple[Path, Path]:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def words(numbers: np.ndarray) -> torch.Tensor:
        """[rows, columns] → [rows, columns / 8] in the order of the gemm kernel."""
        by_word = numbers.reshape(len(numbers), -1, 8)[..., order]
        return _words(by_word.reshape(-1, 8).T, 4).reshape(len(numbers), -1)

    def quantize(module: str, weight: torch.Tensor) -> tuple[State, torch.Tensor]:
        index = np.arange(weight.shape[1]) // size
        numbers, zeros, scales = _rounded(weight, index, 4, False)
        parts = {"qweight": words(numbers.T), "qzeros": words(zeros), "scales": torch.from_numpy(scales).half()}
        whole = (numbers - zeros.T[:, index]) * scales.T[:, index]
        return parts, torch.from_numpy(whole.astype(np.float32))

    config = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
    return write(dense, folder, config, quantize)


def fine_grained_fp8(dense: Path, folder: Path, block: int = 32) -> tuple[Path, Path]:
    def quantize(module: str, weight: torch.Tensor) -> tuple[State, torch.Tensor]:
        out, inputs = weight.shape
        high, wide = -(-out // block), -(-inputs // block)
        padded = torch.zeros(high * block, wide * block)
        padded[:out, :inputs] = weight
        scale = padded.reshape(high, block, wide, block).abs().amax((1, 3)) / 448
        spread = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[:out, :inputs]
        values = (weight / spread).to(torch.float8_e4m3fn)
        return {"weight": values, "weight_scale_inv": scale}, values.float() * spread

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block, block]}
    return write(dense, folder, config, quantize)


def shuffled(inputs: int) -> np.ndarray:
    return np.random.default_rng(inputs).permutation(np.arange(inputs) // 16)


# the schemes of the tests

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}

SCHEMES: dict[str, Made] = {
    "int8 per channel": lambda dense, folder: compressed_tensors(
        dense, folder, {"num_bits": 8, "type": "int", "strategy": "channel"}, "int-quantized"
    ),
    "int8 packed": lambda dense, folder: compressed_tensors(
        dense, folder, {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}, "pack-quantized"
    ),
    "int4 groups": lambda dense, folder: compressed_tensors(dense, folder, INT4, "pack-quantized"),
    "int4 groups asymmetric": lambda dense, folder: compressed_tensors(
        dense, folder, INT4 | {"symmetric": False}, "pack-quantized"
    ),
    "int4 activation order": lambda dense, folder: compressed_tensors(
        dense, folder, INT4 | {"actorder": "group"}, "pack-quantized", order=shuffled
    ),
    "fp8 per channel": lambda dense, folder: compressed_tensors(
        dense, folder, {"num_bits": 8, "type": "float", "strategy": "channel"}, "float-quantized"
    ),
    "fp8 per tensor": lambda dense, folder: compressed_tensors(
        dense, folder, {"num_bits": 8, "type": "float", "strategy": "tensor"}, "float-quantized"
    ),
    "fp8 blocks": lambda dense, folder: compressed_tensors(
        dense, folder, {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 16]},
        "float-quantized",
    ),
    "gptq": lambda dense, folder: gptq(dense, folder, symmetric=True, version="gptq", desc_act=False),
    "gptq asymmetric, activation order": lambda dense, folder: gptq(
        dense, folder, symmetric=False, version="gptq", desc_act=True
    ),
    "gptq v2, 8 bits": lambda dense, folder: gptq(
        dense, folder, bits=8, symmetric=False, version="gptq_v2", desc_act=False
    ),
    "awq": lambda dense, folder: awq(dense, folder),
    "fine-grained fp8": lambda dense, folder: fine_grained_fp8(dense, folder),
}  # fmt: skip
