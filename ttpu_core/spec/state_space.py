"""A selective state space (Mamba-2, arXiv 2405.21060) as a `StateSpaceSpec`, a mixer that backends implement
themselves. `ttpu_core.mapping.recurrent` has the rules for its checkpoint tensors.

One projection gives each token a gate, the values x of each head, vectors b and c that the heads of a group share, and
a step dt of each head. A short convolution mixes x, b and c with the tokens before. Each head keeps a matrix S:

    S ← exp(-exp(decay_log) dt) S + dt x ⊗ b;  y = S c + skip x

and the output is a projection of y, gated and normed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ttpu_core.errors import ConfigError
from ttpu_core.spec import MixerSpec, Parameter, StateSpec, axes

GatedNorm = Literal["after_gate", "before_gate", "none"]
SECTIONS = ("gate", "x", "b", "c", "dt")
"""The parts of the input projection, in the order of checkpoints."""


@dataclass(frozen=True)
class StateSpaceSpec(MixerSpec):
    """The state space of one layer, created by `state_space`. Its sizes are its options."""

    def scale(self, part: str) -> float:
        """The factor on one of `SECTIONS`, or on the mixer's "input" or "output"."""
        value: float = dict(self.options).get(f"{part}_scale", 1.0)
        return value


def state_space(
    *,
    hidden_size: int,
    num_heads: int,
    head_dim: int,
    state_size: int,
    groups: int,
    conv_kernel: int,
    activation: str = "silu",
    norm: GatedNorm = "after_gate",
    norm_eps: float = 1e-5,
    bias: bool = False,
    output_bias: bool | None = None,
    conv_bias: bool = True,
    dt_limits: tuple[float, float] = (0.0, math.inf),
    scales: tuple[tuple[str, float], ...] = (),
) -> StateSpaceSpec:
    """The state space of one layer.

    Args:
        hidden_size: features of the residual stream.
        num_heads: number of heads.
        head_dim: features of x of each head.
        state_size: features of b and c.
        groups: how many b and c there are; heads are divided among them in order.
        conv_kernel: tokens that the convolution reads, the token itself included.
        activation: of the convolution's results, by the name of an `ActivationSpec`.
        norm: whether an RMSNorm over each group's features follows the gate, precedes it, or is left out.
        norm_eps: its epsilon.
        bias: whether the input projection has a bias.
        output_bias: whether the output projection has one; None means as the input projection.
        conv_bias: whether the convolution has a bias.
        dt_limits: least and greatest step.
        scales: factors on the projected `SECTIONS`, on the mixer's "input" and on its "output", by name.

    Raises:
        ConfigError: the groups do not divide the heads.
    """
    if num_heads % groups:
        raise ConfigError(
            f"a state space was described with {num_heads} heads in {groups} groups, but the first must be a multiple "
            "of the second: correct the config or `ttpu_mixer`."
        )
    inner, shared = num_heads * head_dim, groups * state_size
    options: dict[str, Any] = {
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "head_dim": head_dim,
        "state_size": state_size,
        "groups": groups,
        "conv_kernel": conv_kernel,
        "activation": activation,
        "norm": norm,
        "norm_eps": norm_eps,
        "dt_min": dt_limits[0],
        "dt_max": dt_limits[1],
        **{f"{part}_scale": factor for part, factor in scales if factor != 1.0},
    }
    biases = (bias, bias if output_bias is None else output_bias, conv_bias)
    return StateSpaceSpec(
        "state_space",
        parameters=tuple(_parameters(options, inner, shared, biases)),
        options=tuple(options.items()),
        state=(
            StateSpec("conv", (conv_kernel - 1, inner), (None, axes.Q_HEADS)),
            StateSpec("conv_shared", (conv_kernel - 1, 2, shared), (None, None, shared_axis(groups))),
            StateSpec("state", (num_heads, head_dim, state_size), (axes.Q_HEADS, None, None), "float32"),
        ),
    )


def shared_axis(groups: int) -> str | None:
    """The logical axis of the features of b and c: that of heads, or None if one group makes all heads read all of
    them."""
    return axes.Q_HEADS if groups > 1 else None


def _parameters(
    options: dict[str, Any], inner: int, shared: int, biases: tuple[bool, bool, bool]
) -> Iterator[tuple[str, Parameter]]:
    hidden, heads, kernel = (options[name] for name in ("hidden_size", "num_heads", "conv_kernel"))
    bias, output_bias, conv_bias = biases
    axis = shared_axis(options["groups"])
    sections: dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]] = {
        "gate_x": ((2, inner), (axes.GATE_UP, axes.Q_HEADS)),
        "shared": ((2, shared), (axes.GATE_UP, axis)),  # b and c
        "dt": ((heads,), (axes.Q_HEADS,)),
    }
    for name, (shape, logical) in sections.items():
        yield f"{name}.kernel", Parameter((*shape, hidden), (*logical, axes.EMBED))
        if bias:
            yield f"{name}.bias", Parameter(shape, logical, "zeros")
    channels: dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]] = {
        "conv": ((inner,), (axes.Q_HEADS,)),
        "conv_shared": ((2, shared), (None, axis)),
    }
    for name, (shape, logical) in channels.items():
        yield f"{name}.kernel", Parameter((kernel, *shape), (None, *logical))
        if conv_bias:
            yield f"{name}.bias", Parameter(shape, logical, "zeros")
    # Decay rates: rounding errors would add up over thousands of tokens.
    yield "decay_log", Parameter((heads,), (axes.Q_HEADS,), "zeros", "float32")
    yield "dt_bias", Parameter((heads,), (axes.Q_HEADS,), "ones", "float32")
    yield "skip", Parameter((heads,), (axes.Q_HEADS,), "ones", "float32")
    if options["norm"] != "none":
        yield "norm.scale", Parameter((inner,), (axes.Q_HEADS,), "ones")
    yield "output.kernel", Parameter((hidden, inner), (axes.EMBED, axes.Q_HEADS))
    if output_bias:
        yield "output.bias", Parameter((hidden,), (axes.NORM,), "zeros")
