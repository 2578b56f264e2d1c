"""A selective scan (Mamba, arXiv 2312.00752) as a `SelectiveScanSpec`, a mixer that backends implement themselves.
`ttpu_core.mapping.recurrent` has the rules for its checkpoint tensors.

One projection gives each token a gate and the channels x, which a short convolution mixes with the tokens before. x
gives the vectors b and c, which all channels share, and a step dt of each channel. Each channel keeps a vector h:

    h ← exp(-exp(decay_log) dt) h + dt x b;  y = h · c + skip x

and the output is a projection of the gated y. `ttpu_core.spec.state_space` is its successor of Mamba-2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ttpu_core.spec import MixerSpec, Parameter, StateSpec, axes

SelectionNorm = Literal["none", "plain", "scaled"]
NORMED = ("dt", "b", "c")
"""What x gives, in the order of checkpoints."""


@dataclass(frozen=True)
class SelectiveScanSpec(MixerSpec):
    """The selective scan of one layer, created by `selective_scan`. Its sizes are its options."""


def selective_scan(
    *,
    hidden_size: int,
    channels: int,
    state_size: int,
    dt_rank: int,
    conv_kernel: int,
    activation: str = "silu",
    norm: SelectionNorm = "none",
    norm_eps: float = 1e-6,
    bias: bool = False,
    conv_bias: bool = True,
) -> SelectiveScanSpec:
    """The selective scan of one layer.

    Args:
        hidden_size: features of the residual stream.
        channels: features of x.
        state_size: features of b, c and of each channel's state.
        dt_rank: features of which the steps of all channels are a projection.
        conv_kernel: tokens that the convolution reads, the token itself included.
        activation: of the convolution's results, by the name of an `ActivationSpec`.
        norm: whether an RMSNorm follows the selection of dt's features, b and c, and whether it has scales.
        norm_eps: its epsilon.
        bias: whether the input and output projections have biases.
        conv_bias: whether the convolution has a bias.
    """
    options: dict[str, Any] = {
        "hidden_size": hidden_size,
        "channels": channels,
        "state_size": state_size,
        "dt_rank": dt_rank,
        "conv_kernel": conv_kernel,
        "activation": activation,
        "norm": norm,
        "norm_eps": norm_eps,
    }
    return SelectiveScanSpec(
        "selective_scan",
        parameters=tuple(_parameters(options, bias=bias, conv_bias=conv_bias)),
        options=tuple(options.items()),
        state=(
            StateSpec("conv", (conv_kernel - 1, channels), (None, axes.MLP)),
            # Channels last: a TPU would pad the state's few features to 128.
            StateSpec("state", (state_size, channels), (None, axes.MLP), "float32"),
        ),
    )


def _parameters(options: dict[str, Any], *, bias: bool, conv_bias: bool) -> Iterator[tuple[str, Parameter]]:
    hidden, channels, kernel = (options[name] for name in ("hidden_size", "channels", "conv_kernel"))
    size, rank = options["state_size"], options["dt_rank"]
    yield "input.kernel", Parameter((2, channels, hidden), (axes.GATE_UP, axes.MLP, axes.EMBED))
    yield "conv.kernel", Parameter((kernel, channels), (None, axes.MLP))
    yield "selection.kernel", Parameter((rank + 2 * size, channels), (None, axes.MLP))
    yield "dt.kernel", Parameter((channels, rank), (axes.MLP, None))
    # Decay rates: rounding errors would add up over thousands of tokens.
    yield "decay_log", Parameter((size, channels), (None, axes.MLP), "zeros", "float32")
    yield "dt_bias", Parameter((channels,), (axes.MLP,), "ones", "float32")
    yield "skip", Parameter((channels,), (axes.MLP,), "ones", "float32")
    if options["norm"] == "scaled":
        for name, features in zip(NORMED, (rank, size, size), strict=True):
            yield f"{name}_norm.scale", Parameter((features,), (None,), "ones")
    yield "output.kernel", Parameter((hidden, channels), (axes.EMBED, axes.MLP))
    if bias:
        yield "input.bias", Parameter((2, channels), (axes.GATE_UP, axes.MLP), "zeros")
        yield "output.bias", Parameter((hidden,), (axes.NORM,), "zeros")
    if conv_bias:
        yield "conv.bias", Parameter((channels,), (axes.MLP,), "zeros")
