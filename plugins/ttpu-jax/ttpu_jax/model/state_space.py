"""The selective state space of Mamba-2 (`ttpu_core.spec.state_space`) as a Flax NNX module. Everything between the
projections is computed in float32."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from ttpu_core.spec import ActivationSpec, NormSpec, axes
from ttpu_core.spec.state_space import StateSpaceSpec, shared_axis
from ttpu_jax.model.modules import Linear, Parameters, Runtime, Step, value_of
from ttpu_jax.ops.activation import activate
from ttpu_jax.ops.convolution import causal_convolution
from ttpu_jax.ops.norm import normalize
from ttpu_jax.ops.state_space import chunked_state_space, recurrent_state_space

State = dict[str, jax.Array]
FLOAT32 = jnp.dtype(jnp.float32)


class StateSpace(nnx.Module):
    """A short causal convolution, a state per head that decays and takes in each token, a gate and a norm."""

    resets_state = True

    def __init__(self, spec: StateSpaceSpec, values: Parameters, runtime: Runtime) -> None:
        self.spec, self.runtime = spec, runtime
        self.gate_x, self.shared = Linear(values.at("gate_x"), runtime), Linear(values.at("shared"), runtime)
        self.dt, self.output = Linear(values.at("dt"), runtime), Linear(values.at("output"), runtime)
        self.conv, self.conv_bias = values["conv.kernel"], values.get("conv.bias")
        self.conv_shared, self.conv_shared_bias = values["conv_shared.kernel"], values.get("conv_shared.bias")
        self.decay_log, self.dt_bias, self.skip = values["decay_log"], values["dt_bias"], values["skip"]
        self.norm_scale = values.get("norm.scale")
        self.shared_axis = shared_axis(spec.option("groups"))

    def __call__(self, x: jax.Array, step: Step, state: State | None = None) -> tuple[jax.Array, State | None]:
        """The mixer's output [batch, seq, hidden], or that of the last token only, and the state: "conv" [batch,
        kernel - 1, heads * head_dim], "conv_shared" [batch, kernel - 1, 2, groups * state_size] and "state" [batch,
        heads, head_dim, state_size].

        Args:
            x: [batch, seq, hidden].
            step: the step's positions.
            state: the state after earlier tokens, or None.
        """
        x = _times(x, self.spec.scale("input"))
        # Each token depends on the previous one, so the sequence is not sharded.
        pair, heads = self.gate_x(x), (axes.BATCH, None, axes.Q_HEADS)
        gate, inner = (self._placed(pair[:, :, i], *heads) for i in (0, 1))
        gate, inner = _times(gate, self.spec.scale("gate")), _times(inner, self.spec.scale("x"))
        shared = self._scaled_shared(self._placed(self.shared(x), axes.BATCH, None, None, self.shared_axis))
        dt = self._steps(self._placed(self.dt(x, FLOAT32), *heads), step)
        windows = (None, None) if state is None else (state["conv"], state["conv_shared"])
        inner, window = self._convolve(inner, self.conv, self.conv_bias, windows[0], step)
        shared, shared_window = self._convolve(shared, self.conv_shared, self.conv_shared_bias, windows[1], step)
        y, after = self._scan(inner, shared, dt, None if state is None else state["state"], step)
        if step.last_only:
            y, gate = y[:, -1:], gate[:, -1:]
        out = self.output(self._gated(y, gate.astype(FLOAT32)).astype(x.dtype))
        out = _times(out, self.spec.scale("output"))
        return out, None if state is None else {"conv": window, "conv_shared": shared_window, "state": after}

    def _placed(self, x: jax.Array, *logical: str | None) -> jax.Array:
        return self.runtime.placement.constrain(x, *logical)

    def _scaled_shared(self, shared: jax.Array) -> jax.Array:
        """b and c [batch, seq, 2, groups * state_size], each times its factor."""
        factors = self.spec.scale("b"), self.spec.scale("c")
        return shared if factors == (1.0, 1.0) else shared * jnp.asarray(factors, shared.dtype)[:, None]

    def _steps(self, dt: jax.Array, step: Step) -> jax.Array:
        """The steps [batch, seq, heads], 0 for padding."""
        dt = jax.nn.softplus(_times(dt, self.spec.scale("dt")) + self.dt_bias[...])
        low, high = self.spec.option("dt_min"), self.spec.option("dt_max")
        return jnp.where(step.valid[..., None], jnp.clip(dt, low, high), 0.0)

    def _convolve(
        self, x: jax.Array, kernel: nnx.Param, bias: nnx.Param | None, window: jax.Array | None, step: Step
    ) -> tuple[jax.Array, jax.Array]:
        """The convolution of x [batch, seq, *channels] in float32, activated, and its window after the last token."""
        # Padding is zero as what lies before a sequence is, also where the projections have biases.
        x = jnp.where(step.valid.reshape(*x.shape[:2], *(1,) * (x.ndim - 2)), x, 0)
        mixed, window = causal_convolution(
            x, kernel[...], window, step.valid, step.segments, bias=value_of(bias)
        )
        return activate(mixed, ActivationSpec(self.spec.option("activation"))), window

    def _scan(
        self, inner: jax.Array, shared: jax.Array, dt: jax.Array, state: jax.Array | None, step: Step
    ) -> tuple[jax.Array, jax.Array]:
        """y [batch, seq, heads * head_dim] and the state [batch, heads, head_dim, state_size] after the last token."""
        batch, seq = dt.shape[:2]
        heads, dim, size, groups = (
            self.spec.option(name) for name in ("num_heads", "head_dim", "state_size", "groups")
        )
        grouped = (groups, heads // groups)
        x, dt = inner.reshape(batch, seq, *grouped, dim), dt.reshape(batch, seq, *grouped)
        b, c = (shared[:, :, i].reshape(batch, seq, groups, size) for i in (0, 1))
        decay = -jnp.exp(self.decay_log[...]).reshape(grouped) * dt
        before = jnp.zeros((batch, heads, dim, size), FLOAT32) if state is None else state.astype(FLOAT32)
        rule = recurrent_state_space if seq == 1 else partial(chunked_state_space, starts=step.starts)
        y, after = rule(x * dt[..., None], decay, b, c, before.reshape(batch, *grouped, dim, size))
        y = y + x * self.skip[...].reshape(*grouped, 1)
        return y.reshape(batch, seq, -1), after.reshape(before.shape)

    def _gated(self, y: jax.Array, gate: jax.Array) -> jax.Array:
        """y [batch, seq, heads * head_dim], gated and normed over each group's features."""
        order, gate = self.spec.option("norm"), jax.nn.silu(gate)
        if order == "none":
            return y * gate
        shape = (*y.shape[:2], self.spec.option("groups"), -1)
        by_group = (y if order == "before_gate" else y * gate).reshape(shape)
        spec = NormSpec(eps=self.spec.option("norm_eps"))
        assert self.norm_scale is not None
        scale = self.norm_scale[...].reshape(shape[2:])
        normed = normalize(by_group, spec, scale).reshape(y.shape)
        return normed * gate if order == "before_gate" else normed


def _times(x: jax.Array, factor: float) -> jax.Array:
    return x if factor == 1.0 else x * jnp.asarray(factor, x.dtype)
