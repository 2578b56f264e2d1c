"""A linear layer with weights in 4 or 8 bits, which takes the place of an `nn.Linear`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from ttpu_core.quantization.quantize import fitting
from ttpu_core.quantization.report import format_words
from ttpu_core.spec.kernel_format import KernelFormat, PartName
from ttpu_torch_xla.quantization.config import QuantizationConfig
from ttpu_torch_xla.quantization.ops import quantized_linear
from ttpu_torch_xla.quantization.pack import (
    QuantizedWeight,
    check_pairs,
    dequantize_weight,
    laid_out,
    quantize_weight,
    quantized_shapes,
)

STORED = {"int8": torch.int8, "int4": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}
"""The torch dtype of unpacked weights by the dtype of a format: those formats that this layer holds."""


def format_for(in_features: int, config: QuantizationConfig, name: str = "a linear layer") -> KernelFormat:
    """The format of a layer that is quantized as the configuration says, with groups that divide its inputs.

    Raises:
        RequestError: there are none, or pairs of 4-bit weights do not divide them.
    """
    form = fitting(config.kernel_format, in_features, name)
    check_pairs(form, in_features, config.packed, name)
    return form


def split_blocks(form: KernelFormat, inputs: int, devices: int) -> KernelFormat:
    """The format with blocks that are parts of its own, so that each of the devices which share the inputs has whole
    ones; unchanged where there are none, or only ones that pairs of 4-bit weights do not divide."""
    if form.group_size is None or inputs % devices:
        return form
    size = gcd(form.group_size, inputs // devices)
    return form if size < 2 or (form.dtype == "int4" and size % 2) else replace(form, group_size=size)


class QuantizedLinear(nn.Module):
    """y = x · wᵀ + bias with quantized weights, for inference and for training the layers before and beside it.

    Its state is the buffers `weight_q`, `scale`, and, where the format has them, `zero_point`, `input_order` (int32
    [in], the input of each column of the weights), `input_step` (float32 [], the static step of the inputs) and `bias`;
    `QuantizedWeight` says the shapes of the first three. Casting the module leaves weights and scales as they are.
    `weight` is computed from them when it is read, for code that looks at it.

    Attributes:
        format: of the weights.
        packed: two weights of 4 bits share a byte.
    """

    weight_q: Tensor
    scale: Tensor
    zero_point: Tensor | None
    input_order: Tensor | None
    input_step: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        config: QuantizationConfig | KernelFormat | None = None,
        *,
        packed: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make a layer whose buffers are to be loaded. Until then weights and bias are 0.

        Args:
            in_features: number of inputs.
            out_features: number of outputs.
            bias: the layer has a bias.
            config: how to quantize, or a format; None is `QuantizationConfig()`.
            packed: of a format of 4 bits, two weights share a byte wherever blocks have an even number of inputs.
            device: of the buffers.
            dtype: of the bias and the computed `weight`; None is torch's default dtype.

        Raises:
            RequestError: no blocks suit the inputs, or pairs of 4-bit weights do not divide them.
        """
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.dtype = dtype or torch.get_default_dtype()
        if isinstance(config, KernelFormat):
            self.format = config
            self.packed = packed and config.dtype == "int4" and (config.group_size or in_features) % 2 == 0
        else:
            settings = config or QuantizationConfig()
            self.format, self.packed = format_for(in_features, settings), settings.packed
        of_weights, of_scales = quantized_shapes(in_features, out_features, self.block_size, self.packed)
        stored = torch.uint8 if self.packed else STORED[self.format.dtype]
        weights = torch.zeros(of_weights, dtype=stored, device=device)
        self.register_buffer("weight_q", weights.fill_(0x88) if self.packed else weights)  # the byte of two zeros
        self.register_buffer("scale", torch.ones(of_scales, device=device, dtype=torch.float32))
        self.register_buffer(
            "zero_point",
            None if self.format.symmetric else torch.zeros(of_scales, dtype=torch.int8, device=device),
        )
        order = torch.arange(in_features, dtype=torch.int32, device=device) if self.format.input_order else None
        self.register_buffer("input_order", order)
        activation = self.format.activation
        static = activation is not None and activation.static
        self.register_buffer("input_step", torch.ones((), device=device, dtype=torch.float32) if static else None)
        self.register_buffer("bias", torch.zeros(out_features, device=device, dtype=self.dtype) if bias else None)

    @classmethod
    def from_linear(cls, linear: nn.Linear, config: QuantizationConfig, devices: int = 1) -> QuantizedLinear:
        """Quantize a layer's weights. For a layer on the meta device, the result is there too.

        Args:
            linear: the layer.
            config: how to quantize.
            devices: number of devices that will share the inputs; blocks are split so that each has whole ones.

        Raises:
            RequestError: no blocks suit the inputs, or pairs of 4-bit weights do not divide them.
        """
        weight = linear.weight
        form = format_for(linear.in_features, config)
        result = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            split_blocks(form, linear.in_features, devices),
            packed=config.packed,
            device="meta",
            dtype=weight.dtype,
        )
        result.train(linear.training)
        if weight.device.type != "meta":
            result.weight_q, result.scale, result.zero_point = quantize_weight(
                weight,
                config.bits,
                form.group_size or -1,
                config.symmetric,
                result.packed,
                result.format.group_size,
                floats=form.dtype == "float8_e4m3fn",
            )
        if linear.bias is not None:
            result.bias = linear.bias.detach().clone()
        return result

    @property
    def block_size(self) -> int:
        """Inputs that share a scale, -1 for all."""
        return -1 if self.format.group_size is None else self.format.group_size

    def fill(self, parts: Mapping[PartName, Any], input_step: float | None = None) -> None:
        """Take weights that are quantized already.

        Args:
            parts: numpy arrays as `ttpu_core.quantization.reading.read_parts` gives them, for this layer's format.
            input_step: the static step of the inputs.
        """
        values = torch.from_numpy(parts["values"])
        if values.dtype == torch.uint8:
            values = values.view(torch.float8_e4m3fn)
        self.weight_q = laid_out(values, self.block_size, self.packed)
        self.scale = torch.tensor(parts["scale"]).t().contiguous()  # a copy: one scale may stand for all
        if "zero_point" in parts:
            self.zero_point = torch.tensor(parts["zero_point"]).t().contiguous()
        if self.format.input_order:
            order = parts.get("input_order")
            self.input_order = torch.arange(self.in_features).int() if order is None else torch.tensor(order)
        if input_step is not None:
            self.input_step = torch.tensor(input_step)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] → [..., out_features], in x's dtype."""
        if self.input_order is not None:
            x = x.index_select(-1, self.input_order)
        activation = self.format.activation
        result: Tensor = quantized_linear(
            x,
            self.weight_q,
            self.scale,
            self.zero_point,
            self.bias,
            activation is not None,
            self.input_step,
            activation is not None and activation.dtype != "int8",
        )
        return result

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features] as the products see it, in the dtype that the layer had."""
        stored = dequantize_weight(QuantizedWeight(self.weight_q, self.scale, self.zero_point)).to(self.dtype)
        if self.input_order is None:
            return stored
        return torch.empty_like(stored).index_copy_(1, self.input_order.long(), stored)

    @property
    def dimensions(self) -> Mapping[str, tuple[str | None, ...]]:
        """Buffer → what each of its dimensions runs along: "in" (whole blocks, or bytes of two inputs), "out", or None.
        Sharding the weight's inputs or outputs shards these."""
        blockwise = self.block_size != -1
        of_scales = ("in", "out") if blockwise else ("out",)
        found: dict[str, tuple[str | None, ...]] = {
            "weight_q": ("in", None, "out") if blockwise else ("out", "in"),
            "scale": of_scales,
            "zero_point": of_scales,
            "input_order": (None,),
            "input_step": (),
            "bias": ("out",),
        }
        return {name: dims for name, dims in found.items() if getattr(self, name) is not None}

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{format_words(self.format)}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        """Moves and casts as a module does, but for the dtypes of weights and scales: scales in bfloat16 would add an
        error of up to 0.4 % to every weight."""
        exact = {name: self._buffers[name] for name in ("weight_q", "scale", "input_step")}
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.scale.device)).dtype
        super()._apply(fn, recurse)
        for name, before in exact.items():
            after = self._buffers[name]
            if before is not None and after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        return self
