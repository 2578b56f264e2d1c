"""Lightning attention (arXiv 2401.04658) for JAX: linear attention whose state, one matrix per head, decays by a
constant factor a token."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from ttpu_core.spec import ActivationSpec, MixerSpec, NormSpec, axes
from ttpu_jax.model.modules import Linear, Norm, Parameters, Runtime, Step
from ttpu_jax.ops.activation import activate
from ttpu_jax.ops.state_space import chunked_state_space, recurrent_state_space

NORM = NormSpec(eps=1e-6)
"""`MiniMaxLightningAttention` leaves the epsilon of its norm at the class's default."""
State = dict[str, jax.Array]


class LightningAttention(nnx.Module):
    """Linear attention with a decay per head, a norm over all heads, and a gate on each feature of the output."""

    resets_state = True

    def __init__(self, spec: MixerSpec, values: Parameters, runtime: Runtime) -> None:
        self.spec, self.runtime = spec, runtime
        self.qkv, self.gate = Linear(values.at("qkv"), runtime), Linear(values.at("gate"), runtime)
        self.norm, self.output = Norm(NORM, values.at("norm")), Linear(values.at("output"), runtime)

    def __call__(self, x: jax.Array, step: Step, state: State | None = None) -> tuple[jax.Array, State | None]:
        """The mixer's output [batch, seq, hidden], or that of the last token only, and the state "recurrent" [batch,
        heads, head_dim, head_dim].

        Args:
            x: [batch, seq, hidden].
            step: the step's positions.
            state: the state after earlier tokens, or None.
        """
        valid = step.valid[..., None]
        heads, dim = self.spec.option("heads"), self.spec.option("head_dim")
        qkv = activate(self.qkv(x, jnp.dtype(jnp.float32)), ActivationSpec(self.spec.option("activation")))
        # Each token depends on the previous one, so the sequence is not sharded.
        qkv = self.runtime.placement.constrain(
            jnp.where(valid[..., None], qkv, 0).astype(x.dtype), axes.BATCH, None, axes.KV_HEADS, None
        )
        query, key, value = (qkv[..., part * dim : (part + 1) * dim].astype(jnp.float32) for part in range(3))
        slopes = self.spec.option("decay") * 2.0 ** (-8.0 / heads * jnp.arange(1, heads + 1))
        decay = jnp.where(valid, -slopes.astype(jnp.float32), 0.0)
        # A state space of one head a group: its x, b and c are value, key and query.
        shape = (x.shape[0], heads, 1, dim, dim)
        before = jnp.zeros(shape, jnp.float32) if state is None else state["recurrent"].reshape(shape)
        rule = recurrent_state_space if x.shape[1] == 1 else partial(chunked_state_space, starts=step.starts)
        out, after = rule(value[:, :, :, None], decay[..., None], key, query, before)
        out = out.astype(x.dtype).reshape(*out.shape[:2], heads * dim)
        if step.last_only:
            out, x = out[:, -1:], x[:, -1:]
        gate = jax.nn.sigmoid(self.gate(x)).reshape(out.shape)
        return self.output(gate * self.norm(out)), None if state is None else {"recurrent": after[:, :, 0]}
