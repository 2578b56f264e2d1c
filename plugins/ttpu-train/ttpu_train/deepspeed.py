"""Reads a DeepSpeed configuration as training arguments. "auto" leaves a value to the arguments; a key that means
nothing to a compiled program is named in a warning; any other key is refused by name."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ttpu_core.errors import RequestError

AUTO = "auto"

NO_EFFECT = {
    "": ("wall_clock_breakdown", "memory_breakdown", "dump_state", "disable_allgather", "prescale_gradients",
         "sparse_gradients", "zero_allow_untested_optimizer",
         "zero_force_ds_cpu_optimizer", "communication_data_type", "gradient_predivide_factor"),
    "zero_optimization": (
        "overlap_comm", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "allgather_partitions",
        "allgather_bucket_size", "round_robin_gradients", "sub_group_size", "load_from_fp32_weights",
        "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters",
        "stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save", "ignore_unused_parameters",
        "stage3_gather_fp16_weights_on_model_save", "allgather_bucket_count", "memory_efficient_linear",
        "stage3_use_all_reduce_for_fetch_params", "stage3_module_granularity_threshold", "elastic_checkpoint",
    ),
    "activation_checkpointing": (
        "partition_activations", "contiguous_memory_optimization", "number_checkpoints",
        "synchronize_checkpoint_boundary", "profile",
    ),
}  # fmt: skip
"""Keys about how PyTorch's processes exchange buffers, by section: a compiler schedules that here."""

OFFLOAD_WITHOUT_EFFECT = ("pin_memory", "buffer_count", "fast_init")
"""Keys of offload_optimizer about PyTorch's copies: the host's memory is always pinned here."""

OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "lion": "lion", "sgd": "sgd", "muon": "muon"}
"""DeepSpeed's names, in small letters. Its Adam decays weights as AdamW does."""
OPTIMIZER_KEYS = {
    "lr": "learning_rate", "eps": "adam_epsilon", "weight_decay": "weight_decay", "momentum": "momentum"
}  # fmt: skip
REPORTERS: Mapping[str, Mapping[str, str]] = {
    "tensorboard": {"output_path": "the log is in output_dir/tensorboard", "job_name": ""},
    "wandb": {
        "project": "set the environment variable WANDB_PROJECT",
        "team": "set the environment variable WANDB_ENTITY",
        "group": "set the environment variable WANDB_RUN_GROUP",
    },
}
"""Sections of trackers, and what to do in place of their keys."""
SWITCHED = (
    "amp", "autotuning", "comms_logger", "csv_monitor", "comet", "curriculum_learning", "data_efficiency", "eigenvalue",
    "flops_profiler", "hybrid_engine", "progressive_layer_drop", "torch_autocast", "torch_profiler",
)  # fmt: skip
"""Sections that are accepted as long as they are not enabled."""
DEFAULT_WARMUP = 1000
"""Updates of a warm-up, in DeepSpeed's schedules, where warmup_num_steps is missing."""
SCHEDULES = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def read_deepspeed(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Training arguments by name.

    Args:
        config: a JSON file, or its content.

    Raises:
        RequestError: the file cannot be read, or holds a key or a value that is not supported.
    """
    content = read_content(config)
    reader = _Reader()
    found = dict(reader.arguments(content))
    if reader.unused:
        warnings.warn(
            f"the DeepSpeed configuration has {', '.join(reader.unused)}, which have no effect here: the compiler "
            "schedules what devices exchange",
            stacklevel=3,
        )
    return found


def read_content(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a configuration: of a JSON file, or a copy of its content.

    Raises:
        RequestError: the file cannot be read.
    """
    return dict(config) if isinstance(config, Mapping) else _content(Path(config).expanduser())


def merged(arguments: Mapping[str, Any], config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Training arguments with those of a DeepSpeed configuration. learning_rate=None is none that was given.

    Raises:
        RequestError: the two differ, or the configuration is not supported.
    """
    found = read_deepspeed(config)
    arguments = {name: value for name, value in arguments.items() if name != "learning_rate" or value is not None}
    for name, value in found.items():
        if name in arguments and arguments[name] != value:
            raise RequestError(
                f"{name}={arguments[name]!r} was given, but the DeepSpeed configuration says {value!r}: give one of "
                'them, or write "auto" there.'
            )
    return {**arguments, **found}


class _Reader:
    """unused: keys that were found and have no effect."""

    def __init__(self) -> None:
        self.unused: list[str] = []

    def arguments(self, content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        simple: dict[str, Callable[[Any], tuple[str, Any]]] = {
            "train_micro_batch_size_per_gpu": lambda value: ("per_device_train_batch_size", int(value)),
            "gradient_accumulation_steps": lambda value: ("gradient_accumulation_steps", int(value)),
            "gradient_clipping": lambda value: ("max_grad_norm", float(value)),
            "steps_per_print": lambda value: ("logging_steps", _interval(value)),
        }
        sections = {
            "zero_optimization": self._zero,
            "optimizer": self._optimizer,
            "scheduler": self._scheduler,
            "bf16": self._bf16,
            "bfloat16": self._bf16,
            "fp16": self._fp16,
            "activation_checkpointing": self._activation_checkpointing,
            "tensorboard": lambda section: self._reporter("tensorboard", section),
            "wandb": lambda section: self._reporter("wandb", section),
            "data_types": self._data_types,
        }
        known = [*simple, *sections, "train_batch_size"]
        reporters = tuple(name for name in REPORTERS if _is_on(content.get(name)))
        if reporters:
            yield "report_to", reporters[0] if len(reporters) == 1 else reporters
        # A schedule's peak is the optimizer's learning rate, whichever section comes first in the file.
        for key, value in sorted(content.items(), key=lambda item: item[0] == "scheduler"):
            if value == AUTO or key in self._ignored("", key):
                continue
            if key in SWITCHED and isinstance(value, Mapping) and value.get("enabled") is False:
                continue
            if key in simple:
                try:
                    yield simple[key](value)
                except (TypeError, ValueError, OverflowError):
                    raise _refused(key, value, "a number, or auto") from None
            elif key in sections:
                if not isinstance(value, Mapping):
                    raise _refused(key, value, "an object with keys")
                yield from sections[key](value)
            elif key == "train_batch_size":
                raise _refused(
                    key, value, "auto: it follows from train_micro_batch_size_per_gpu, the accumulation and the mesh"
                )
            else:
                raise RequestError(
                    f"the DeepSpeed configuration has {key!r}, but {', '.join(known)} are supported: take it out."
                )

    def _ignored(self, section: str, key: str) -> tuple[str, ...]:
        """The key alone if it has no effect, which is noted, else nothing."""
        if key not in NO_EFFECT[section]:
            return ()
        self.unused.append(f"{section}.{key}" if section else key)
        return (key,)

    def _zero(self, section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for key, value in section.items():
            if value == AUTO or key in self._ignored("zero_optimization", key):
                continue
            if key == "stage":
                if value not in (0, 1, 2, 3):
                    raise _refused("zero_optimization.stage", value, "0, 1, 2 or 3")
                yield "zero_stage", value
            elif key == "offload_optimizer":
                yield from self._offload(value)
            elif key in ("cpu_offload", "cpu_offload_params", "cpu_offload_use_pin_memory"):
                if value:
                    raise _refused(f"zero_optimization.{key}", value, "false: write offload_optimizer in its place")
            elif key == "offload_param":
                device = value.get("device") if isinstance(value, Mapping) else value
                if device not in (None, "none"):
                    raise _refused(f"zero_optimization.{key}.device", device, "none: weights stay on devices")
            else:
                raise _unknown("zero_optimization", key)

    def _offload(self, value: Any) -> Iterator[tuple[str, Any]]:
        section = value if isinstance(value, Mapping) else {"device": value}
        name = "zero_optimization.offload_optimizer"
        for key in section:
            if section[key] is None:
                continue
            if key in OFFLOAD_WITHOUT_EFFECT:
                self.unused.append(f"{name}.{key}")
            elif key != "device":
                raise _unknown(name, key)
        device = section.get("device")
        if device not in (None, "none", "cpu"):
            raise _refused(f"{name}.device", device, "cpu or none")
        if device == "cpu":
            yield "offload_optimizer", True

    def _optimizer(self, section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for key in section:
            if key not in ("type", "params"):
                raise _unknown("optimizer", key)
        name = section.get("type", "AdamW")
        if str(name).lower() not in OPTIMIZERS:
            raise _refused("optimizer.type", name, "Adam, AdamW, Lion, SGD or Muon")
        yield "optim", OPTIMIZERS[str(name).lower()]
        for key, value in _params("optimizer", section).items():
            if value == AUTO or (key in ("torch_adam", "adam_w_mode") and value):
                continue
            if key == "betas":
                if not isinstance(value, list | tuple) or len(value) != 2:
                    raise _refused("optimizer.params.betas", value, "a list of two numbers, or auto")
                yield "adam_beta1", _float("optimizer.params.betas", value[0])
                yield "adam_beta2", _float("optimizer.params.betas", value[1])
            elif key in OPTIMIZER_KEYS:
                yield OPTIMIZER_KEYS[key], _float(f"optimizer.params.{key}", value)
            else:
                raise _unknown("optimizer.params", key)

    def _scheduler(self, section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        name = section.get("type")
        if name not in SCHEDULES:
            raise _refused("scheduler.type", name, " or ".join(SCHEDULES))
        yield "lr_scheduler_type", SCHEDULES[name]
        given = _params("scheduler", section)
        if given.get("warmup_type") not in ("linear", AUTO):
            if given.get("warmup_type", "log") != "log":
                raise _refused("scheduler.params.warmup_type", given["warmup_type"], "linear")
            warnings.warn(
                "the DeepSpeed configuration warms up by a logarithm (warmup_type, whose default is log), but the "
                'learning rate rises linearly here: write "warmup_type": "linear"',
                stacklevel=5,
            )
        if "warmup_num_steps" not in given:
            yield "warmup_steps", DEFAULT_WARMUP
        for key, value in given.items():
            if value == AUTO or key in ("warmup_type", "last_batch_iteration"):
                continue
            if key == "warmup_num_steps":
                yield "warmup_steps", int(_float(f"scheduler.params.{key}", value))
            elif key == "warmup_max_lr":
                yield "learning_rate", _float(f"scheduler.params.{key}", value)
            elif key == "total_num_steps":
                yield "max_steps", int(_float(f"scheduler.params.{key}", value))
            elif key in ("warmup_min_lr", "warmup_min_ratio", "cos_min_ratio"):
                if key == "cos_min_ratio":
                    yield "lr_scheduler_kwargs", {"min_lr_rate": _float(f"scheduler.params.{key}", value)}
                elif _float(f"scheduler.params.{key}", value):
                    raise _refused(f"scheduler.params.{key}", value, "0")
            else:
                raise _unknown("scheduler.params", key)

    def _bf16(self, section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for key, value in section.items():
            if key != "enabled":
                raise _unknown("bf16", key)
            if value not in (True, False, AUTO):
                raise _refused("bf16.enabled", value, "true, false or auto")
            if value != AUTO:
                yield "bf16", bool(value)

    def _fp16(self, section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        if section.get("enabled") not in (None, False, AUTO):
            raise _refused("fp16.enabled", section["enabled"], "false: TPUs compute in bfloat16, which needs no scale")
        yield from ()

    def _activation_checkpointing(self, section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for key, value in section.items():
            if key == "cpu_checkpointing":
                if value not in (False, AUTO):
                    raise _refused("activation_checkpointing.cpu_checkpointing", value, "false")
            elif key not in self._ignored("activation_checkpointing", key):
                raise _unknown("activation_checkpointing", key)
        yield "gradient_checkpointing", True

    def _reporter(self, name: str, section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for key, value in section.items():
            if key not in ("enabled", *REPORTERS[name]):
                raise _unknown(name, key)
            if key == "job_name" and _is_on(section):
                yield "run_name", str(value)
            elif key != "enabled" and _is_on(section):
                warnings.warn(
                    f"the DeepSpeed configuration has {name}.{key}, which has no effect here: {REPORTERS[name][key]}",
                    stacklevel=5,
                )

    def _data_types(self, section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for key, value in section.items():
            if key != "grad_accum_dtype":
                raise _unknown("data_types", key)
            if value not in (None, AUTO, "fp32"):
                raise _refused("data_types.grad_accum_dtype", value, "fp32: gradients are summed in float32")
        yield from ()


def _is_on(section: Any) -> bool:
    return isinstance(section, Mapping) and section.get("enabled") not in (None, False, AUTO)


def _params(name: str, section: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys in the params of a section."""
    params = section.get("params", {})
    if not isinstance(params, Mapping):
        raise _refused(f"{name}.params", params, "an object with keys")
    return params


def _float(key: str, value: Any) -> float:
    """A number of the configuration, which may be written as a text, as in "1e-4"."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise _refused(key, value, "a number, or auto") from None


def _interval(value: Any) -> int:
    """Updates between two lines of the log; infinity, as accelerate writes it, is never."""
    return sys.maxsize if value == math.inf else int(value)


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RequestError(
            f"the DeepSpeed configuration {path} was asked for, but it does not exist: correct the path."
        ) from error
    except (OSError, ValueError) as error:
        raise RequestError(
            f"the DeepSpeed configuration {path} was asked for, but it is no JSON ({' '.join(str(error).split())}): "
            "correct it."
        ) from error
    if not isinstance(content, dict):
        raise RequestError(
            f"the DeepSpeed configuration {path} holds a {type(content).__name__}, but an object is needed: correct it."
        )
    return content


def _refused(key: str, value: Any, allowed: str) -> RequestError:
    return RequestError(f"the DeepSpeed configuration has {key} = {value!r}, but it must be {allowed}: change it.")


def _unknown(section: str, key: str) -> RequestError:
    return RequestError(
        f"the DeepSpeed configuration has {section}.{key}, which is not supported: take it out (see docs/training.md)."
    )
