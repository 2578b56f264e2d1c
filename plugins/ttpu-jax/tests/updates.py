"""Updates of a model of random parameters. In: an architecture, and how it runs; out: the losses."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax

from ttpu_core.spec import ArchitectureSpec
from ttpu_jax.model.causal_model import causal_model
from ttpu_jax.model.loss import token_batch
from ttpu_jax.model.modules import Runtime
from ttpu_jax.params.initialize import random_parameters
from ttpu_jax.params.placement import local_placement
from ttpu_jax.train.step import TrainStep

FLOAT32 = np.dtype(np.float32)


def losses_of(spec: ArchitectureSpec, runtime: Runtime, tokens: jax.Array, rate: float) -> list[float]:
    """The losses of three updates by gradient descent, from parameters that are the same on every mesh."""
    model = causal_model(spec, runtime, stacked=True, remat="full")
    whole = random_parameters(model.parameters, local_placement(), FLOAT32)
    params: dict[str, Any] = {path: jax.device_put(value, model.placements[path]) for path, value in whole.items()}
    step = TrainStep(model, FLOAT32, optimizer=optax.sgd(rate))
    state, update, found = jax.jit(step.init)(params), jax.jit(step), []
    for _ in range(3):
        params, state, figures = update(params, state, token_batch(tokens))
        found.append(float(figures.loss))
    return found
