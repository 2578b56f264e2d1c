"""The training step that a run's settings describe: for a runner, and for a slice that need not be there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import jax

from ttpu_core.config import ModelConfig
from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_core.sharding.padding import Paddings
from ttpu_core.sharding.strategy import STAGE
from ttpu_core.sharding.training_state import ELEMENTWISE, Recomputation
from ttpu_core.spec import ArchitectureSpec, Parameter
from ttpu_jax.model.causal_model import causal_model
from ttpu_jax.model.loss import LossSums, TokenBatch, settings_for, summed_loss
from ttpu_jax.model.modules import Runtime
from ttpu_jax.model.pipeline import check_stages, stages_of
from ttpu_jax.params.dtypes import model_dtype
from ttpu_jax.train.adapters import AdaptedModel, Adapters
from ttpu_jax.train.objectives.grpo import grpo_sums
from ttpu_jax.train.objectives.preference import dpo_sums, kto_sums, kto_whole, orpo_sums, orpo_whole
from ttpu_jax.train.objectives.reward import SCORE, RewardDecoder, reward_sums
from ttpu_jax.train.offload import offload_for
from ttpu_jax.train.optimizers import matches, optimizer_for, schedule_of
from ttpu_jax.train.step import TrainStep, WholeBatch
from ttpu_jax.train.zero import zero_placements

if TYPE_CHECKING:
    from ttpu_train.runner import LossSettings, StepSettings

OBJECTIVES: Mapping[str, Callable[..., LossSums]] = {
    "dpo": dpo_sums,
    "grpo": grpo_sums,
    "kto": kto_sums,
    "orpo": orpo_sums,
    "reward": reward_sums,
}
"""The method of an objective → its loss; `JaxTrainRunner.teach` gives a step that of distillation."""


def step_from_settings(
    settings: StepSettings,
    spec: ArchitectureSpec,
    runtime: Runtime,
    paddings: Paddings,
    config: ModelConfig,
    table: Mapping[str, Parameter],
    trained: frozenset[str],
    adapters: Adapters | None = None,
) -> TrainStep:
    """Make the step of a run.

    Args:
        settings: of the run; `remat="auto"` is made as "full".
        spec: padded for the mesh.
        runtime: of the model; ZeRO decides where weights are, and the settings in what dtype they are multiplied.
        paddings: of the parameters of single layers.
        config: of the checkpoint.
        table: stacked path → parameter.
        trained: the stacked paths that are trained.
        adapters: that are trained too.

    Raises:
        RequestError: settings that contradict the mesh.
        UnsupportedError: the mesh pads what the optimizer takes whole.
    """
    if paddings and settings.optimizer.name not in ELEMENTWISE:
        raise UnsupportedError(
            f"the optimizer {settings.optimizer.name!r} was asked for on a mesh that pads parameters, but it "
            f"computes with whole matrices or rows: use {', '.join(ELEMENTWISE)}, or a mesh whose tensor axis divides "
            "the model's heads and sizes."
        )
    if paddings and settings.offload_optimizer:
        raise UnsupportedError(
            "offload_optimizer was asked for on a mesh that pads parameters, whose optimizer state is held on the "
            "devices: use a mesh whose tensor axis divides the model's heads and sizes, or leave offload_optimizer out."
        )
    zero = zero_placements(runtime.placement, settings.zero_stage)
    platform = runtime.placement.platform
    usual = "float32" if platform == "cpu" else "bfloat16"
    dtype = model_dtype(usual if settings.compute_dtype == "auto" else settings.compute_dtype, platform=platform)
    runtime = replace(runtime.in_training(), placement=zero.weights, dtype=dtype, stream="whole")
    remat = cast("Recomputation", "full" if settings.remat == "auto" else settings.remat)
    model = causal_model(spec, runtime, stacked=True, remat=remat)
    loss = settings_for(settings.loss, config)
    stages, accumulation = stages_of(zero.weights), settings.accumulation
    if stages > 1:
        _check_pipeline(settings, loss, spec, stages)
        model = replace(model, microbatches=accumulation)
    interleaved = stages > 1 and settings.pipeline_schedule == "1f1b"
    if adapters is not None:
        model = AdaptedModel(spec, model.runtime, stacked=True, remat=remat, adapters=adapters)
        table, trained = {**table, **adapters.table(zero.weights)}, trained | set(adapters.names)
    if settings.objective is not None and settings.objective.method == "reward":
        model = RewardDecoder(spec, model.runtime, stacked=True, remat=remat)
        table, trained = model.parameters, trained | {SCORE}
    return TrainStep(
        model,
        dtype,
        paddings,
        partial(_loss, loss, settings.objective),
        optimizer_for(settings.optimizer, {path: table[path] for path in trained}),
        accumulation if stages == 1 or interleaved else 1,
        trained.__contains__,
        _rate(settings),
        settings.optimizer.max_grad_norm,
        settings.skip_nonfinite,
        zero,
        rows_per_example=1 if settings.objective is None else settings.objective.rows_per_example,
        of_whole_batch=_whole(settings),
        noise=None if adapters is None else partial(adapters.noise, settings.seed),
        offload=offload_for(settings, {path: table[path] for path in trained}, zero)
        if settings.offload_optimizer
        else None,
        interleaved=interleaved,
    )


def _check_pipeline(settings: StepSettings, loss: LossSettings, spec: ArchitectureSpec, stages: int) -> None:
    """Check that a run can be divided into stages.

    Raises:
        RequestError: an unknown schedule.
        UnsupportedError: layers that cannot be divided equally, or a loss that the schedule does not have.
    """
    check_stages(spec, stages)
    if settings.adapters is not None:
        raise UnsupportedError(
            f"{STAGE}={stages} was asked for with adapters, but they are trained without stages: use a mesh of fsdp or "
            "tensor, or train the weights without peft_config."
        )
    method = None if settings.objective is None else settings.objective.method
    if method in ("reward", "distill"):
        raise UnsupportedError(
            f"{STAGE}={stages} was asked for with method={method!r}, but its second head or model is not divided into "
            "stages: use a mesh of fsdp, tensor or expert."
        )
    whole = _whole(settings) is not None
    if settings.pipeline_schedule == "1f1b" and (whole or loss.router_aux_loss):
        found = "a loss of the whole batch" if whole else f"router_aux_loss={loss.router_aux_loss}"
        raise UnsupportedError(
            f"pipeline_schedule='1f1b' was asked for with {found}, but its backward pass begins before all rows have "
            "passed all layers: use pipeline_schedule='gpipe'."
        )


def trained_paths(
    patterns: Iterable[str] | None,
    parameters: Mapping[str, Parameter],
    copies: Mapping[str, tuple[str, ...]],
    model_type: str,
) -> frozenset[str]:
    """The stacked paths of the trained parameters, whose patterns are of the paths of layers. What transformers holds
    as a buffer is never trained.

    Args:
        patterns: fnmatch patterns; None trains all.
        parameters: by stacked path.
        copies: stacked path → the paths of its layers.
        model_type: of the model, for errors.

    Raises:
        RequestError: a pattern that matches nothing.
        UnsupportedError: a pattern that chooses some of equal layers.
    """
    table = [path for path, parameter in parameters.items() if parameter.trained]
    if patterns is None:
        return frozenset(table)
    patterns, found = tuple(patterns), set()
    for path in table:
        chosen = [matches(layer, patterns) for layer in copies.get(path, (path,))]
        if any(chosen) and not all(chosen):
            raise UnsupportedError(
                f"trainable={list(patterns)} chooses {path} in some layers and not in others, but equal layers are "
                "trained together: use patterns that choose all of them, as layers.*.mlp.*."
            )
        if all(chosen):
            found.add(path)
    every = [layer for path in table for layer in copies.get(path, (path,))]
    for pattern in patterns:
        if not any(matches(path, (pattern,)) for path in every):
            raise RequestError(
                f"trainable={pattern!r} was asked for, but no parameter of this {model_type} model has such a path: "
                f"use patterns of paths such as {every[0]} and {every[-1]}."
            )
    return frozenset(found)


def _loss(settings: Any, objective: Any, model: Any, params: Any, batch: TokenBatch) -> LossSums:
    if objective is None:
        return summed_loss(model, params, batch, settings)
    if objective.method not in OBJECTIVES:
        raise RequestError(
            f"an update with the objective {objective.method!r} was asked for, but there is no teacher: call teach() "
            "first."
        )
    return OBJECTIVES[objective.method](model, params, batch, objective, settings)


def _whole(settings: StepSettings) -> WholeBatch | None:
    objective = settings.objective
    if objective is not None and objective.method == "orpo":
        return orpo_whole
    if objective is not None and objective.method == "kto" and objective.rows_per_example == 2:
        return partial(kto_whole, tokens_at_once=settings.loss.tokens_at_once)
    return None


def _rate(settings: StepSettings) -> Callable[[jax.Array], jax.Array]:
    peak, share = settings.optimizer.learning_rate, schedule_of(settings.optimizer.schedule)
    return lambda number: peak * share(number)
