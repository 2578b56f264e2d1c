"""`ttpu.initialize`: an engine, its optimizer, data and schedule from a DeepSpeed configuration, as
`deepspeed.initialize` returns them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_train.arguments import TrainingArguments
from ttpu_train.data.loader import BatchLoader
from ttpu_train.deepspeed import AUTO, merged, read_content
from ttpu_train.engine import Engine, EngineOptimizer, EngineSchedule
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
    "model_parameters": "weights are held by the backend: choose them by trainable=['layers.*.attn.*']",
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
        **arguments: fields of `TrainingArguments`, as parallelism_strategy, max_length or packing. Without
            parallelism_strategy rows are divided over all devices, as in DeepSpeed.

    Returns:
        The engine, its optimizer, the micro-batches of the training data or None, and the schedule or None.

    Raises:
        RequestError: an argument or key that is unknown or cannot be mapped, or batch sizes that contradict each other.
        UnsupportedError: the backend trains no models.
    """
    for name, why in REFUSED.items():
        if arguments.pop(name, None) is not None:
            raise UnsupportedError(f"ttpu.initialize was given {name}, but {why}.")
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
    ends = found.get("lr_scheduler_type", "constant").startswith("constant") or "max_steps" in found
    if not ends:
        raise RequestError(
            f"the schedule {found['lr_scheduler_type']!r} was asked for, but it ends after a number of updates that is "
            "not given: write total_num_steps in the scheduler's params, or pass max_steps=N."
        )
    # The loop of the user ends the run: the number of updates is the schedule's alone.
    given = {**DEFAULTS, "max_steps": 1, **found}
    if given.get("parallelism_strategy") is None and isinstance(model, str | Path):
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
    engine = Engine(trainer)
    parts = engine.gradient_accumulation_steps()
    data = None if training_data is None else MicroBatches(cast(BatchLoader, trainer.training_batches), parts)
    return engine, EngineOptimizer(engine), data, EngineSchedule(engine) if "lr_scheduler_type" in found else None


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
