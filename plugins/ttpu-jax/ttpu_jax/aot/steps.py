"""The programs that are compiled ahead of time for a TPU slice. Each function takes an architecture, a placement and
sizes, pads the architecture for the mesh, and returns a function with its abstract arguments and the arguments that it
may overwrite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ttpu_core.architecture import Architecture
from ttpu_core.generation.token_choice import TokenChoice
from ttpu_core.sharding.training_state import ADAMW, Recomputation
from ttpu_core.spec import ArchitectureSpec
from ttpu_core.spec.parameters import stacked_parameters, stacked_paths
from ttpu_jax.model.cache import KVCache
from ttpu_jax.model.causal_model import causal_model
from ttpu_jax.model.loss import TokenBatch, token_batch
from ttpu_jax.model.modules import Runtime
from ttpu_jax.ops.sampling import SamplingFeatures, sample, sampling_inputs
from ttpu_jax.params.initialize import abstract_parameters
from ttpu_jax.params.padding import pad_for
from ttpu_jax.train.adapters import find_adapters
from ttpu_jax.train.from_settings import step_from_settings, trained_paths
from ttpu_jax.train.step import TrainStep, abstract_tokens, adamw

if TYPE_CHECKING:
    from ttpu_train.runner import StepSettings

Task = Literal["decode", "prefill", "train"]


@dataclass(frozen=True)
class AbstractProgram:
    """A function with the abstract arguments to compile it for.

    Attributes:
        function: the function to compile.
        arguments: its arguments as `jax.ShapeDtypeStruct`s.
        donated: the indices of the arguments that it may overwrite.
        held: the arrays among the arguments that it overwrites: a cache, or weights and optimizer state.
        spec: the architecture, padded for the mesh.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...]
    held: Any
    spec: ArchitectureSpec


def inference_step(
    spec: ArchitectureSpec,
    runtime: Runtime,
    dtype: np.dtype[Any],
    *,
    batch: int,
    tokens: int,
    context: int,
    stacked: bool,
) -> AbstractProgram:
    """Make a decode step or a prefill, which returns each row's likeliest next token and the updated cache.

    Args:
        spec: not padded yet.
        runtime: the placement of arrays and the attention implementation.
        dtype: of weights, activations and cache.
        batch: number of rows.
        tokens: tokens of each row: 1 for a decode step, `context` for a prefill of an empty cache.
        context: slots of each row's cache.
        stacked: stack equal layers and scan over them.
    """
    placement = runtime.placement
    spec, _ = pad_for(spec, placement)
    model = causal_model(spec, runtime, stacked=stacked)
    params = abstract_parameters(model.parameters, placement, dtype)
    cache = model.empty_cache(batch, context, dtype, abstract=True)

    def step(params: dict[str, jax.Array], tokens: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache | None]:
        logits, updated = model.forward(params, tokens, cache=cache, last_only=True, fresh=tokens.shape[1] > 1)
        greedy = sampling_inputs([TokenChoice(seed=0)] * batch)
        return sample(logits[:, -1], greedy, None, jnp.zeros(batch, jnp.int32), SamplingFeatures()).token, updated

    return AbstractProgram(step, (params, abstract_tokens(batch, tokens, placement), cache), (2,), cache.layers, spec)


def train_step(
    spec: ArchitectureSpec,
    runtime: Runtime,
    dtype: np.dtype[Any],
    *,
    batch: int,
    tokens: int,
    stacked: bool,
    optimizer: optax.GradientTransformation | None = None,
    remat: Recomputation = "full",
) -> AbstractProgram:
    """Make one training step on the next-token loss of `batch` rows, as `ttpu_jax.train.step` does.

    Args:
        spec: not padded yet.
        runtime: the placement of arrays and the attention implementation.
        dtype: the dtype that the model computes in; `TrainingState` gives the dtypes of weights and moments.
        batch: number of rows.
        tokens: tokens of each row.
        stacked: stack equal layers and scan over them.
        optimizer: AdamW by default.
        remat: what the backward pass computes again.

    Returns:
        The step, which returns weights, optimizer state and loss.
    """
    placement = runtime.placement
    spec, paddings = pad_for(spec, placement)
    runtime = runtime.in_training()
    model = causal_model(spec, runtime, stacked=stacked, remat=remat)
    step = TrainStep(model, dtype, paddings, optimizer=optimizer or adamw())
    params = abstract_parameters(model.parameters, placement, np.dtype(ADAMW.master_dtype))
    state = step.abstract_state(params)
    arguments = (params, state, abstract_tokens(batch, tokens, placement))

    def update(params: dict[str, jax.Array], state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        params, state, figures = step(params, state, token_batch(tokens))
        return params, state, figures.loss

    return AbstractProgram(update, arguments, (0, 1), (params, state), spec)


def run_step(
    architecture: Architecture,
    runtime: Runtime,
    settings: StepSettings,
    *,
    batch: int,
    tokens: int,
    packed: bool,
) -> AbstractProgram:
    """Make the update of a training run, as its runner compiles it.

    Args:
        architecture: the model, not padded yet.
        runtime: the placement of arrays and the attention implementation.
        settings: of the run.
        batch: number of rows, of all parts of an update together.
        tokens: tokens of each row.
        packed: rows hold several sequences.

    Raises:
        RequestError: settings that contradict the model or the mesh.
        UnsupportedError: the model cannot be trained so.
    """
    spec, paddings = pad_for(architecture.spec, runtime.placement)
    table = stacked_parameters(spec)
    copies = dict(stacked_paths(spec, spec.parameters))
    adapters = None
    if settings.adapters is None:
        trained = trained_paths(settings.trainable, table, copies, spec.model_type)
    else:
        adapters = find_adapters(settings.adapters, architecture.mapping, spec, paddings)
        trained = adapters.whole
    step = step_from_settings(settings, spec, runtime, paddings, architecture.config, table, trained, adapters)
    zero = step.zero
    assert zero is not None
    if adapters is not None:
        table, trained = {**table, **adapters.table(zero.weights)}, trained | set(adapters.names)
    params = {
        path: jax.ShapeDtypeStruct(
            parameter.shape,
            ADAMW.master_dtype if path in trained or adapters is None else parameter.dtype or step.dtype,
            sharding=(zero.state if path in trained else zero.weight)(path, parameter),
        )
        for path, parameter in table.items()
    }
    state = step.abstract_state(params)
    ids: Any = abstract_tokens(batch, tokens, zero.weights)
    weights: Any = jax.ShapeDtypeStruct(ids.shape, jnp.float32, sharding=ids.sharding)
    rows = TokenBatch(ids, weights, ids, ids if packed else None)

    def update(params: dict[str, jax.Array], state: Any, batch: TokenBatch, number: jax.Array) -> tuple[Any, Any, Any]:
        return step(params, state, batch, number)

    number = jax.ShapeDtypeStruct((), jnp.int32, sharding=zero.weights.whole())
    return AbstractProgram(update, (params, state, rows, number), (0, 1), (params, state), spec)
