"""Mapping rules for the mixers of the core's vocabulary that carry a state from token to token."""

from __future__ import annotations

from collections.abc import Iterator

from ttpu_core.mapping import Expression, Tensor
from ttpu_core.spec.short_convolution import ShortConvolutionSpec

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
