"""A gated short convolution (LFM2; arXiv 2511.23404) as a `ShortConvolutionSpec`, a mixer that backends implement
themselves. `ttpu_core.mapping.recurrent` has the rules for its checkpoint tensors.

Three projections give each token the values before, after and x. The mixer computes output(after * convolution(before
* x)), where the convolution of each channel reads a few tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ttpu_core.spec import MixerSpec, Parameter, StateSpec, axes


@dataclass(frozen=True)
class ShortConvolutionSpec(MixerSpec):
    """The short convolution of one layer, created by `short_convolution`. Its sizes are its options."""

    def with_channels(self, channels: int) -> ShortConvolutionSpec:
        """Return the same layer with channels appended up to `channels`."""
        sizes = dict(self.options) | {"channels": channels}
        return _spec(**sizes)


def short_convolution(*, hidden_size: int, kernel: int, bias: bool = False) -> ShortConvolutionSpec:
    """The short convolution of one layer, with as many channels as the residual stream has features.

    Args:
        hidden_size: features of the residual stream.
        kernel: tokens that the convolution reads, the token itself included.
        bias: whether the projections and the convolution have biases.
    """
    return _spec(hidden_size, hidden_size, kernel, bias=bias)


def _spec(hidden_size: int, channels: int, kernel: int, *, bias: bool) -> ShortConvolutionSpec:
    return ShortConvolutionSpec(
        "short_convolution",
        parameters=tuple(_parameters(hidden_size, channels, kernel, bias=bias)),
        options=(("hidden_size", hidden_size), ("channels", channels), ("kernel", kernel), ("bias", bias)),
        state=(StateSpec("conv", (kernel - 1, channels), (None, axes.MLP)),),
    )


def _parameters(hidden: int, channels: int, kernel: int, *, bias: bool) -> Iterator[tuple[str, Parameter]]:
    yield "input.kernel", Parameter((3, channels, hidden), (axes.GATE_UP, axes.MLP, axes.EMBED))
    yield "conv.kernel", Parameter((kernel, channels), (None, axes.MLP))
    yield "output.kernel", Parameter((hidden, channels), (axes.EMBED, axes.MLP))
    if bias:
        yield "input.bias", Parameter((3, channels), (axes.GATE_UP, axes.MLP), "zeros")
        yield "conv.bias", Parameter((channels,), (axes.MLP,), "zeros")
        yield "output.bias", Parameter((hidden,), (axes.NORM,), "zeros")
