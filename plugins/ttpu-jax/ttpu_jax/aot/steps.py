"""The programs that are compiled for a slice that is not there. In: an architecture, a placement and sizes; out: the
function, its abstract arguments, and which of them it may write over. What the mesh does not divide is padded here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ttpu_core.spec import ArchitectureSpec, axes
from ttpu_jax.model.cache import KVCache
from ttpu_jax.model.causal_model import causal_model
from ttpu_jax.model.loss import next_token_loss
from ttpu_jax.model.modules import Runtime
from ttpu_jax.ops.sampling import SamplingFeatures, SamplingParams, sample, sampling_inputs
from ttpu_jax.params.initialize import abstract_parameters
from ttpu_jax.params.padding import pad_for, project_gradients
from ttpu_jax.params.placement import Placement

Task = Literal["decode", "prefill", "train"]
LEARNING_RATE = 1e-4  # any number: the program is the same


@dataclass(frozen=True)
class AbstractProgram:
    """A function with what it is called with; `held` is what it writes over: a cache, or weights and optimizer. `spec`
    is the architecture as the mesh needs it."""

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
    """`tokens` tokens of each row, into a cache of `context` slots: one is a decode step, `context` the prefill of an
    empty cache. Gives each row's likeliest next token and the cache."""
    placement = runtime.placement
    spec, _ = pad_for(spec, placement)
    model = causal_model(spec, runtime, stacked=stacked)
    params = abstract_parameters(model.parameters, placement, dtype)
    cache = model.empty_cache(batch, context, dtype, abstract=True)

    def step(
        params: dict[str, jax.Array], tokens: jax.Array, cache: KVCache
    ) -> tuple[jax.Array, KVCache | None]:
        logits, updated = model.forward(params, tokens, cache=cache, last_only=True, fresh=tokens.shape[1] > 1)
        greedy = sampling_inputs([SamplingParams(seed=0)] * batch)
        return sample(logits[:, -1], greedy, None, jnp.zeros(batch, jnp.int32), SamplingFeatures()).token, updated

    return AbstractProgram(step, (params, _tokens(batch, tokens, placement), cache), (2,), cache.layers, spec)


def train_step(
    spec: ArchitectureSpec,
    runtime: Runtime,
    dtype: np.dtype[Any],
    *,
    batch: int,
    tokens: int,
    stacked: bool,
) -> AbstractProgram:
    """One step of AdamW on the next-token loss of `batch` rows. Weights and moments are float32; the model computes in
    `dtype`, and each layer's activations again for its gradient. Gives weights, optimizer state and loss. `spec` is not
    padded yet: a step leaves replicas equal and zeros zero."""
    placement = runtime.placement
    spec, paddings = pad_for(spec, placement)
    model = causal_model(spec, runtime, stacked=stacked, remat=True)
    table = model.parameters
    params = abstract_parameters(table, placement, np.dtype(np.float32))
    optimizer = optax.adamw(LEARNING_RATE)
    state = _optimizer_state(optimizer, params, placement)

    def step(params: dict[str, jax.Array], state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        def loss(params: dict[str, jax.Array]) -> jax.Array:
            held = {path: value if table[path].dtype else value.astype(dtype) for path, value in params.items()}
            return next_token_loss(model, held, tokens)

        value, gradients = jax.value_and_grad(loss)(params)
        gradients = project_gradients(gradients, spec, paddings, stacked=stacked)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return AbstractProgram(step, (params, state, _tokens(batch, tokens, placement)), (0, 1), (params, state), spec)


def _tokens(batch: int, tokens: int, placement: Placement) -> jax.ShapeDtypeStruct:
    shape = (batch, tokens)
    logical = placement.divisible((axes.BATCH, None), shape)
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=placement.sharding(logical, shape, "the tokens"))


def _optimizer_state(optimizer: Any, params: dict[str, jax.ShapeDtypeStruct], placement: Placement) -> Any:
    """Moments lie where their weights do."""
    whole = placement.sharding((), (), "the step count")

    def like(leaf: Any, parameter: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=parameter.sharding)

    return optax.tree_utils.tree_map_params(
        optimizer,
        like,
        jax.eval_shape(optimizer.init, params),
        params,
        transform_non_params=lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole),
    )
