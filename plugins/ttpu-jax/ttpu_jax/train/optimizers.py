"""Optimizers and learning rate schedules from a run's settings. Transformations give the direction of an update; the
training step multiplies it by the learning rate, so that a schedule follows the number of the update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from ttpu_core.errors import RequestError
from ttpu_core.sharding.training_state import ADAMW
from ttpu_core.spec import Parameter, axes
from ttpu_jax.train.adam_8bit import scale_by_adam_8bit

if TYPE_CHECKING:
    from ttpu_train.runner import OptimizerSettings, ScheduleSettings

EMBEDDING_SHARE = 0.15
"""Of Muon's learning rate: that of the parameters that AdamW updates, as the shipped example was trained with."""
INVERSE_SQRT_TIMESCALE = 10_000  # of transformers, without a warm-up

Table = Mapping[str, Parameter]


def schedule_of(settings: ScheduleSettings) -> Callable[[jax.Array], jax.Array]:
    """The share of the peak rate by the number of the update, from 0: the formulas of `transformers.optimization`.

    Raises:
        RequestError: an unknown name.
    """
    shares = {
        "constant": _constant,
        "linear": _linear,
        "cosine": _cosine,
        "inverse_sqrt": _inverse_sqrt,
        "warmup_stable_decay": _warmup_stable_decay,
    }
    if settings.name not in shares:
        raise RequestError(
            f"the schedule {settings.name!r} was asked for, but learning rates follow {', '.join(shares)}: use one of "
            "these."
        )
    after, warmup = shares[settings.name], settings.warmup_steps
    # As in transformers, this schedule alone starts at its least rate.
    lowest = settings.min_ratio if settings.name == "warmup_stable_decay" else 0.0

    def share(number: jax.Array) -> jax.Array:
        count = number.astype(jnp.float32)
        rising = lowest + (1 - lowest) * count / max(1, warmup)
        return jnp.where(count < warmup, rising, jnp.maximum(0.0, after(count, settings)))

    return share


def _constant(count: jax.Array, settings: ScheduleSettings) -> jax.Array:
    return jnp.ones_like(count)


def _linear(count: jax.Array, settings: ScheduleSettings) -> jax.Array:
    return (settings.total_steps - count) / max(1, settings.total_steps - settings.warmup_steps)


def _cosine(count: jax.Array, settings: ScheduleSettings) -> jax.Array:
    progress = (count - settings.warmup_steps) / max(1, settings.total_steps - settings.warmup_steps)
    return _falling_cosine(progress, settings.min_ratio)


def _inverse_sqrt(count: jax.Array, settings: ScheduleSettings) -> jax.Array:
    timescale = settings.warmup_steps or INVERSE_SQRT_TIMESCALE
    return jax.lax.rsqrt(jnp.maximum(1.0, count + timescale - settings.warmup_steps) / timescale)


def _warmup_stable_decay(count: jax.Array, settings: ScheduleSettings) -> jax.Array:
    begin = settings.total_steps - settings.decay_steps
    progress = (count - begin) / max(1, settings.decay_steps)
    falling = jnp.where(progress < 1, _falling_cosine(progress, settings.min_ratio), settings.min_ratio)
    return jnp.where(count < begin, 1.0, falling)


def _falling_cosine(progress: jax.Array, lowest: float) -> jax.Array:
    return lowest + (1 - lowest) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))


def optimizer_for(settings: OptimizerSettings, table: Table) -> optax.GradientTransformation:
    """The transformation of gradients into the direction of an update, with decoupled weight decay, before the learning
    rate.

    AdamW, Lion and SGD treat each number by itself; adamw_8bit holds AdamW's moments in 8 bits. Muon orthogonalizes
    kernels, as matrices [out, in] of each layer and expert, times sqrt(max(1, out / in))
    (https://kellerjordan.github.io/posts/muon/); embeddings, the head, convolutions, biases and norms are updated by
    AdamW.
    Adafactor keeps the second moment of each matrix as its rows' and columns' means.

    Args:
        settings: of the run.
        table: path → shape and logical axes of each trained parameter.

    Raises:
        RequestError: an unknown name.
    """
    adam = partial(
        optax.scale_by_adam, settings.beta1, settings.beta2, settings.epsilon, mu_dtype=jnp.dtype(ADAMW.moment_dtype)
    )
    makers: dict[str, Callable[[], optax.GradientTransformation]] = {
        "adamw": adam,
        "adamw_8bit": lambda: scale_by_adam_8bit(settings.beta1, settings.beta2, settings.epsilon, table),
        "lion": lambda: optax.scale_by_lion(settings.beta1, settings.beta2),
        "sgd": lambda: optax.trace(settings.momentum) if settings.momentum else optax.identity(),
        "adafactor": lambda: optax.chain(optax.scale_by_factored_rms(), _clip_each_layer(table)),
        "muon": lambda: _muon(settings, table, adam()),
    }
    if settings.name not in makers:
        raise RequestError(
            f"the optimizer {settings.name!r} was asked for, but this backend has {', '.join(makers)}: use one of "
            "these."
        )
    direction = makers[settings.name]()
    if not settings.weight_decay:
        return direction
    decayed = {path: not matches(path, settings.no_decay) for path in table}
    return optax.chain(direction, optax.add_decayed_weights(settings.weight_decay, decayed))


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Whether a parameter's path matches one of the patterns of fnmatch."""
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def _muon(settings: OptimizerSettings, table: Table, adam: optax.GradientTransformation) -> Any:
    matrices = {path: _as_matrix(parameter) for path, parameter in table.items() if _is_matrix(path)}
    labels = {path: "muon" if path in matrices else "adam" for path in table}

    def numbers(params: Mapping[str, Any]) -> dict[str, Any]:
        return {path: matrices.get(path, rest) for path, rest in params.items()}

    def scaled(updates: Mapping[str, Any], _: Any) -> dict[str, Any]:
        return {
            path: update * _width_scale(update.shape, matrices[path]) if path in matrices else update
            for path, update in updates.items()
        }

    muon = optax.chain(
        contrib.scale_by_muon(beta=settings.momentum or 0.95, weight_dimension_numbers=numbers), optax.stateless(scaled)
    )
    return optax.partition({"muon": muon, "adam": optax.chain(adam, optax.scale(EMBEDDING_SHARE))}, labels)


def _width_scale(shape: tuple[int, ...], numbers: contrib.MuonDimensionNumbers) -> float:
    outputs = prod(shape[place] for place in numbers.output_axis)
    return float(max(1.0, outputs / shape[numbers.reduction_axis]) ** 0.5)


def _is_matrix(path: str) -> bool:
    """Whether a parameter multiplies vectors. A depthwise convolution multiplies single numbers."""
    return path.endswith(".kernel") and not path.endswith("conv.kernel") and not path.startswith("head.")


def _as_matrix(kernel: Parameter) -> contrib.MuonDimensionNumbers:
    """A kernel [layers, expert, *out, in] is one matrix for each layer and expert, whatever its output axes are."""
    last, stacks = len(kernel.shape) - 1, (axes.LAYERS, axes.EXPERT, axes.ROUTED)
    outputs = tuple(place for place in range(last) if kernel.axes[place] not in stacks)
    return contrib.MuonDimensionNumbers(reduction_axis=last, output_axis=outputs)


def _clip_each_layer(table: Table) -> optax.GradientTransformation:
    """Scale updates down to a root mean square of 1 in each parameter of each layer (arXiv 1804.04235)."""

    def clip(path: str, update: jax.Array) -> jax.Array:
        first = 1 if table[path].axes[:1] == (axes.LAYERS,) else 0
        mean = jnp.mean(jnp.square(update), axis=tuple(range(first, update.ndim)), keepdims=True)
        return update / jnp.maximum(1.0, jnp.sqrt(mean))

    return optax.stateless(lambda updates, _: {path: clip(path, update) for path, update in updates.items()})
