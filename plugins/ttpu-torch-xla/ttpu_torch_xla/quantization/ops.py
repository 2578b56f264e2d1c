"""Products with quantized weights as torch operations, `torch.ops.ttpu.quantized_linear` and its gradient. They run on
any torch device, a lazy runtime records them, and `torch.compile` sees one node each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ttpu_core.spec.kernel_format import LARGEST
from ttpu_torch_xla.bridge import target
from ttpu_torch_xla.quantization.pack import QuantizedWeight, half_run, nibbles
from ttpu_torch_xla.runtime import current, is_device


@torch.library.custom_op("ttpu::quantized_linear", mutates_args=())
def quantized_linear(
    x: Tensor,
    weight_q: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    bias: Tensor | None = None,
    quantize_activation: bool = False,
    input_step: Tensor | None = None,
    float_activation: bool = False,
) -> Tensor:
    """y = x · wᵀ + bias with w = scale · (q - zero_point).

    With one scale s per output channel, s and zero point z are applied to sums, y = s · (Σ x q - z Σ x): the product is
    of x and of q converted to its dtype, which is exact. With int8 activations x ≈ t · p, a step t per token and
    p = round(x / t) (arXiv 2208.07339, section 2.1), y = s · t · (Σ p q - z Σ p), of int8 by int8 summed in int32.

    With scales for blocks, weights are dequantized to x's dtype within the product, also where p takes x's place: int8
    sums would be needed for each block and row, which costs a TPU more than multiplying int8 fast gains. Numbers of 8
    bits with a point, weights or tokens, are converted to x's dtype, which is exact, and multiplied so.

    Sums are float32 or int32, and one rounding to x's dtype comes last.

    Args:
        x: [..., in], float32, bfloat16 or float16.
        weight_q, scale, zero_point: a `QuantizedWeight`.
        bias: [out], or None.
        quantize_activation: round x to 8 bits, with a step for each token.
        input_step: float32 [], the step of all tokens in place of their own; what is beyond its range becomes the
            largest number.
        float_activation: round to float8_e4m3fn and not to int8.

    Returns:
        [..., out] in x's dtype. Its gradient reaches x, and bias; rounding tokens counts as the identity
        (straight-through, arXiv 1308.3432).
    """
    given, step = quantize_tokens(x, input_step, float_activation) if quantize_activation else (x, None)
    blockwise = weight_q.ndim == 3
    if blockwise or float_activation or weight_q.dtype == torch.float8_e4m3fn:
        given = given.to(x.dtype)
    matrices = _matrices(QuantizedWeight(weight_q, scale, zero_point), given.dtype)
    contracted = (0, 1) if blockwise else (1,)
    y = _total([_dot(part, w, contracted) for part, w in zip(_inputs(given, weight_q), matrices, strict=True)])
    if not blockwise:
        if zero_point is not None:
            y = y - _sum(given) * zero_point.to(torch.float32)
        y = y * scale
    if step is not None:
        y = y * step
    if bias is not None:
        y = y + bias
    return y.to(x.dtype)


@torch.library.custom_op("ttpu::quantized_linear_gradient", mutates_args=())
def quantized_linear_gradient(
    gradient: Tensor, weight_q: Tensor, scale: Tensor, zero_point: Tensor | None = None
) -> Tensor:
    """gradient · w, the gradient of x. gradient: [..., out]; returns [..., in] in its dtype."""
    blockwise = weight_q.ndim == 3
    given = gradient if blockwise else (gradient.to(torch.float32) * scale).to(gradient.dtype)
    matrices = _matrices(QuantizedWeight(weight_q, scale, zero_point), gradient.dtype)
    parts = [_dot(given, w, (2,) if blockwise else (0,)) for w in matrices]
    if weight_q.dtype == torch.uint8:
        half = _half(weight_q)
        result = torch.stack([part if blockwise else part.unflatten(-1, (-1, half)) for part in parts], -2).flatten(-3)
    else:
        result = parts[0].flatten(-2) if blockwise else parts[0]
    if zero_point is not None and not blockwise:
        result = result - (given.to(torch.float32) * zero_point).sum(-1, keepdim=True)
    return result.to(gradient.dtype)


def quantize_tokens(x: Tensor, step: Tensor | None = None, floats: bool = False) -> tuple[Tensor, Tensor]:
    """x [..., in] ≈ step · values. Returns int8 from -127 to 127, or float8_e4m3fn, in the shape of x, and the step:
    the given one, or float32 [..., 1], which makes the largest feature of each token the largest number."""
    x, largest = x.to(torch.float32), LARGEST["float8_e4m3fn" if floats else "int8"]
    if step is None:
        top = x.abs().amax(-1, keepdim=True)
        step = torch.where(top > 0, top / largest, 1.0)
    values = (x / step).clamp(-largest, largest)
    return _to_float8(values) if floats else values.round().to(torch.int8), step


def _to_float8(x: Tensor) -> Tensor:
    """float32 within the range, to its nearest float8_e4m3fn, the even one of two. XLA of torch_xla 2.9 converts by way
    of another dtype, and so rounds twice: 5.2507 to 5 and not to 5.5."""
    distance = torch.full_like(x, 2.0**-9)  # of neighbouring numbers, those below 2^-5
    for exponent in range(-5, 9):
        distance = torch.where(x.abs() >= 2.0**exponent, 2.0 ** (exponent - 3), distance)
    return ((x / distance).round() * distance).to(torch.float8_e4m3fn)


def _matrices(weight: QuantizedWeight, dtype: torch.dtype) -> list[Tensor]:
    """What is multiplied: [out, in] without scales, or [blocks, block_size, out] with them; of packed weights two with
    half of the inputs each, because joining the halves would write the matrix out.

    XLA computes them within the product for a TPU. Blocks stay a dimension of their own for that: merged with the one
    beside it, the matrix is written out, at a seventh of the speed for 8 rows."""
    weight_q, scale, zero = weight
    parts = nibbles(weight_q) if weight_q.dtype == torch.uint8 else (weight_q,)
    if weight_q.ndim == 2:
        return [part.to(dtype) for part in parts]
    steps = [part.to(torch.float32) for part in parts]
    if zero is not None:
        steps = [part - zero.to(torch.float32).unsqueeze(1) for part in steps]
    return [(part * scale.unsqueeze(1)).to(dtype) for part in steps]


def _inputs(x: Tensor, weight_q: Tensor) -> list[Tensor]:
    """The parts of x [..., in] that meet the matrices: [..., n], or [..., blocks, n].

    Copies and not views, because torch_xla reads a view that does not start at the beginning, here where torch is done
    with views, by a gather with an index for each number."""
    blockwise, packed = weight_q.ndim == 3, weight_q.dtype == torch.uint8
    if not packed:
        return [x.unflatten(-1, (weight_q.shape[0], -1)) if blockwise else x]
    pairs = x.unflatten(-1, (-1, 2, _half(weight_q)))
    halves = [torch.select_copy(pairs, -2, which) for which in (0, 1)]
    return [part if blockwise else part.flatten(-2) for part in halves]


def _half(packed: Tensor) -> int:
    """How far apart the inputs of a byte are."""
    return packed.shape[1] if packed.ndim == 3 else half_run(2 * packed.shape[1])


def _total(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _sum(x: Tensor) -> Tensor:
    """float32 [..., 1], exact for int8."""
    return x.sum(-1, keepdim=True, dtype=torch.int32 if x.dtype == torch.int8 else torch.float32).to(torch.float32)


def _dot(x: Tensor, w: Tensor, contracted: tuple[int, ...]) -> Tensor:
    """float32: the product of x and w along the last dimensions of x and these of w, summed in float32, or in int32
    where both are int8.

    On the device the runtime multiplies, which lets the dtype of sums be named. A CPU multiplies float32: XLA on one
    with units for bfloat16 keeps products of that dtype, but cannot sum them in float32. The host sums in float64 what
    int32 would hold, which is as exact."""
    dimensions = list(range(x.ndim - len(contracted), x.ndim)), list(contracted)
    whole = x.dtype == torch.int8
    if is_device(x):
        if not whole and target().platform == "cpu":
            x, w = x.to(torch.float32), w.to(torch.float32)
        return current().dot(x, w, dimensions, torch.int32 if whole else torch.float32).to(torch.float32)
    exact = torch.float64 if whole else torch.float32
    return torch.tensordot(x.to(exact), w.to(exact), dims=dimensions).to(torch.float32)


@quantized_linear.register_fake
def _(
    x: Tensor,
    weight_q: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    bias: Tensor | None = None,
    quantize_activation: bool = False,
    input_step: Tensor | None = None,
    float_activation: bool = False,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], scale.shape[-1]))


@quantized_linear_gradient.register_fake
def _(gradient: Tensor, weight_q: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    per_byte = 2 if weight_q.dtype == torch.uint8 else 1
    inputs = weight_q.shape[1] if weight_q.ndim == 2 else weight_q.shape[0] * weight_q.shape[1]
    return gradient.new_empty((*gradient.shape[:-1], per_byte * inputs))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, weight_q, scale, zero_point, bias, *_ = inputs
    ctx.save_for_backward(weight_q, scale, zero_point)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    weight_q, scale, zero_point = ctx.saved_tensors
    of_x = quantized_linear_gradient(gradient, weight_q, scale, zero_point) if ctx.needs_input_grad[0] else None
    of_bias = None
    if any(ctx.needs_input_grad[4:5]):  # torch leaves out trailing arguments that have their defaults
        of_bias = gradient.flatten(0, -2).sum(0, dtype=torch.float32).to(ctx.bias_dtype)
    return of_x, None, None, None, of_bias, None, None, None


quantized_linear.register_autograd(_gradient, setup_context=_keep)
