"""Mapping rules for the mixers of the core's vocabulary that carry a state from token to token."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from ttpu_core.mapping import Expression, Tensor
from ttpu_core.spec.selective_scan import NORMED, SelectiveScanSpec
from ttpu_core.spec.short_convolution import ShortConvolutionSpec
from ttpu_core.spec.state_space import StateSpaceSpec

Rules = Iterator[tuple[str, Expression]]


def short_convolution_rules(mixer: ShortConvolutionSpec, prefix: str) -> Rules:
    """Rules for the parameters of a short convolution, whose tensors' names begin with `prefix`, as LFM2's checkpoints
    store them."""
    hidden, channels, kernel = (mixer.option(name) for name in ("hidden_size", "channels", "kernel"))
    whole = Tensor(f"{prefix}in_proj.weight", (3 * channels, hidden))
    yield "mixer.input.kernel", whole.reshape(3, channels, hidden)
    filters = Tensor(f"{prefix}conv.weight", (channels, 1, kernel))
    yield "mixer.conv.kernel", filters.reshape(channels, kernel).transpose(1, 0)
    yield "mixer.output.kernel", Tensor(f"{prefix}out_proj.weight", (hidden, channels))
    if mixer.option("bias"):
        yield "mixer.input.bias", Tensor(f"{prefix}in_proj.bias", (3 * channels,)).reshape(3, channels)
        yield "mixer.conv.bias", Tensor(f"{prefix}conv.bias", (channels,))
        yield "mixer.output.bias", Tensor(f"{prefix}out_proj.bias", (hidden,))


def state_space_rules(mixer: StateSpaceSpec, prefix: str) -> Rules:
    """Rules for the parameters of a state space, whose tensors' names begin with `prefix`, as Mamba-2's checkpoints
    store them: one tensor holds the rows of all sections of the input projection, and one those of all channels of the
    convolution."""
    hidden, kernel, heads = (mixer.option(name) for name in ("hidden_size", "conv_kernel", "num_heads"))
    shapes = {name: parameter.shape for name, parameter in mixer.parameters}
    inner, shared = shapes["output.kernel"][1], shapes["shared.kernel"][1]
    channels = inner + 2 * shared
    rows = inner + channels + heads
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {"kernel": ("weight", (hidden,)), "bias": ("bias", ())}
    for kind, (tensor, last) in kinds.items():
        whole = Tensor(f"{prefix}in_proj.{tensor}", (rows, *last))
        sections = {
            "gate_x": whole[: 2 * inner].reshape(2, inner, *last),
            "shared": whole[2 * inner : 2 * (inner + shared)].reshape(2, shared, *last),
            "dt": whole[2 * (inner + shared) :],
            "output": Tensor(f"{prefix}out_proj.{tensor}", (hidden, inner) if last else (hidden,)),
        }
        yield from ((f"mixer.{name}.{kind}", rule) for name, rule in sections.items() if f"{name}.{kind}" in shapes)
    filters = Tensor(f"{prefix}conv1d.weight", (channels, 1, kernel)).reshape(channels, kernel)
    yield "mixer.conv.kernel", filters[:inner].transpose(1, 0)
    yield "mixer.conv_shared.kernel", filters[inner:].reshape(2, shared, kernel).transpose(2, 0, 1)
    if "conv.bias" in shapes:
        bias = Tensor(f"{prefix}conv1d.bias", (channels,))
        yield "mixer.conv.bias", bias[:inner]
        yield "mixer.conv_shared.bias", bias[inner:].reshape(2, shared)
    for name, tensor in (("decay_log", "A_log"), ("dt_bias", "dt_bias"), ("skip", "D")):
        yield f"mixer.{name}", Tensor(prefix + tensor, (heads,))
    if "norm.scale" in shapes:
        yield "mixer.norm.scale", Tensor(f"{prefix}norm.weight", (inner,))


def selective_scan_rules(mixer: SelectiveScanSpec, prefix: str) -> Rules:
    """Rules for the parameters of a selective scan, whose tensors' names begin with `prefix`, as Mamba's checkpoints
    store them. Norms have the names of Jamba's."""
    shapes = {name: parameter.shape for name, parameter in mixer.parameters}
    kernel, channels = shapes["conv.kernel"]
    for name, tensor in (("input", "in_proj"), ("selection", "x_proj"), ("dt", "dt_proj"), ("output", "out_proj")):
        *rows, last = shapes[f"{name}.kernel"]
        weight, bias = Tensor(f"{prefix}{tensor}.weight", (prod(rows), last)), shapes.get(f"{name}.bias")
        yield f"mixer.{name}.kernel", weight.reshape(*rows, last) if len(rows) > 1 else weight
        if bias is not None:
            whole = Tensor(f"{prefix}{tensor}.bias", (prod(bias),))
            yield f"mixer.{name}.bias", whole.reshape(*bias) if len(bias) > 1 else whole
    filters = Tensor(f"{prefix}conv1d.weight", (channels, 1, kernel)).reshape(channels, kernel)
    yield "mixer.conv.kernel", filters.transpose(1, 0)
    if "conv.bias" in shapes:
        yield "mixer.conv.bias", Tensor(f"{prefix}conv1d.bias", (channels,))
    yield "mixer.decay_log", Tensor(f"{prefix}A_log", shapes["decay_log"][::-1]).transpose(1, 0)
    yield "mixer.dt_bias", Tensor(f"{prefix}dt_proj.bias", (channels,))
    yield "mixer.skip", Tensor(f"{prefix}D", (channels,))
    for name in NORMED:
        if f"{name}_norm.scale" in shapes:
            yield f"mixer.{name}_norm.scale", Tensor(f"{prefix}{name}_layernorm.weight", shapes[f"{name}_norm.scale"])
