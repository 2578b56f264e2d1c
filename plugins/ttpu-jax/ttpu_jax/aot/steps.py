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

from ttpu_core.generation.token_choice import TokenChoice
from ttpu_core.sharding.training_state import ADAMW
from ttpu_core.spec import ArchitectureSpec
from ttpu_jax.model.cache import KVCache
from ttpu_jax.model.causal_model import causal_model
from ttpu_jax.model.modules import Runtime
from ttpu_jax.ops.sampling import SamplingFeatures, sample, sampling_inputs
from ttpu_jax.params.initialize import abstract_parameters
from ttpu_jax.params.padding import pad_for
from ttpu_jax.train.step import TrainStep, abstract_tokens, adamw

Task = Literal["decode", "prefill", "train"]


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
) -> AbstractProgram:
    """One step on the next-token loss of `batch` rows, as `ttpu_jax.train.step` makes it.

    Args:
        spec: not padded yet.
        runtime: where arrays live and which attention runs.
        dtype: what the model computes in; weights and moments are as `TrainingState` has them.
        batch: rows.
        tokens: of each row.
        stacked: equal layers are stacked and scanned over.
        optimizer: AdamW by default.

    Returns:
        The step, which gives weights, optimizer state and loss.
    """
    placement = runtime.placement
    spec, paddings = pad_for(spec, placement)
    model = causal_model(spec, runtime, stacked=stacked, remat=ADAMW.remat)
    step = TrainStep(model, dtype, paddings, optimizer=optimizer or adamw())
    params = abstract_parameters(model.parameters, placement, np.dtype(ADAMW.master_dtype))
    state = step.abstract_state(params)
    arguments = (params, state, abstract_tokens(batch, tokens, placement))
    return AbstractProgram(step, arguments, (0, 1), (params, state), spec)
