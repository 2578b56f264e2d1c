"""How the numbers of a kernel are stored. A `KernelFormat` in the parameter table makes a kernel a quantized one, which
is several arrays: low-precision values, their scales, and what else the format needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from ttpu_core.errors import RequestError
from ttpu_core.spec import axes

if TYPE_CHECKING:
    from ttpu_core.spec.parts import Parameter

ValueDtype = Literal["int8", "int4", "float8_e4m3fn", "float4_e2m1fn"]
ActivationDtype = Literal["int8", "float8_e4m3fn"]
PartName = Literal["values", "scale", "zero_point", "input_order", "input_scale"]

LARGEST: dict[str, float] = {"int8": 127.0, "int4": 7.0, "float8_e4m3fn": 448.0, "float4_e2m1fn": 6.0}
"""The largest magnitude of each dtype that a symmetric format uses."""


@dataclass(frozen=True)
class ActivationFormat:
    """How the input of a product is quantized: symmetric, to the dtype of `dtype`.

    Args:
        dtype: int8 or float8_e4m3fn.
        static: one scale for the whole tensor, which the checkpoint gives; otherwise each token is scaled by its
            largest feature as it comes in.
    """

    dtype: ActivationDtype
    static: bool = False


@dataclass(frozen=True)
class KernelFormat:
    """The format of a quantized kernel: weight ≈ scale * (value - zero_point).

    Args:
        dtype: of the values.
        group_size: number of neighbouring inputs that share a scale; None for one scale per output channel.
        symmetric: there are no zero points.
        scale_dtype: of the scales.
        input_order: the inputs of the kernel are stored in another order than the input's features, so that groups hold
            inputs of similar importance (GPTQ's activation order).
        activation: how the input of the product is quantized; None for not at all.

    Raises:
        RequestError: an unknown dtype, a group size below 2, or zero points for floating-point values.
    """

    dtype: ValueDtype
    group_size: int | None = None
    symmetric: bool = True
    scale_dtype: str = "float32"
    input_order: bool = False
    activation: ActivationFormat | None = None

    def __post_init__(self) -> None:
        if self.dtype not in get_args(ValueDtype):
            raise RequestError(
                f"weights of the dtype {self.dtype!r} were asked for, but quantized weights are held in "
                f"{', '.join(get_args(ValueDtype))}: use one of them."
            )
        if self.group_size is not None and self.group_size < 2:
            raise RequestError(
                f"a group size of {self.group_size} was asked for, but it must be at least 2 inputs: raise it, or "
                "leave it out for one scale per output channel."
            )
        if not self.symmetric and not self.dtype.startswith("int"):
            raise RequestError(
                f"zero points for {self.dtype} weights were asked for, but only integers have them: use "
                "symmetric=True, or an integer format."
            )

    def groups(self, inputs: int) -> int:
        """Number of scales per output channel of a kernel with `inputs` inputs.

        Raises:
            RequestError: the group size does not divide the inputs.
        """
        if self.group_size is None:
            return 1
        if inputs % self.group_size:
            raise RequestError(
                f"groups of {self.group_size} inputs were asked for, but the kernel has {inputs} inputs: use a divisor "
                "of that, one scale per output channel, or leave the kernel out."
            )
        return inputs // self.group_size


def parts_of(parameter: Parameter) -> Iterator[tuple[PartName, Parameter]]:
    """The arrays that a quantized kernel [*lead, *out, in] is stored as, in this order:

    - values [*lead, *out, in] in the format's dtype.
    - scale [*lead, *out], or [*lead, *out, groups] with groups; in the format's scale dtype.
    - zero_point, int8, in the shape of the scale, if the format is not symmetric. Values and zero points of a format
      with unsigned numbers are shifted to signed ones when they are read.
    - input_order, int32 [*lead, in], if the format has one: value column j belongs to input feature input_order[j].
    - input_scale, float32 [*lead], if activations have a static scale: activation ≈ input_scale * value.

    `lead` are the dimensions of stacked layers and of experts.

    Raises:
        RequestError: the group size does not divide the inputs.
    """
    form = parameter.format
    assert form is not None
    *out, inputs = parameter.shape
    *out_axes, in_axis = parameter.axes
    lead = sum(1 for axis in parameter.axes if axis in (axes.LAYERS, axes.EXPERT))
    yield "values", replace(parameter, dtype=form.dtype, format=None)
    groups = form.groups(inputs)
    grouped = form.group_size is not None
    shape, logical = ((*out, groups), (*out_axes, in_axis)) if grouped else (tuple(out), tuple(out_axes))
    yield "scale", replace(parameter, shape=shape, axes=logical, init="ones", dtype=form.scale_dtype, format=None)
    if not form.symmetric:
        yield "zero_point", replace(parameter, shape=shape, axes=logical, init="zeros", dtype="int8", format=None)
    if form.input_order:
        order_axes = (*out_axes[:lead], None)
        shape = (*out[:lead], inputs)
        yield "input_order", replace(parameter, shape=shape, axes=order_axes, init="zeros", dtype="int32", format=None)
    if form.activation is not None and form.activation.static:
        shape, logical = tuple(out[:lead]), tuple(out_axes[:lead])
        yield "input_scale", replace(parameter, shape=shape, axes=logical, init="ones", dtype="float32", format=None)


def stored_parameters(table: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """The parameter table with each quantized kernel replaced by its parts, `<path>.values`, `<path>.scale` and so on:
    the arrays that devices hold."""
    stored: dict[str, Parameter] = {}
    for path, parameter in table.items():
        if parameter.format is None:
            stored[path] = parameter
        else:
            stored |= {f"{path}.{name}": part for name, part in parts_of(parameter)}
    return stored
