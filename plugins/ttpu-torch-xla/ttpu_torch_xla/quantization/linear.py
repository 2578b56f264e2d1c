"""A linear layer with weights in 4 or 8 bits, which takes the place of an `nn.Linear`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ttpu_torch_xla.quantization.config import QuantizationConfig
from ttpu_torch_xla.quantization.ops import quantized_linear
from ttpu_torch_xla.quantization.pack import (
    QuantizedWeight,
    check_shape,
    dequantize_weight,
    quantize_weight,
    quantized_shapes,
)


class QuantizedLinear(nn.Module):
    """y = x · wᵀ + bias with quantized weights, for inference and for training the layers before and beside it.

    Its state is the buffers `weight_q`, `scale`, `zero_point` (only when asymmetric) and `bias` (only where the layer
    had one); `QuantizedWeight` says their shapes. Casting the module leaves scales in float32. `weight` is computed
    from them when it is read, for code that looks at it.
    """

    weight_q: Tensor
    scale: Tensor
    zero_point: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        config: QuantizationConfig | None = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make a layer whose buffers are to be loaded. Until then weights and bias are 0.

        Args:
            in_features: number of inputs.
            out_features: number of outputs.
            bias: the layer has a bias.
            config: how to quantize; None is `QuantizationConfig()`.
            device: of the buffers.
            dtype: of the bias and the computed `weight`; None is torch's default dtype.

        Raises:
            RequestError: the configuration's blocks, or pairs of 4-bit weights, do not divide the inputs.
        """
        super().__init__()
        self.config = config or QuantizationConfig()
        self.in_features, self.out_features = in_features, out_features
        self.dtype = dtype or torch.get_default_dtype()
        packed, block_size = self.config.packed, self.config.block_size
        check_shape(in_features, self.config.bits, block_size, packed)
        of_weights, of_scales = quantized_shapes(in_features, out_features, block_size, packed)
        zero = 0x88 if packed else 0  # the byte of two zeros
        self.register_buffer(
            "weight_q", torch.full(of_weights, zero, dtype=torch.uint8 if packed else torch.int8, device=device)
        )
        self.register_buffer("scale", torch.ones(of_scales, device=device, dtype=torch.float32))
        self.register_buffer(
            "zero_point",
            None if self.config.symmetric else torch.zeros(of_scales, dtype=torch.int8, device=device),
        )
        self.register_buffer("bias", torch.zeros(out_features, device=device, dtype=self.dtype) if bias else None)

    @classmethod
    def from_linear(cls, linear: nn.Linear, config: QuantizationConfig) -> QuantizedLinear:
        """Quantize a layer's weights. For a layer on the meta device, the result is there too.

        Raises:
            RequestError: the configuration's blocks, or pairs of 4-bit weights, do not divide the inputs.
        """
        weight = linear.weight
        result = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            config,
            device="meta",
            dtype=weight.dtype,
        )
        result.train(linear.training)
        if weight.device.type != "meta":
            quantized = quantize_weight(weight, config.bits, config.block_size, config.symmetric, config.packed)
            result.weight_q, result.scale, result.zero_point = quantized
        if linear.bias is not None:
            result.bias = linear.bias.detach().clone()
        return result

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] → [..., out_features], in x's dtype."""
        result: Tensor = quantized_linear(
            x, self.weight_q, self.scale, self.zero_point, self.bias, self.config.quantize_activation
        )
        return result

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features] as the products see it, in the dtype that the layer had."""
        return dequantize_weight(QuantizedWeight(self.weight_q, self.scale, self.zero_point)).to(self.dtype)

    @property
    def dimensions(self) -> Mapping[str, tuple[str | None, ...]]:
        """Buffer → what each of its dimensions runs along: "in" (whole blocks, or bytes of two inputs), "out", or None.
        Sharding the weight's inputs or outputs shards these."""
        blockwise = self.config.block_size != -1
        of_scales = ("in", "out") if blockwise else ("out",)
        found: dict[str, tuple[str | None, ...]] = {
            "weight_q": ("in", None, "out") if blockwise else ("out", "in"),
            "scale": of_scales,
            "zero_point": of_scales,
            "bias": ("out",),
        }
        return {name: dims for name, dims in found.items() if getattr(self, name) is not None}

    def extra_repr(self) -> str:
        config = self.config
        blocks = "" if config.block_size == -1 else f", block_size={config.block_size}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{config.name}{blocks}{'' if config.symmetric else ', asymmetric'}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        """Moves and casts as a module does, but for the dtype of the scales: in bfloat16 they would add an error of up
        to 0.4 % to every weight."""
        exact = self.scale
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=exact.device)).dtype
        super()._apply(fn, recurse)
        if self.scale.dtype != torch.float32:
            self.scale = exact.to(self.scale.device)
        return self
