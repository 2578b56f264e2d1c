"""A training step: one optimizer update of a model's parameters on a batch of rows. Loss, optimizer, gradient
accumulation and the trained parameters are arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ttpu_core.errors import RequestError
from ttpu_core.sharding.padding import Paddings
from ttpu_core.sharding.training_state import ADAMW, TrainingState
from ttpu_core.spec import axes
from ttpu_jax.model.causal_model import DecoderModel, Params
from ttpu_jax.model.loss import summed_next_token_loss
from ttpu_jax.params.padding import project_gradients
from ttpu_jax.params.placement import Placement

if TYPE_CHECKING:
    from ttpu_jax.causal_lm import JaxCausalLM

LEARNING_RATE = 1e-4


class Loss(Protocol):
    """The function to minimize."""

    def __call__(
        self, model: DecoderModel, params: Params, tokens: jax.Array, mask: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """The loss of tokens [batch, seq], as a float32 sum and the number of what was summed; mask [batch, seq] marks
        the real tokens, None where all are."""
        ...


def every_parameter(path: str) -> bool:
    """Accept every parameter, so that all of them are trained."""
    return True


def adamw(learning_rate: Any = LEARNING_RATE, state: TrainingState = ADAMW) -> optax.GradientTransformation:
    """AdamW whose moments are what `state` says."""
    return optax.adamw(learning_rate, mu_dtype=np.dtype(state.moment_dtype))


@dataclass(frozen=True, eq=False)
class TrainStep:
    """Call it inside jit, with parameters and optimizer state donated.

    Attributes:
        model: made with the `remat` of the training state, and of the padded architecture.
        dtype: what the model computes in; parameters whose table names a dtype keep it.
        paddings: how parameters are padded for the mesh: a step leaves replicas equal and zeros zero.
        loss: the function to minimize, as the mean over a batch.
        optimizer: an optax transformation; its state is that of the trained parameters alone.
        accumulation: parts that a batch is computed in, one after the other; the update is that of the whole batch.
        trainable: path → whether a parameter is trained. The others leave the step bit for bit as they came.
    """

    model: DecoderModel
    dtype: np.dtype[Any]
    paddings: Paddings = field(default_factory=dict)
    loss: Loss = summed_next_token_loss
    optimizer: optax.GradientTransformation = field(default_factory=adamw)
    accumulation: int = 1
    trainable: Callable[[str], bool] = every_parameter

    def init(self, params: Params) -> Any:
        """The optimizer's state before the first step; for use inside jit, or of shapes with `jax.eval_shape`."""
        return self.optimizer.init(self._trained(params))

    def abstract_state(self, params: Mapping[str, jax.ShapeDtypeStruct]) -> Any:
        """Shapes and shardings of the optimizer's state: moments lie where their weights do."""
        placement, trained = self.model.runtime.placement, self._trained(params)
        whole = placement.sharding((), (), "the step count")

        def like(leaf: Any, parameter: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=parameter.sharding)

        return optax.tree_utils.tree_map_params(
            self.optimizer,
            like,
            jax.eval_shape(self.optimizer.init, trained),
            trained,
            transform_non_params=lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole),
        )

    def __call__(
        self, params: Params, state: Any, tokens: jax.Array, mask: jax.Array | None = None
    ) -> tuple[dict[str, Any], Any, jax.Array]:
        """One update.

        Args:
            params: path → master weight.
            state: of the optimizer.
            tokens: int [batch, seq].
            mask: bool [batch, seq], the real tokens; None: all are.

        Returns:
            The parameters and the optimizer's state after the update, and the mean loss before it, a float32 scalar.

        Raises:
            RequestError: rows that `accumulation` does not divide.
        """
        trained = self._trained(params)
        value, gradients = self._gradients(params, trained, tokens, mask)
        gradients = project_gradients(gradients, self.model.spec, self.paddings, stacked=self.model.stacked)
        updates, state = self.optimizer.update(gradients, state, trained)
        return {**params, **optax.apply_updates(trained, updates)}, state, value

    def _trained(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {path: value for path, value in params.items() if self.trainable(path)}

    def _gradients(
        self, params: Params, trained: dict[str, Any], tokens: jax.Array, mask: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The mean loss, and its gradient for each trained parameter."""

        def summed(
            trained: dict[str, Any], tokens: jax.Array, mask: jax.Array | None
        ) -> tuple[jax.Array, jax.Array]:
            return self.loss(self.model, self._computed_in({**params, **trained}), tokens, mask)

        if self.accumulation == 1:

            def mean(trained: dict[str, Any]) -> jax.Array:
                total, count = summed(trained, tokens, mask)
                return total / jnp.maximum(count, 1)

            return jax.value_and_grad(mean)(trained)

        part_gradients = jax.value_and_grad(summed, has_aux=True)

        def add(so_far: Any, part: tuple[jax.Array, jax.Array | None]) -> tuple[Any, None]:
            (total, count), gradients = part_gradients(trained, *part)
            return jax.tree.map(jnp.add, so_far, (total, count, gradients)), None

        parts = self._in_parts(tokens), None if mask is None else self._in_parts(mask)
        shapes = jax.eval_shape(part_gradients, trained, *jax.tree.map(lambda array: array[0], parts))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), (*shapes[0], shapes[1]))
        (total, count, gradients), _ = jax.lax.scan(add, zeros, parts)
        count = jnp.maximum(count, 1)
        return total / count, jax.tree.map(lambda gradient: gradient / count, gradients)

    def _computed_in(self, params: Params) -> dict[str, Any]:
        """The parameters as the model computes with them: dense ones rounded to `dtype`."""
        table = self.model.parameters

        def rounded(path: str, value: Any) -> Any:
            dense = isinstance(value, jax.Array) and table[path].dtype is None
            return value.astype(self.dtype) if dense else value

        return {path: rounded(path, value) for path, value in params.items()}

    def _in_parts(self, rows: jax.Array) -> jax.Array:
        """rows [batch, seq] as [accumulation, batch / accumulation, seq], every device keeping its own rows."""
        batch, seq = rows.shape
        if batch % self.accumulation:
            raise RequestError(
                f"a batch of {batch} rows was to be computed in {self.accumulation} parts, but they would differ in "
                f"size: use a batch that is a multiple of {self.accumulation}, or another accumulation."
            )
        parts = rows.reshape(batch // self.accumulation, self.accumulation, seq).swapaxes(0, 1)
        return self.model.runtime.placement.constrain(parts, None, axes.BATCH, None)


def step_for(
    model: JaxCausalLM,
    *,
    optimizer: optax.GradientTransformation | None = None,
    loss: Loss | None = None,
    accumulation: int = 1,
    trainable: Callable[[str], bool] | None = None,
) -> TrainStep:
    """Make the training step of a loaded model, which computes in the dtype that it was loaded in.

    Args:
        model: its parameters are what the step updates, or float32 copies of them.
        optimizer: an optax transformation; None is `adamw`.
        loss: the function to minimize; None is the cross-entropy of each next token.
        accumulation: parts that a batch is computed in, one after the other.
        trainable: path → whether a parameter is trained; None trains all of them.
    """
    return TrainStep(
        replace(model.programs.model, remat=ADAMW.remat),
        model.dtype,
        model.paddings,
        loss or summed_next_token_loss,
        optimizer or adamw(),
        accumulation,
        trainable or every_parameter,
    )


def abstract_tokens(batch: int, tokens: int, placement: Placement) -> jax.ShapeDtypeStruct:
    """Token ids [batch, tokens] as a step is given them, rows over the mesh's devices where it divides them."""
    shape = (batch, tokens)
    logical = placement.divisible((axes.BATCH, None), shape)
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=placement.sharding(logical, shape, "the tokens"))
