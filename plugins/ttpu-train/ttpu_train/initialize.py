"""`ttpu.initialize`: an engine, its optimizer, data and schedule from a DeepSpeed configuration, as
`deepspeed.initialize` returns them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_train.arguments import TrainingArguments
from ttpu_train.data.loader import BatchLoader
from ttpu_train.deepspeed import AUTO, merged, read_content
from ttpu_train.engine import Engine
from ttpu_train.engine_views import EngineOptimizer, EngineSchedule
from ttpu_train.micro_batches import MicroBatches
from ttpu_train.trainer import Trainer

DEFAULTS: Mapping[str, Any] = {
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "save_strategy": "no",
}
"""DeepSpeed's own, where the configuration says nothing."""
REFUSED = {
    "optimizer": "the optimizer is part of the compiled update: write it in the configuration",
    "model_parameters": "weights are held by the backend: choose them by trainable=['layers.*.attention.*']",
    "lr_scheduler": "the schedule is part of the compiled update: write it in the configuration",
    "mpu": "the mesh is chosen by parallelism_strategy",
    "collate_fn": "rows are made by max_length and packing: leave it out, or pass micro-batches of your own loader to "
    "the engine",
    "dist_init_required": "processes are joined by `ttpu launch`: leave it out",
    "distributed_port": "processes are joined by `ttpu launch`: leave it out",
    "mesh_param": "the mesh is chosen by parallelism_strategy",
    "config_params": "it is called config",
}
"""Arguments of deepspeed.initialize that mean nothing to a compiled update, and what to do."""

_SAVING = "call engine.save_checkpoint in the loop"
_EVALUATING = "evaluate in the loop: engine.eval(), then the engine"
_WATCHING = "look at loss.item() and engine.was_step_applied() in the loop"
OF_THE_LOOP = {
    "save_strategy": _SAVING,
    "save_steps": _SAVING,
    "save_total_limit": _SAVING,
    "eval_strategy": _EVALUATING,
    "eval_steps": _EVALUATING,
    "eval_on_start": _EVALUATING,
    "per_device_eval_batch_size": _EVALUATING,
    "eval_tasks": _EVALUATING,
    "eval_tasks_limit": _EVALUATING,
    "eval_tasks_num_fewshot": _EVALUATING,
    "eval_tasks_apply_chat_template": _EVALUATING,
    "eval_tasks_engine_options": _EVALUATING,
    "load_best_model_at_end": "call engine.load_checkpoint with the tag of the best",
    "metric_for_best_model": "save under a tag of its own what the loop finds best",
    "greater_is_better": "save under a tag of its own what the loop finds best",
    "resume_from_checkpoint": "call engine.load_checkpoint before the loop",
    "nan_limit": _WATCHING,
    "loss_spike_factor": _WATCHING,
    "loss_spike_action": _WATCHING,
    "hung_step_factor": "time the updates in the loop",
    "hung_step_seconds": "time the updates in the loop",
}
"""Fields of TrainingArguments that are of the trainer's loop and not of the user's, and what to do."""
OFF = (None, False, "no", 0)
"""Values of these that ask for nothing."""
ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt")
"""Schedules that need no number of updates."""

Initialized = tuple[Engine, EngineOptimizer, MicroBatches | None, EngineSchedule | None]


def initialize(
    args: Any = None,
    model: Any = None,
    *,
    training_data: Any = None,
    config: str | Path | Mapping[str, Any] | None = None,
    backend: str | None = None,
    tokenizer: Any = None,
    load_options: Mapping[str, Any] | None = None,
    cache_dir: str | Path | None = None,
    **arguments: Any,
) -> Initialized:
    """Make an engine that DeepSpeed's training loop drives: `loss = engine(batch)`, `engine.backward(loss)`,
    `engine.step()`.

    Args:
        args: an object whose `deepspeed_config` is the configuration's path, as DeepSpeed's arguments add it.
        model: a checkpoint's folder or Hub id, or a model that `AutoModelForTPU.from_pretrained` opened.
        training_data: as `train_dataset` of `ttpu.Trainer`; None makes no loader.
        config: the DeepSpeed configuration, as a JSON file or its content.
        backend: the name of an installed backend; None takes the default.
        tokenizer: of the data; None takes the checkpoint's.
        load_options: for opening the model.
        cache_dir: where tokenized data are kept.
        **arguments: fields of `TrainingArguments`, as parallelism_strategy, max_length or packing; those of a loop, as
            save_steps, are refused. Without parallelism_strategy rows are divided over all devices, as in DeepSpeed.
            num_train_epochs gives the schedule the number of updates in the training data.

    Returns:
        The engine, its optimizer, the micro-batches of the training data or None, and the schedule or None.

    Raises:
        RequestError: an argument or key that is unknown or cannot be mapped, or batch sizes that contradict each other.
        UnsupportedError: the backend trains no models.
    """
    for name, why in REFUSED.items():
        if arguments.pop(name, None) is not None:
            raise UnsupportedError(f"ttpu.initialize was given {name}, but {why}.")
    for name, why in OF_THE_LOOP.items():
        if name in arguments and arguments.pop(name) not in OFF:
            raise UnsupportedError(f"ttpu.initialize was given {name}, but the loop is yours: {why}.")
    config = getattr(args, "deepspeed_config", None) if config is None else config
    if model is None or config is None:
        missing = "model" if model is None else "config"
        raise RequestError(
            f"ttpu.initialize was called without {missing}, but an engine needs both: pass model=FOLDER and "
            "config=FILE, or args with deepspeed_config."
        )
    content = read_content(config)
    rows = content.pop("train_batch_size", AUTO)
    found = merged(arguments, content)
    _check_length(found, with_data=training_data is not None)
    # The loop of the user ends the run: the number of updates is the schedule's alone.
    given = {**DEFAULTS, "max_steps": 1, **found}
    if given.get("parallelism_strategy") is None and given.get("plan") is None and isinstance(model, str | Path):
        given["parallelism_strategy"] = "fsdp" if given.get("zero_stage") == 3 else "dp"
    trainer = Trainer(
        model,
        TrainingArguments.read(given),
        train_dataset=training_data,
        backend=backend,
        tokenizer=tokenizer,
        load_options=load_options,
        cache_dir=cache_dir,
    )
    shards = trainer.layout.shards
    if shards == 1:  # one device holds all that there is
        trainer.args = replace(trainer.args, zero_stage=0)
    if rows != AUTO:
        micro, parts = _batch_sizes(rows, found, shards)
        trainer.args = replace(trainer.args, per_device_train_batch_size=micro, gradient_accumulation_steps=parts)
    if "num_train_epochs" in found:
        updates = math.ceil(cast(BatchLoader, trainer.training_batches).steps_per_epoch * trainer.args.num_train_epochs)
        trainer.args = replace(trainer.args, max_steps=max(1, updates))
    engine = Engine(trainer)
    if training_data is not None:
        batches = cast(BatchLoader, trainer.training_batches)
        engine.training_dataloader = MicroBatches(batches, engine.gradient_accumulation_steps())
    schedule = engine.lr_scheduler if "lr_scheduler_type" in found else None
    return engine, engine.optimizer, engine.training_dataloader, schedule


def _check_length(found: Mapping[str, Any], *, with_data: bool) -> None:
    """Refuse what depends on the number of updates where that is not known.

    Raises:
        RequestError: it is not known, or known twice.
    """
    if found.get("max_steps", -1) > 0 and "num_train_epochs" in found:
        raise RequestError(
            f"num_train_epochs={found['num_train_epochs']!r} was given, but the schedule has {found['max_steps']:,} "
            "updates by total_num_steps or max_steps: give one of them."
        )
    if "num_train_epochs" in found and not with_data:
        raise RequestError(
            "num_train_epochs was given without training_data, but these are what the updates of an epoch are counted "
            "of: pass max_steps=N, the number of updates."
        )
    if found.get("max_steps", -1) > 0 or "num_train_epochs" in found:
        return
    schedule = found.get("lr_scheduler_type", DEFAULTS["lr_scheduler_type"])
    asked = None if schedule in ENDLESS else f"the schedule {schedule!r} was asked for, but it ends after"
    for name in ("warmup_steps", "warmup_ratio", "logging_steps"):
        value = found.get(name)
        if isinstance(value, float) and 0 < value < 1:
            asked = f"{name}={value:g} was given, but it is a share of"
    if asked is not None:
        raise RequestError(
            f"{asked} a number of updates that is not given: write total_num_steps in the scheduler's params, or pass "
            "max_steps=N, or num_train_epochs with training_data."
        )


def _batch_sizes(rows: Any, found: Mapping[str, Any], shards: int) -> tuple[int, int]:
    """The rows of a micro-batch and the accumulation that follow from those of an update: the product of both and the
    devices.

    Raises:
        RequestError: no whole numbers have this product.
    """
    whole = rows if isinstance(rows, int) else 0
    micro: int | None = found.get("per_device_train_batch_size")
    parts: int = found.get("gradient_accumulation_steps") or (1 if micro is None else whole // (micro * shards))
    if micro is None:
        micro = whole // (parts * shards)
    if not whole or micro * parts * shards != whole:
        raise RequestError(
            f"the DeepSpeed configuration has train_batch_size = {json.dumps(rows)}, but that is "
            "train_micro_batch_size_per_gpu times gradient_accumulation_steps times the devices that rows are divided "
            f'over, here {micro} x {parts} x {shards}: correct one of them, or write "auto".'
        )
    return micro, parts
