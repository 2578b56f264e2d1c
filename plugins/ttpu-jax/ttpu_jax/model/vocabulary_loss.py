"""The cross-entropy of tokens, some of them at a time, with its gradients computed beside it, so that logits are
computed once. Devices that share the head's kernel divide the vocabulary: each has all features of its own words, for
the tokens of all of them. The kernel then moves once, as does its gradient, which no device adds to another's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ttpu_core.spec import axes
from ttpu_jax.ops.kernels import QuantizedKernel
from ttpu_jax.ops.parts import Part, part
from ttpu_jax.optimizations import Optimization

if TYPE_CHECKING:
    from ttpu_jax.model.causal_model import DecoderModel
    from ttpu_jax.params.placement import Placement

Sums = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""What is minimized, the cross-entropy in nats, the weight, and that of the tokens that were the likeliest, summed over
tokens: float32 scalars."""


@dataclass(frozen=True)
class TokenLoss:
    """What is minimized of a token: see `ttpu_train.runner.LossSettings`."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    @property
    def is_cross_entropy(self) -> bool:
        """Whether it is the cross-entropy alone."""
        return not self.label_smoothing and not self.z_loss

    def sums(self, logits: jax.Array, targets: jax.Array, weights: jax.Array, vocab_size: int) -> Sums:
        """The sums over tokens.

        Args:
            logits: float32 [batch, seq, rows]; those of rows that are no words are -inf.
            targets: int32 [batch, seq].
            weights: float32 [batch, seq].
            vocab_size: number of words.
        """
        # A sum over the vocabulary instead of a gather, which a mesh that shards it would need to see whole.
        words = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
        chosen = jnp.where(words == targets[..., None], logits, 0.0).sum(-1)
        normalizer = jax.nn.logsumexp(logits, axis=-1)
        losses = normalizer - chosen
        minimized = losses
        if self.label_smoothing:
            mean = jnp.where(words < vocab_size, logits, 0.0).sum(-1) / vocab_size
            minimized = (1 - self.label_smoothing) * losses + self.label_smoothing * (normalizer - mean)
        if self.z_loss:
            minimized = minimized + self.z_loss * jnp.square(normalizer)
        likeliest = (chosen >= logits.max(-1)).astype(jnp.float32)

        def summed(values: jax.Array) -> jax.Array:
            return jnp.where(weights != 0, weights * values, 0.0).sum()

        return summed(minimized), summed(losses), weights.sum(), summed(likeliest)


def sums_over_parts(
    model: DecoderModel,
    ends: Mapping[str, Any],
    hidden: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    minimized: TokenLoss,
) -> Sums:
    """The sums over all tokens. The gradients are those of what is minimized, and of the cross-entropy where that is
    the same; the other sums have none.

    Args:
        model: computes the logits.
        ends: path → weight, at `DecoderModel.head_paths`.
        hidden: [parts, batch, seq, hidden].
        targets: int32 [parts, batch, seq].
        weights: float32 [parts, batch, seq]; no gradients.
        minimized: what is minimized.
    """
    mesh_axes = () if _is_quantized(ends[model.head_paths[0]]) else _axes_of_head(model)
    placed = _Divided(model.runtime.placement, mesh_axes)
    own = {path: _where_it_lies(model, path, value) if mesh_axes else value for path, value in ends.items()}
    trained, fixed = _apart({path: placed.of_head(value) for path, value in own.items()})

    @part(Part.LOSS)
    def of_part(trained: Any, fixed: Any, x: jax.Array, target: jax.Array, weight: jax.Array) -> tuple[jax.Array, Sums]:
        logits = placed.logits(model.head_logits(_together(trained, fixed), x))
        sums = minimized.sums(logits, target, weight, model.spec.vocab_size)
        return sums[0], sums

    @jax.custom_vjp
    def run(trained: Any, fixed: Any, hidden: jax.Array, targets: jax.Array, weights: jax.Array) -> Sums:
        def one(each: tuple[jax.Array, jax.Array, jax.Array]) -> Sums:
            x, *others = each
            return of_part(trained, fixed, placed.rows(x), *others)[1]

        return _summed(jax.lax.map(one, (hidden, targets, weights)))

    def forward(trained: Any, fixed: Any, hidden: jax.Array, targets: jax.Array, weights: jax.Array) -> Any:
        def one(so_far: Any, each: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Any, tuple[Sums, jax.Array]]:
            x, *others = each

            def total(trained: Any, x: jax.Array) -> tuple[jax.Array, Sums]:
                return of_part(trained, fixed, x, *others)

            _, gradients_of, sums = jax.vjp(total, trained, placed.rows(x), has_aux=True)
            of_ends, of_x = gradients_of(jnp.float32(1))
            so_far = jax.tree.map(lambda one, more: one + more.astype(one.dtype), so_far, of_ends)
            return [placed.of_head(one) for one in so_far], (sums, placed.own_rows(of_x))

        zeros = [placed.of_head(jnp.zeros(one.shape, jnp.float32)) for one in trained]
        of_ends, (sums, of_hidden) = jax.lax.scan(one, zeros, (hidden, targets, weights))
        return _summed(sums), (of_ends, trained, of_hidden)

    def backward(kept: Any, cotangents: Any) -> Any:
        of_ends, like, of_hidden = kept
        factor = cotangents[0] + cotangents[1] if minimized.is_cross_entropy else cotangents[0]

        def times(gradient: jax.Array, dtype: Any) -> jax.Array:
            return (factor * gradient.astype(jnp.float32)).astype(dtype)

        scaled = [times(gradient, one.dtype) for gradient, one in zip(of_ends, like, strict=True)]
        return scaled, None, times(of_hidden, of_hidden.dtype), None, None

    run.defvjp(forward, backward)
    found: Sums = run(trained, fixed, hidden, targets, weights)
    return found


@dataclass(frozen=True)
class _Divided:
    """Where the arrays of the loss lie, if the devices along `mesh_axes` divide the vocabulary; all of them stay where
    they are if there are none.

    Attributes:
        placement: of the model.
        mesh_axes: may be empty.
    """

    placement: Placement
    mesh_axes: tuple[str, ...]

    def of_head(self, value: Any) -> Any:
        """A kernel [vocab, features] or bias [vocab], with padding words that make the vocabulary divisible."""
        if not self.mesh_axes:
            return value
        mesh = self.placement.mesh
        assert mesh is not None
        missing = -value.shape[0] % prod(mesh.shape[axis] for axis in self.mesh_axes)
        if missing:
            value = jnp.pad(value, ((0, missing), *((0, 0),) * (value.ndim - 1)))
        return self._constrained(value, self.mesh_axes, *(None,) * (value.ndim - 1))

    def rows(self, x: jax.Array) -> jax.Array:
        """x [batch, seq, hidden], the tokens of all devices that divide the vocabulary."""
        return self._constrained(x, self._batch(x, self.mesh_axes), PartitionSpec.UNCONSTRAINED, None)

    def own_rows(self, x: jax.Array) -> jax.Array:
        """x [batch, seq, hidden], each device its own tokens."""
        return self._constrained(x, self._batch(x, ()), PartitionSpec.UNCONSTRAINED, None)

    def logits(self, logits: jax.Array) -> jax.Array:
        """[batch, seq, vocab]."""
        return self._constrained(
            logits, self._batch(logits, self.mesh_axes), PartitionSpec.UNCONSTRAINED, self.mesh_axes
        )

    def _batch(self, x: jax.Array, without: tuple[str, ...]) -> tuple[str, ...] | None:
        found = (axis for axis in self.placement.mesh_axes(axes.BATCH, len(x)) if axis not in without)
        return tuple(found) or None

    def _constrained(self, x: jax.Array, *by: Any) -> jax.Array:
        if not self.mesh_axes:
            return x
        assert self.placement.mesh is not None
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.placement.mesh, PartitionSpec(*by)))


def _axes_of_head(model: DecoderModel) -> tuple[str, ...]:
    """The mesh axes that shard the head's kernel, those of its vocabulary first; none where the loss is not divided."""
    placement, parameter = model.runtime.placement, model.parameters[model.head_paths[0]]
    if placement.mesh is None or Optimization.VOCABULARY_LOSS in model.runtime.without:
        return ()
    sizes = dict(placement.mesh.shape)
    found = placement.strategy.mesh_axes(parameter.axes, parameter.shape, sizes, "the head")
    return tuple(axis for of_dimension in found for axis in of_dimension)


def _where_it_lies(model: DecoderModel, path: str, value: jax.Array) -> jax.Array:
    """A weight of the head constrained to its own placement, as its gradient is then too."""
    return jax.lax.with_sharding_constraint(value, model.runtime.placement.parameter(path, model.parameters[path]))


def _is_quantized(kernel: Any) -> bool:
    return isinstance(kernel, QuantizedKernel)


def _apart(ends: Mapping[str, Any]) -> tuple[list[jax.Array], Any]:
    """The arrays that have gradients, and all else: what is needed to put them together again."""
    leaves, tree = jax.tree.flatten(ends)
    trains = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]
    trained = [leaf for leaf, of in zip(leaves, trains, strict=True) if of]
    return trained, _Fixed([None if of else leaf for leaf, of in zip(leaves, trains, strict=True)], tree)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Fixed:
    """The leaves that have no gradients, None for the others, and the tree of all."""

    leaves: list[Any]
    tree: Any = field(metadata={"static": True})


def _together(trained: list[jax.Array], fixed: _Fixed) -> Any:
    given = iter(trained)
    return jax.tree.unflatten(fixed.tree, [next(given) if leaf is None else leaf for leaf in fixed.leaves])


def _summed(sums: Sums) -> Sums:
    total: Sums = jax.tree.map(lambda each: each.sum(), sums)
    return total
