"""The experts of a layer, which transformers holds as one tensor per projection, with weights in 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ttpu_core.quantization.report import format_words
from ttpu_core.spec.kernel_format import ActivationFormat, KernelFormat, PartName
from ttpu_torch_xla.quantization.config import QuantizationConfig
from ttpu_torch_xla.quantization.linear import STORED, format_for, split_blocks
from ttpu_torch_xla.quantization.ops import quantize_tokens
from ttpu_torch_xla.quantization.pack import half_run, nibbles, pack, quantize_weight
from ttpu_torch_xla.sharding.axes import HELD

UP = ("gate_up_proj", "up_proj")
PROJECTIONS = (*UP, "down_proj")


class QuantizedStack(nn.Module):
    """The weights [experts, out, in] of one projection of all experts.

    Its state is the buffers `weight_q`, int8 or float8_e4m3fn [experts, out, in], or uint8 [experts, out, in / 2] with
    two to a byte; `scale`, float32 [experts, out], or [experts, out, groups]; `zero_point`, int8 in the shape of the
    scale, and `input_place`, int32 [experts, in], the column of each input, where the format has them. A byte holds two
    inputs that are half a group apart, or `half_run` without groups. Casting leaves weights and scales as they are.

    Attributes:
        format: of the weights.
        packed: two weights of 4 bits share a byte.
        dtype: of what is computed from them.
    """

    weight_q: Tensor
    scale: Tensor
    zero_point: Tensor | None
    input_place: Tensor | None

    def __init__(
        self,
        shape: tuple[int, int, int],
        form: KernelFormat,
        dtype: torch.dtype,
        *,
        packed: bool = True,
        device: Any = None,
    ) -> None:
        """Make a stack whose numbers are to be filled in.

        Args:
            shape: experts, outputs and inputs.
            form: of the weights; its groups divide the inputs.
            dtype: of what is computed from them.
            packed: two weights of 4 bits share a byte wherever groups have an even number of inputs.
            device: of the buffers.
        """
        super().__init__()
        experts, out, inputs = self.shape = shape
        self.format, self.dtype = form, dtype
        self.packed = packed and form.dtype == "int4" and (form.group_size or inputs) % 2 == 0
        stored = torch.uint8 if self.packed else STORED[form.dtype]
        of_scales = (experts, out) if form.group_size is None else (experts, out, form.groups(inputs))
        columns = inputs // 2 if self.packed else inputs
        self.register_buffer("weight_q", torch.empty((experts, out, columns), dtype=stored, device=device))
        self.register_buffer("scale", torch.empty(of_scales, dtype=torch.float32, device=device))
        zero = None if form.symmetric else torch.empty(of_scales, dtype=torch.int8, device=device)
        self.register_buffer("zero_point", zero)
        place = torch.empty((experts, inputs), dtype=torch.int32, device=device) if form.input_order else None
        self.register_buffer("input_place", place)

    @classmethod
    def from_weight(cls, weight: Tensor, config: QuantizationConfig, name: str, devices: int = 1) -> QuantizedStack:
        """Quantize weights, an expert at a time. For weights on the meta device, the result is there too.

        Args:
            weight: [experts, out, in].
            config: how to quantize.
            name: of the weights, for messages.
            devices: number of devices that will share the inputs; groups are split so that each has whole ones.

        Raises:
            RequestError: no groups suit the inputs, or pairs of 4-bit weights do not divide them.
        """
        experts, out, inputs = weight.shape
        form = format_for(inputs, config, name)
        own = split_blocks(form, inputs, devices)
        shape = (experts, out, inputs)
        result = cls(shape, own, weight.dtype, packed=config.packed, device=weight.device)
        for expert in range(0 if weight.device.type == "meta" else experts):
            values, scale, zero = quantize_weight(
                weight[expert],
                config.bits,
                form.group_size or -1,
                config.symmetric,
                False,
                own.group_size,
                floats=form.dtype == "float8_e4m3fn",
            )
            if own.group_size is not None:  # [groups, group size, out] and [groups, out]
                values, scale = values.flatten(0, 1).t(), scale.t()
                zero = None if zero is None else zero.t()
            result._put(expert, slice(None), values, scale, zero)
        return result

    def allocate(self) -> None:
        """Make room on the host for the numbers of a stack on the meta device."""
        for name, one in self._buffers.items():
            if one is not None:
                self._buffers[name] = torch.empty(one.shape, dtype=one.dtype)
        if self.input_place is not None:
            self.input_place.copy_(torch.arange(self.shape[-1], dtype=torch.int32))

    def fill(self, expert: int, rows: slice, parts: Mapping[PartName, Any]) -> None:
        """Take some outputs of an expert that are quantized already.

        Args:
            expert: its number.
            rows: the outputs.
            parts: numpy arrays as `ttpu_core.quantization.reading.read_parts` gives them, for this stack's format.
        """
        values = torch.from_numpy(parts["values"])
        if values.dtype == torch.uint8:
            values = values.view(torch.float8_e4m3fn)
        zero = torch.tensor(parts["zero_point"]) if "zero_point" in parts else None
        self._put(expert, rows, values, torch.tensor(parts["scale"]), zero)
        if self.input_place is not None and "input_order" in parts:
            self.input_place[expert] = torch.argsort(torch.tensor(parts["input_order"])).to(torch.int32)

    def _put(self, expert: int, rows: slice, values: Tensor, scale: Tensor, zero: Tensor | None) -> None:
        """values: [out, in]; scale, zero: [out], or [out, groups]."""
        self.weight_q[expert, rows] = pack(values, self._half) if self.packed else values
        self.scale[expert, rows] = scale
        if self.zero_point is not None and zero is not None:
            self.zero_point[expert, rows] = zero.to(torch.int8)

    @property
    def _half(self) -> int:
        """How far apart the inputs of a byte are."""
        size = self.format.group_size
        return half_run(self.shape[-1]) if size is None else size // 2

    @property
    def weight(self) -> Tensor:
        """[experts, out, in] in the dtype that the weights had."""
        return self._dequantized(self.weight_q, self.scale, self.zero_point, self.input_place)

    def __getitem__(self, chosen: Tensor) -> Tensor:
        """The weights [choices, out, in] of the experts [choices]: those alone are dequantized."""
        zero, place = (None if one is None else one[chosen] for one in (self.zero_point, self.input_place))
        return self._dequantized(self.weight_q[chosen], self.scale[chosen], zero, place)

    def _dequantized(self, values: Tensor, scale: Tensor, zero: Tensor | None, place: Tensor | None) -> Tensor:
        if self.packed:
            halves = [part.unflatten(-1, (-1, self._half)) for part in nibbles(values)]
            values = torch.stack(halves, -2).flatten(-3)
        steps = values.to(torch.float32)
        if self.format.group_size is not None:
            steps = steps.unflatten(-1, (-1, self.format.group_size))
        if zero is not None:
            steps = steps - zero.to(torch.float32)[..., None]
        stored = steps * scale[..., None]
        stored = (stored if self.format.group_size is None else stored.flatten(-2)).to(self.dtype)
        if place is None:
            return stored
        which = torch.arange(len(place), device=place.device)[:, None]
        return stored.transpose(1, 2)[which, place.long()].transpose(1, 2)

    @property
    def dimensions(self) -> Mapping[str, tuple[str | None, ...]]:
        """Buffer → what each of its dimensions runs along: "expert", "out", "in" (whole groups, or bytes of two
        inputs), or None. Sharding the weights' dimensions shards these."""
        of_scales = ("expert", "out") if self.format.group_size is None else ("expert", "out", "in")
        found: dict[str, tuple[str | None, ...]] = {
            "weight_q": ("expert", "out", "in"),
            "scale": of_scales,
            "zero_point": of_scales,
            "input_place": ("expert", None),
        }
        return {name: dims for name, dims in found.items() if getattr(self, name) is not None}

    def extra_repr(self) -> str:
        experts, out, inputs = self.shape
        return f"experts={experts}, in_features={inputs}, out_features={out}, {format_words(self.format)}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedStack:
        """Moves and casts as a module does, but for the dtypes of weights and scales."""
        exact = {name: self._buffers[name] for name in ("weight_q", "scale")}
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.scale.device)).dtype
        super()._apply(fn, recurse)
        for name, before in exact.items():
            after = self._buffers[name]
            if before is not None and after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        return self


class QuantizedExperts(nn.Module):
    """What a class of transformers' experts becomes when projections of its are held by a `QuantizedStack`: their
    attributes are computed when they are read, and inputs are rounded as the formats say."""

    def forward(self, hidden_states: Tensor, *args: Any, **named: Any) -> Any:
        """hidden_states: [tokens, hidden] → [tokens, hidden]."""
        return super().forward(self._rounded(UP, hidden_states), *args, **named)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        """gate_up: [..., 2 * inner] → [..., inner]."""
        return self._rounded(("down_proj",), super()._apply_gate(gate_up))  # type: ignore[misc]

    def _rounded(self, projections: tuple[str, ...], x: Tensor) -> Tensor:
        held = [stack for name in projections if (stack := stack_of(self, name)) is not None]
        activation = held[0].format.activation if held else None
        return x if activation is None else rounded(x, activation)


class ByChoice:
    """Quantized experts whose projections are taken for the chosen experts, `experts.down_proj[chosen]`, before they
    are dequantized. In all else they are the experts."""

    def __init__(self, experts: Any) -> None:
        self._experts = experts

    def __getattr__(self, name: str) -> Any:
        found = stack_of(self._experts, name)
        return getattr(self._experts, name) if found is None else found


def by_choice(experts: Any) -> Any:
    """The experts as a product with few chosen ones should see them."""
    return ByChoice(experts) if isinstance(experts, QuantizedExperts) else experts


def rounded(x: Tensor, activation: ActivationFormat) -> Tensor:
    """x [..., in] rounded as the format says, with a step for each token, in its dtype. The gradient passes straight
    through (arXiv 1308.3432)."""
    exact = x.to(torch.float32)
    values, step = quantize_tokens(exact, None, activation.dtype != "int8")
    return (exact + (values.to(torch.float32) * step - exact).detach()).to(x.dtype)


def stack_of(experts: nn.Module, projection: str) -> QuantizedStack | None:
    """What holds a projection of experts quantized, if it is."""
    found = experts._modules.get(f"{projection}{HELD}")
    return found if isinstance(found, QuantizedStack) else None


def stacks_in(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """The projections of experts that a model holds as one dense tensor: name, module, and name in the module."""
    for path, module in model.named_modules():
        if hasattr(module, "has_gate") and hasattr(module, "is_transposed"):
            for name, parameter in module.named_parameters(recurse=False):
                if name in PROJECTIONS and parameter.ndim == 3:
                    yield f"{path}.{name}" if path else name, module, name


def why_dense(experts: Any, activation: ActivationFormat | None) -> str | None:
    """Why no stack holds the weights of experts; None if one does."""
    if experts.is_transposed:
        return "experts with their inputs before their outputs"
    if activation is not None and activation.static:
        return "experts with a static scale of their inputs"
    if activation is not None and not experts.has_gate:
        return "experts without a gate, whose inputs would be quantized"
    return None


def hold(experts: nn.Module, projection: str, stack: QuantizedStack) -> None:
    """Put a stack in the place of a projection's parameter."""
    held = [name for name in PROJECTIONS if stack_of(experts, name) is not None]
    del experts._parameters[projection]
    experts.add_module(f"{projection}{HELD}", stack.train(experts.training))
    base = type(experts).__mro__[2] if isinstance(experts, QuantizedExperts) else type(experts)
    experts.__class__ = _quantized_class(base, (*held, projection))
    for module in (experts, stack):
        vars(module)["_is_hf_initialized"] = True  # else transformers fills what it does not load with random numbers


@cache
def _quantized_class(base: type[nn.Module], projections: tuple[str, ...]) -> type[nn.Module]:
    """The class of experts of which some projections are quantized."""

    def read(projection: str) -> property:
        def weight(self: nn.Module) -> Tensor:
            stack = stack_of(self, projection)
            assert stack is not None
            return stack.weight

        return property(weight)

    members = {name: read(name) for name in projections}
    return type(f"Quantized{base.__name__}", (QuantizedExperts, base), {"__module__": __name__, **members})
