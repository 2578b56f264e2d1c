"""Quantizes a weight matrix to integers of 4 or 8 bits and back. A `QuantizedWeight` has integers, scales and zero
points in a layout that a matrix product reads without moving data."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ttpu_core.errors import RequestError
from ttpu_core.spec.kernel_format import LARGEST, KernelFormat

LANES = 128
"""Numbers that lie side by side in a TPU's vector register: halves of this length unpack without a shuffle."""


class QuantizedWeight(NamedTuple):
    """A matrix w[out, in] ≈ scale · (q - zero_point), with q in [-128, 127] or [-8, 7] (arXiv 1712.05877, section 2.1),
    or a float8_e4m3fn, without zero points.

    One scale per output channel (block_size -1):
        weight_q: int8 or float8_e4m3fn [out, in], or two to a byte uint8 [out, in / 2].
        scale: float32 [out]; zero_point: int8 [out], or None for symmetric.
    One scale per block of inputs and output channel:
        weight_q: int8 or float8_e4m3fn [in / block_size, block_size, out], or uint8
            [in / block_size, block_size / 2, out].
        scale: float32 [in / block_size, out]; zero_point: int8 [in / block_size, out], or None.

    Blocks are a dimension of their own, inputs before outputs, because XLA dequantizes that within the product for a
    TPU; other layouts make it write the matrix out. A byte holds q + 8 of two inputs, the low half first, `half_run`
    inputs apart (half a block with blocks): a shard of weight_q along its inputs holds the same inputs.
    """

    weight_q: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None


def quantize_weight(
    weight: torch.Tensor,
    bits: int = 8,
    block_size: int = -1,
    symmetric: bool = True,
    packed: bool = True,
    split: int | None = None,
    floats: bool = False,
) -> QuantizedWeight:
    """Round to the nearest step: errors are at most half a step, of which there are 2^bits - 1 from the smallest
    weight (or 0) to the largest (or 0); symmetric, 2^(bits-1) - 1 from 0 to the largest magnitude.

    Args:
        weight: [out, in], any float.
        bits: 4 or 8.
        block_size: inputs that share a scale; -1 for all.
        symmetric: zero points are 0. Else zero lies on a step all the same (arXiv 1712.05877): weights of 0 stay 0.
        packed: two weights of 4 bits to a byte.
        split: inputs of the blocks of the result, a divisor of `block_size`: several then have the same scale.
        floats: round to float8_e4m3fn, symmetric, with 448 for the largest magnitude.

    Raises:
        ValueError: blocks do not divide the inputs.
    """
    if block_size != -1 and weight.shape[1] % block_size:
        raise ValueError(f"blocks of {block_size} do not divide {weight.shape[1]} inputs")
    w = weight.detach().to(torch.float32)
    along = 1
    if block_size != -1:
        w = w.t().reshape(weight.shape[1] // block_size, block_size, weight.shape[0])
    low, high = -(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1
    if floats:
        high = LARGEST["float8_e4m3fn"]
        scale = _positive(w.abs().amax(along, keepdim=True) / high)
        q, zero = (w / scale).clamp(-high, high), None
    elif symmetric:
        scale = _positive(w.abs().amax(along, keepdim=True) / high)
        q, zero = (w / scale).round().clamp(-high, high), None
    else:
        smallest = w.amin(along, keepdim=True).clamp(max=0)
        scale = _positive((w.amax(along, keepdim=True).clamp(min=0) - smallest) / (high - low))
        zero = (low - smallest / scale).round().clamp(low, high)
        q = ((w / scale).round() + zero).clamp(low, high)
    if split is not None and split != block_size:
        q = q.flatten(0, 1).unflatten(0, (-1, split))
        scale = scale.repeat_interleave(block_size // split, 0)
        zero = None if zero is None else zero.repeat_interleave(block_size // split, 0)
    whole = q.to(torch.float8_e4m3fn if floats else torch.int8)
    return QuantizedWeight(
        pack(whole, half_of(whole)).contiguous() if bits == 4 and packed else whole.contiguous(),
        scale.squeeze(along).contiguous(),
        None if zero is None else zero.squeeze(along).to(torch.int8).contiguous(),
    )


def dequantize_weight(weight: QuantizedWeight) -> torch.Tensor:
    """Return the weight as float32 [out, in]."""
    weight_q, scale, zero = weight
    q = unpack(weight_q) if weight_q.dtype == torch.uint8 else weight_q
    steps = q.to(torch.float32) if zero is None else q.to(torch.float32) - zero.to(torch.float32).unsqueeze(1)
    w = steps * scale.unsqueeze(1)
    return w if w.ndim == 2 else w.flatten(0, 1).t()


def quantized_shapes(
    in_features: int, out_features: int, block_size: int, packed: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of weight_q and of the scales."""
    per_byte = 2 if packed else 1
    if block_size == -1:
        return (out_features, in_features // per_byte), (out_features,)
    blocks = in_features // block_size
    return (blocks, block_size // per_byte, out_features), (blocks, out_features)


def check_pairs(form: KernelFormat, in_features: int, packed: bool, name: str) -> None:
    """Check that the inputs of a layer can be divided into pairs of 4-bit weights.

    Raises:
        RequestError: they cannot.
    """
    size = form.group_size or in_features
    if form.dtype == "int4" and packed and size % 2:
        raise RequestError(
            f"4 bits were asked for, two weights to a byte, but {name} has {in_features} inputs in blocks of {size}: "
            "pass pack_4bit=False, or name the layer in exclude_layers."
        )


def laid_out(values: torch.Tensor, block_size: int, packed: bool) -> torch.Tensor:
    """Return `values` [out, in] in the layout of `QuantizedWeight.weight_q`, which says its shapes:
    [out, in], or [in / block_size, block_size, out]."""
    if block_size != -1:
        values = values.t().unflatten(0, (-1, block_size))
    return pack(values, half_of(values)).contiguous() if packed else values.contiguous()


def half_run(in_features: int) -> int:
    """Return the distance between the two inputs that share a byte, in a weight without blocks: 128 where twice that
    divides the inputs, else the largest power of two for which this holds."""
    half = LANES
    while in_features % (2 * half):
        half //= 2
    return half


def half_of(q: torch.Tensor) -> int:
    """Return the distance between the two inputs that share a byte, for q [out, in] or [in / block_size, block_size,
    out]."""
    return half_run(q.shape[1]) if q.ndim == 2 else q.shape[1] // 2


def pack(q: torch.Tensor, half: int) -> torch.Tensor:
    """Pack q, int8 [a, n, ...] with values from -8 to 7, two to a byte, as uint8 [a, n / 2, ...].

    Of each 2 · half values along n, the first half are in the low four bits.
    """
    low, high = (q + 8).to(torch.uint8).unflatten(1, (-1, 2, half)).unbind(2)
    return (low | (high << 4)).flatten(1, 2)


def nibbles(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the low and the high four bits of packed, uint8 of any shape, as two int8 tensors of the same shape with
    values from -8 to 7.

    The shift is of unsigned bytes, because torch_xla turns `>>` into a division, which rounds negative numbers towards
    zero.
    """
    return (packed & 15).to(torch.int8) - 8, (packed >> 4).to(torch.int8) - 8


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Unpack packed, uint8 [out, in / 2] or [in / block_size, block_size / 2, out], to int8 [out, in] or [in /
    block_size, block_size, out]."""
    half = half_run(2 * packed.shape[1]) if packed.ndim == 2 else packed.shape[1]
    parts = [part.unflatten(1, (-1, half)) for part in nibbles(packed)]
    return torch.stack(parts, 2).flatten(1, 3)


def _positive(scale: torch.Tensor) -> torch.Tensor:
    """1 for a channel of zeros, which any scale represents."""
    return torch.where(scale > 0, scale, 1.0)
