"""Compiles the update of a run for a slice that need not be there: `ttpu train --dry-run`."""

from __future__ import annotations

from typing import Any

from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_core.sharding.parallelism import resolve_parallelism
from ttpu_core.sharding.strategy import TRAINING_STRATEGY
from ttpu_core.spec.training_flops import training_flops
from ttpu_train.arguments import TrainingArguments
from ttpu_train.config_file import TrainingFile
from ttpu_train.deepspeed import merged
from ttpu_train.planned import following_plan, planned_slice, predicted_memory
from ttpu_train.runner import CompiledTraining


def dry_run(asked: TrainingFile, topology: str) -> dict[str, Any]:
    """Compile the update that a training file describes. Neither data nor weights are read, but for a head that the
    config ties to the embedding.

    Returns:
        The figures of `CompiledTraining` by name, tokens_per_second_per_device and mfu; and of the planner plan_bytes
        and plan_held_bytes, what it predicts of peak_bytes and held_bytes, or None with the reason in plan_note.

    Raises:
        RequestError: a mesh that is no text, settings that contradict the model, a plan for another slice, or rows that
            are longer than the positions that the model has learned.
        PlanError: the plan is damaged, or is not one to train.
        UnsupportedError: the backend cannot compile for absent devices, or the update does not fit.
    """
    from ttpu_core.backend import CompilesTraining
    from ttpu_core.loading import planned_architecture
    from ttpu_train.inputs import training_backend, warn_of_long_rows

    runs = training_backend(asked.trainer.get("backend"))
    if not isinstance(runs, CompilesTraining):
        raise UnsupportedError(
            f"an update was to be compiled for {topology}, but the backend {runs.name!r} compiles only for devices "
            "that are there: use backend: jax."
        )
    method = asked.trainer.get("method", "sft")
    if method != "sft":
        raise RequestError(
            f"an update was to be compiled for {topology} with method={method!r}, but only updates on the data's own "
            "tokens are compiled for absent devices: leave method out, which compiles a similar update."
        )
    deepspeed = asked.trainer.get("deepspeed")
    args = TrainingArguments.read(asked.arguments if deepspeed is None else merged(asked.arguments, deepspeed))
    args = following_plan(args, str(asked.trainer["model"]), asked.trainer.get("load_options") or {})
    followed = planned_slice(args, topology)
    strategy = args.parallelism_strategy if followed is None else str(followed)
    if strategy is not None and not isinstance(strategy, str):
        raise RequestError(
            f"parallelism_strategy={strategy!r} was given, but a slice is divided by a name or a mesh: write text such "
            "as fsdp or data=2,tensor=8."
        )
    architecture = planned_architecture(str(asked.trainer["model"]))
    warn_of_long_rows(args.max_length, architecture.spec)
    found: CompiledTraining = runs.compile_training(
        architecture,
        topology,
        args.step_settings(max(args.max_steps, 1)),
        rows=args.per_device_train_batch_size,
        length=args.max_length,
        packed=args.packing,
        parallelism_strategy=strategy,
    )
    figures = {name: getattr(found, name) for name in CompiledTraining.__annotations__}
    rate = found.rows * found.length / found.seconds / found.devices
    mfu = rate * training_flops(architecture.spec, found.length) / found.peak_flops
    mesh = followed or resolve_parallelism(strategy or "fsdp", found.devices, usual=TRAINING_STRATEGY)
    plan = predicted_memory(args, architecture.spec, topology, mesh, found.rows)
    return {**figures, "tokens_per_second_per_device": rate, "mfu": mfu, **plan}
