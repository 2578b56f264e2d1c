"""The parts of a decoder as Flax NNX modules. Each is built from its spec and a view on the parameters, whose logical
axes it carries; none knows a model type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from flax import nnx

from ttpu_core import axes
from ttpu_core.parameters import fused_slots, norm_names
from ttpu_core.spec import AttentionSpec, EmbeddingSpec, HeadSpec, LayerSpec, MLPSpec, NormSpec, Parameter, RopeSpec
from ttpu_jax.model.cache import LayerCache
from ttpu_jax.ops import attention as attention_ops
from ttpu_jax.ops.activation import activate
from ttpu_jax.ops.linear import linear
from ttpu_jax.ops.norm import normalize
from ttpu_jax.ops.rope import rotate
from ttpu_jax.params.placement import Placement

RESIDUAL = (axes.BATCH, axes.SEQUENCE, None)
"""Axes of the residual stream [batch, seq, hidden]: its features are whole on every device."""


@dataclass(frozen=True)
class Runtime:
    """What is the same in every layer and never changes: where arrays live, which attention runs, and the different
    ropes of the model. Static."""

    placement: Placement
    attention: str = "eager"
    ropes: tuple[RopeSpec, ...] = ()


@dataclass(frozen=True)
class Parameters:
    """A view on a flat dict of arrays and on the parameter table, below a path."""

    arrays: Mapping[str, jax.Array]
    table: Mapping[str, Parameter]
    prefix: str = ""

    def at(self, path: str) -> Parameters:
        """The view below `path`."""
        return Parameters(self.arrays, self.table, f"{self.prefix}{path}.")

    def get(self, name: str) -> nnx.Param | None:
        """The parameter as an NNX variable that carries its logical axes; None where the spec has none of this name."""
        path = self.prefix + name
        if path not in self.table:
            return None
        return nnx.Param(self.arrays[path], axis_names=self.table[path].axes)

    def __getitem__(self, name: str) -> nnx.Param:
        variable = self.get(name)
        if variable is None:
            raise KeyError(self.prefix + name)
        return variable


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Step:
    """What the tokens of one forward pass have in common: positions [batch, seq] of queries and [batch, keys] of keys,
    cos and sin for each of the runtime's ropes, and the cache slot where the first token goes; `fresh` says that
    nothing is in the cache before it, `last_only` that a layer's output is wanted for the last token alone."""

    query_positions: jax.Array
    key_positions: jax.Array
    angles: tuple[tuple[jax.Array, jax.Array], ...]
    slot: jax.Array | None = None
    fresh: bool = field(default=False, metadata={"static": True})
    last_only: bool = field(default=False, metadata={"static": True})


class Norm(nnx.Module):
    """Normalisation with its own scale and bias; the statistics run over the last `axes` axes."""

    def __init__(self, spec: NormSpec, values: Parameters, over: int = 1) -> None:
        self.spec, self.over = spec, over
        self.scale, self.bias = values.get("scale"), values.get("bias")

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., features]: the same shape."""
        return normalize(x, self.spec, _value(self.scale), _value(self.bias), axes=self.over)


class Linear(nnx.Module):
    """x @ kernel.T + bias."""

    def __init__(self, values: Parameters, runtime: Runtime) -> None:
        self.on_one_device = runtime.placement.mesh is None
        self.kernel, self.bias = values["kernel"], values.get("bias")

    def __call__(self, x: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
        """x [..., in]: [..., *out]."""
        return linear(x, self.kernel[...], _value(self.bias), out_dtype=out_dtype, flatten=self.on_one_device)


class Embedding(nnx.Module):
    """Token table, with the scale, learned positions and norm that some models add."""

    def __init__(self, spec: EmbeddingSpec, values: Parameters) -> None:
        self.spec = spec
        self.embedding = values["embedding"]
        self.positions = values.get("positions")
        self.norm = Norm(spec.norm, values.at("norm")) if spec.norm else None

    def __call__(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """tokens, positions [batch, seq]: [batch, seq, hidden]."""
        x = jnp.take(self.embedding[...], tokens, axis=0, mode="clip")
        if self.spec.scale is not None:
            x = x * jnp.asarray(self.spec.scale, x.dtype)
        if self.positions is not None:
            rows = jnp.maximum(positions, 0) + self.spec.position_offset
            x = x + jnp.take(self.positions[...], rows, axis=0, mode="clip")
        return x if self.norm is None else self.norm(x)


class Head(nnx.Module):
    """From the residual stream to float32 logits."""

    def __init__(self, spec: HeadSpec, values: Parameters) -> None:
        self.spec = spec
        self.kernel, self.bias = values.get("kernel"), values.get("bias")

    def __call__(self, x: jax.Array, table: jax.Array) -> jax.Array:
        """x [..., hidden], table [vocab, hidden] of the embedding: [..., vocab]."""
        kernel = table if self.kernel is None else self.kernel[...]
        logits = linear(x, kernel, _value(self.bias), out_dtype=jnp.dtype(jnp.float32))
        logits = logits if self.spec.multiplier == 1.0 else logits * self.spec.multiplier
        cap = self.spec.softcap
        return logits if cap is None else jnp.tanh(logits / cap) * cap


class MLP(nnx.Module):
    """Gated or plain feed-forward layer."""

    def __init__(self, spec: MLPSpec, values: Parameters, runtime: Runtime) -> None:
        self.spec, self.runtime = spec, runtime
        if spec.gated:
            self.gate_up = Linear(values.at("gate_up"), runtime)
        else:
            self.up = Linear(values.at("up"), runtime)
        self.inner_norm = Norm(spec.inner_norm, values.at("inner_norm")) if spec.inner_norm else None
        self.down = Linear(values.at("down"), runtime)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [batch, seq, hidden]: the same shape."""
        wide = jnp.dtype(jnp.float32)
        if self.spec.gated:
            pair = self.gate_up(x, wide)
            inner = activate(pair[..., 0, :], self.spec.activation) * pair[..., 1, :]
        else:
            inner = activate(self.up(x, wide), self.spec.activation)
        inner = inner.astype(x.dtype)
        if self.inner_norm is not None:
            inner = self.inner_norm(inner)
        inner = self.runtime.placement.constrain(inner, axes.BATCH, axes.SEQUENCE, axes.MLP)
        return self.down(inner)


class Attention(nnx.Module):
    """Grouped-query attention over a sequence or a cache."""

    def __init__(self, spec: AttentionSpec, values: Parameters, runtime: Runtime) -> None:
        self.spec, self.runtime = spec, runtime
        self.qkv = Linear(values.at("qkv"), runtime)
        separate = not spec.value_is_key and spec.value_dim != spec.head_dim
        self.value = Linear(values.at("value"), runtime) if separate else None
        self.gate = Linear(values.at("gate"), runtime) if spec.output_gate else None
        # Statistics over all heads run over the axes (kv_heads, q_per_kv, head_dim) of queries, one fewer of keys.
        over_q, over_k = (3, 2) if spec.qk_norm_scope == "full" else (1, 1)
        self.q_norm = Norm(spec.q_norm, values.at("q_norm"), over_q) if spec.q_norm else None
        self.k_norm = Norm(spec.k_norm, values.at("k_norm"), over_k) if spec.k_norm else None
        self.v_norm = Norm(spec.v_norm, values.at("v_norm")) if spec.v_norm else None
        self.sinks = values.get("sinks")
        self.output_norm = Norm(spec.output_norm, values.at("output_norm"), 3) if spec.output_norm else None
        self.output = Linear(values.at("output"), runtime)

    def __call__(
        self, x: jax.Array, step: Step, cache: LayerCache | None = None, turn: jax.Array | None = None
    ) -> tuple[jax.Array, LayerCache | None]:
        """x [batch, seq, hidden]: the same shape, and the cache with this step's keys and values in it."""
        query, key, value = self._project(x)
        query, key = self._position(query, key, step)
        query_positions = step.query_positions
        if step.last_only:
            query, query_positions, x = query[:, -1:], query_positions[:, -1:], x[:, -1:]
        if cache is not None:
            cache = cache.write(_heads_first(key), _heads_first(value), _slot(step), turn)
        if cache is not None and not step.fresh:
            keys, values = cache.layer(turn)
        else:
            keys, values = _heads_first(key), _heads_first(value)
        on_cpu = self.runtime.placement.platform == "cpu"
        mixed = attention_ops.implementation(self.runtime.attention)(
            query,
            keys,
            values,
            query_positions,
            step.key_positions,
            self.spec,
            sinks=_value(self.sinks),
            compute_dtype=jnp.dtype(jnp.float32) if on_cpu else None,
        )
        return self._finish(mixed, x), cache

    def _project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """query [batch, seq, kv_heads, q_per_kv, dim]; key and value [batch, seq, kv_heads, dim]."""
        spec, constrain = self.spec, self.runtime.placement.constrain
        fused = constrain(self.qkv(x), axes.BATCH, axes.SEQUENCE, axes.KV_HEADS, None, None)
        group = fused_slots(spec)[0]
        query, key = fused[..., :group, :], fused[..., group, :]
        value = key if spec.value_is_key else self.value(x) if self.value else fused[..., group + 1, :]
        if spec.value_scale != 1.0:
            value = value * spec.value_scale
        return query, key, self._clip(value if self.v_norm is None else self.v_norm(value))

    def _clip(self, x: jax.Array) -> jax.Array:
        bound = self.spec.clip_qkv
        return x if bound is None else jnp.clip(x, -bound, bound)

    def _position(self, query: jax.Array, key: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        """Norms, rope and position-dependent temperature, in the order that the spec asks for."""
        spec = self.spec

        def norms(query: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            return (self.q_norm(query) if self.q_norm else query), (self.k_norm(key) if self.k_norm else key)

        if not spec.qk_norm_after_rope:
            query, key = norms(query, key)
        query, key = self._clip(query), self._clip(key)
        rope = spec.rope
        if rope is not None and rope.type != "none":
            cos, sin = step.angles[self.runtime.ropes.index(rope)]
            query, key = rotate(query, cos, sin, rope), rotate(key, cos, sin, rope)
        if spec.qk_norm_after_rope:
            query, key = norms(query, key)
        if spec.query_temperature is not None:
            t = spec.query_temperature
            shifted = jnp.floor((step.query_positions.astype(jnp.float32) + t.shift) / t.period)
            factor = 1.0 + t.scale * jnp.log(t.offset + jnp.maximum(shifted, 0.0))
            query = (query * factor[:, :, None, None, None]).astype(query.dtype)
        return query, key

    def _finish(self, mixed: jax.Array, x: jax.Array) -> jax.Array:
        """Gate, inner norm and output projection of mixed [batch, seq, kv_heads, q_per_kv, value_dim]."""
        if self.gate is not None and self.spec.output_gate is not None:
            gate = self.gate(x, jnp.dtype(jnp.float32))
            gate = jax.nn.sigmoid(gate) if self.spec.output_gate.activation == "sigmoid" else jax.nn.softplus(gate)
            mixed = (mixed * (gate if gate.ndim == mixed.ndim else gate[..., None])).astype(mixed.dtype)
        if self.output_norm is not None:
            mixed = self.output_norm(mixed)
        return self.output(mixed.reshape(*mixed.shape[:2], -1))


class DecoderLayer(nnx.Module):
    """Mixer and MLP on the residual stream, with norms where the placement puts them."""

    def __init__(self, spec: LayerSpec, values: Parameters, runtime: Runtime) -> None:
        self.spec, self.runtime = spec, runtime
        assert isinstance(spec.mixer, AttentionSpec) and isinstance(spec.mlp, MLPSpec | None)
        present = norm_names(spec)

        def norm(name: str) -> Norm | None:
            return Norm(spec.norm, values.at(name)) if name in present else None

        self.input_norm, self.post_attention_norm = norm("input_norm"), norm("post_attention_norm")
        self.mlp_norm, self.post_mlp_norm = norm("mlp_norm"), norm("post_mlp_norm")
        self.attention = Attention(spec.mixer, values.at("attention"), runtime)
        self.mlp = MLP(spec.mlp, values.at("mlp"), runtime) if spec.mlp else None
        self.layer_scalar = values.get("layer_scalar")

    def __call__(
        self, x: jax.Array, step: Step, cache: LayerCache | None = None, turn: jax.Array | None = None
    ) -> tuple[jax.Array, LayerCache | None]:
        """x [batch, seq, hidden]: the same shape, and the updated cache."""
        mixed, cache = self.attention(_maybe(self.input_norm, x), step, cache, turn)
        mixed = _maybe(self.post_attention_norm, mixed)
        if step.last_only:
            x = x[:, -1:]
        if self.spec.block.placement.startswith("parallel"):
            inner = x if self.mlp_norm is None else self.mlp_norm(x)
            if self.spec.block.placement == "parallel":
                inner = _maybe(self.input_norm, x)
            x = self._add(x, mixed + self.mlp(inner) if self.mlp else mixed)
        else:
            x = self._add(x, mixed)
            if self.mlp is not None:
                x = self._add(x, _maybe(self.post_mlp_norm, self.mlp(_maybe(self.mlp_norm, x))))
        return (x if self.layer_scalar is None else x * self.layer_scalar[...]), cache

    def _add(self, x: jax.Array, update: jax.Array) -> jax.Array:
        multiplier = self.spec.block.residual_multiplier
        x = x + (update if multiplier == 1.0 else update * jnp.asarray(multiplier, update.dtype))
        return self.runtime.placement.constrain(x, *RESIDUAL)


def different_ropes(layers: tuple[LayerSpec, ...]) -> tuple[RopeSpec, ...]:
    """The different ropes of a model's layers, in order of appearance."""
    ropes = (layer.mixer.rope for layer in layers if isinstance(layer.mixer, AttentionSpec))
    return tuple(dict.fromkeys(rope for rope in ropes if rope is not None and rope.type != "none"))


def _maybe(norm: Norm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)


def _value(variable: nnx.Param | None) -> jax.Array | None:
    return None if variable is None else variable[...]


def _heads_first(x: jax.Array) -> jax.Array:
    """[batch, seq, heads, dim] → [batch, heads, seq, dim], as caches are laid out."""
    return x.transpose(0, 2, 1, 3)


def _slot(step: Step) -> jax.Array:
    assert step.slot is not None
    return step.slot
