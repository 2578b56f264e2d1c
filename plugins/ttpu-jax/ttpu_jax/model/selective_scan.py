"""The selective scan of Mamba (`ttpu_core.spec.selective_scan`) as a Flax NNX module. Everything between the
projections is computed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ttpu_core.spec import ActivationSpec, NormSpec, axes
from ttpu_core.spec.selective_scan import NORMED, SelectiveScanSpec
from ttpu_jax.model.modules import Linear, Parameters, Runtime, Step, value_of
from ttpu_jax.ops.activation import activate
from ttpu_jax.ops.convolution import causal_convolution
from ttpu_jax.ops.norm import normalize
from ttpu_jax.ops.selective_scan import selective_scan

State = dict[str, jax.Array]
FLOAT32 = jnp.dtype(jnp.float32)


class SelectiveScan(nnx.Module):
    """A short causal convolution, a linear recurrence of each channel, and a gate."""

    resets_state = True

    def __init__(self, spec: SelectiveScanSpec, values: Parameters, runtime: Runtime) -> None:
        self.spec, self.runtime = spec, runtime
        self.input, self.output = Linear(values.at("input"), runtime), Linear(values.at("output"), runtime)
        self.selection, self.dt = Linear(values.at("selection"), runtime), Linear(values.at("dt"), runtime)
        self.conv, self.conv_bias = values["conv.kernel"], values.get("conv.bias")
        self.decay_log, self.dt_bias, self.skip = values["decay_log"], values["dt_bias"], values["skip"]
        self.dt_norm, self.b_norm, self.c_norm = (values.get(f"{name}_norm.scale") for name in NORMED)

    def __call__(self, x: jax.Array, step: Step, state: State | None = None) -> tuple[jax.Array, State | None]:
        """The mixer's output [batch, seq, hidden], or that of the last token only, and the state: "conv" [batch,
        kernel - 1, channels] and "state" [batch, state_size, channels].

        Args:
            x: [batch, seq, hidden].
            step: the step's positions.
            state: the state after earlier tokens, or None.
        """
        # Each token depends on the previous one, so the sequence is not sharded.
        pair = self.runtime.placement.constrain(self.input(x), axes.BATCH, None, None, axes.MLP)
        valid, gate = step.valid[..., None], pair[:, :, 1].astype(FLOAT32)
        # Padding is zero as what lies before a sequence is, also where the projection has a bias.
        inner, window = causal_convolution(
            jnp.where(valid, pair[:, :, 0], 0),
            self.conv[...],
            None if state is None else state["conv"],
            step.valid,
            step.segments,
            bias=value_of(self.conv_bias),
        )
        inner = activate(inner, ActivationSpec(self.spec.option("activation")))
        dt, b, c = self._selected(inner.astype(x.dtype))
        dt = jax.nn.softplus(self.dt(dt.astype(x.dtype), FLOAT32) + self.dt_bias[...])
        dt = self.runtime.placement.constrain(jnp.where(valid, dt, 0), axes.BATCH, None, axes.MLP)
        rates = -jnp.exp(self.decay_log[...])
        before = jnp.zeros((x.shape[0], *rates.shape), FLOAT32) if state is None else state["state"].astype(FLOAT32)
        y, after = selective_scan(inner, dt, rates, b, c, before, starts=step.starts)
        y = y + inner * self.skip[...]
        if step.last_only:
            y, gate = y[:, -1:], gate[:, -1:]
        out = self.output((y * jax.nn.silu(gate)).astype(x.dtype))
        return out, None if state is None else {"conv": window, "state": after}

    def _selected(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The features of dt [batch, seq, dt_rank], b and c [batch, seq, state_size] of x [batch, seq, channels]."""
        rank, size = self.spec.option("dt_rank"), self.spec.option("state_size")
        dt, b, c = jnp.split(self.selection(x, FLOAT32), (rank, rank + size), axis=-1)
        if self.spec.option("norm") == "none":
            return dt, b, c
        spec = NormSpec(eps=self.spec.option("norm_eps"))
        dt, b, c = (
            normalize(each, spec, value_of(scale))
            for each, scale in ((dt, self.dt_norm), (b, self.b_norm), (c, self.c_norm))
        )
        return dt, b, c
