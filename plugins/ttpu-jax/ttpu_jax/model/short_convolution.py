"""The gated short convolution (`ttpu_core.spec.short_convolution`) as a Flax NNX module."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ttpu_core.spec import axes
from ttpu_core.spec.short_convolution import ShortConvolutionSpec
from ttpu_jax.model.modules import Linear, Parameters, Runtime, Step, value_of
from ttpu_jax.ops.convolution import causal_convolution

State = dict[str, jax.Array]


class ShortConvolution(nnx.Module):
    """A causal convolution of each channel between two gates."""

    resets_state = True

    def __init__(self, spec: ShortConvolutionSpec, values: Parameters, runtime: Runtime) -> None:
        self.spec, self.runtime = spec, runtime
        self.input, self.output = Linear(values.at("input"), runtime), Linear(values.at("output"), runtime)
        self.kernel, self.bias = values["conv.kernel"], values.get("conv.bias")

    def __call__(self, x: jax.Array, step: Step, state: State | None = None) -> tuple[jax.Array, State | None]:
        """The mixer's output [batch, seq, hidden], or that of the last token only, and the state "conv" [batch, kernel
        - 1, channels].

        Args:
            x: [batch, seq, hidden].
            step: the step's positions.
            state: the state after earlier tokens, or None.
        """
        # A token's result depends on the tokens before it, so the sequence is not sharded.
        parts = self.runtime.placement.constrain(self.input(x), axes.BATCH, None, None, axes.MLP)
        # Padding is zero as what lies before a sequence is, also where the projections have biases.
        inner = jnp.where(step.valid[..., None], parts[:, :, 0] * parts[:, :, 2], 0)
        window, bias = None if state is None else state["conv"], value_of(self.bias)
        mixed, window = causal_convolution(inner, self.kernel[...], window, step.valid, step.segments, bias=bias)
        gate = parts[:, :, 1]
        if step.last_only:
            mixed, gate = mixed[:, -1:], gate[:, -1:]
        return self.output(gate * mixed.astype(x.dtype)), None if state is None else {"conv": window}
