"""DeepSpeed configurations as training arguments."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from ttpu_core.errors import RequestError
from ttpu_train.arguments import TrainingArguments
from ttpu_train.deepspeed import merged, read_deepspeed

# As transformers' documentation writes it.
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "train_batch_size": "auto",
    "gradient_accumulation_steps": 4,
    "gradient_clipping": "auto",
    "steps_per_print": 5,
    "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "optimizer": {"type": "Adam", "params": {"lr": 3e-4, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_type": "linear", "warmup_min_lr": 0, "warmup_num_steps": 7, "total_num_steps": 90},
    },
    "bf16": {"enabled": True},
    "fp16": {"enabled": "auto"},
    "activation_checkpointing": {"partition_activations": True},
    "wall_clock_breakdown": False,
    "tensorboard": {"enabled": True},
}


def test_every_key_becomes_an_argument(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(CONFIG))
    unused = r"overlap_comm, .*offload_optimizer.pin_memory, activation_checkpointing.partition_activations, wall_clock"
    with pytest.warns(UserWarning, match=unused):
        found = read_deepspeed(file)
    assert found == {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "logging_steps": 5,
        "zero_stage": 2,
        "offload_optimizer": True,
        "optim": "adamw",
        "learning_rate": 3e-4,
        "adam_beta1": 0.8,
        "adam_beta2": 0.99,
        "adam_epsilon": 1e-7,
        "lr_scheduler_type": "linear",
        "warmup_steps": 7,
        "max_steps": 90,
        "bf16": True,
        "gradient_checkpointing": True,
        "report_to": "tensorboard",
    }
    TrainingArguments.read(found)


def test_arguments_fill_what_is_auto_and_may_not_differ() -> None:
    assert merged({"max_grad_norm": 2.0}, {"gradient_clipping": "auto", "bf16": {"enabled": "auto"}}) == {
        "max_grad_norm": 2.0
    }
    assert merged({"max_grad_norm": 2.0}, {"gradient_clipping": 2}) == {"max_grad_norm": 2.0}
    with pytest.raises(RequestError, match=r"max_grad_norm=2.0 was given, but the DeepSpeed configuration says 1.0"):
        merged({"max_grad_norm": 2.0}, {"gradient_clipping": 1})
    adam = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    assert merged({"learning_rate": None}, adam)["learning_rate"] == 1e-4  # as `learning_rate: null` in a file


def test_a_logarithmic_warmup_is_said_to_be_linear_here() -> None:
    with pytest.warns(UserWarning, match="rises linearly here"):
        read_deepspeed({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = read_deepspeed(
            {
                "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_type": "linear", "cos_min_ratio": 0.1}},
                "zero_optimization": {"offload_optimizer": {"device": "none"}},
            }
        )
    kwargs = {"min_lr_rate": 0.1}
    assert found == {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": kwargs, "warmup_steps": 1000}  # its default


def test_the_schedules_peak_counts_and_all_trackers_are_kept() -> None:
    found = read_deepspeed({
        "scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear", "warmup_max_lr": 2e-3}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "tensorboard": {"enabled": True, "job_name": "first"},
        "wandb": {"enabled": True},
        "csv_monitor": {"enabled": False},
        "flops_profiler": {"enabled": False, "profile_step": 1},
        "data_types": {"grad_accum_dtype": "fp32"},
        "bfloat16": {"enabled": False},
        "zero_optimization": {"cpu_offload": False, "offload_optimizer": {"device": "none", "nvme_path": None}},
        "steps_per_print": float("inf"),
    })  # fmt: skip
    assert (found["learning_rate"], found["report_to"], found["run_name"]) == (2e-3, ("tensorboard", "wandb"), "first")
    assert TrainingArguments.read(found).logging_steps > 1e9
    with pytest.warns(UserWarning, match=r"wandb.project, which has no effect here: set .* WANDB_PROJECT"):
        read_deepspeed({"wandb": {"enabled": True, "project": "mine"}})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"curriculum_learning": {}}, "'curriculum_learning', but train_micro_batch_size_per_gpu"),
        ({"train_batch_size": 64}, "train_batch_size = 64, but it must be auto"),
        ({"gradient_clipping": "much"}, "gradient_clipping = 'much', but it must be a number"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage = 4"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, "zero_hpz_partition_size"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "must be cpu or none"),
        ({"zero_optimization": {"offload_optimizer": {"ratio": 0.5}}}, "offload_optimizer.ratio"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "offload_param.device = 'cpu'"),
        ({"zero_optimization": 2}, "zero_optimization = 2, but it must be an object"),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type = 'OneBitAdam'"),
        ({"optimizer": {"type": "AdamW", "params": {"amsgrad": True}}}, "optimizer.params.amsgrad"),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler.type = 'OneCycle'"),
        ({"optimizer": {"params": {"lr": "fast"}}}, "optimizer.params.lr = 'fast', but it must be a number"),
        ({"optimizer": {"params": {"betas": 0.9}}}, "optimizer.params.betas = 0.9, but it must be a list of two"),
        ({"optimizer": {"params": None}}, "optimizer.params = None, but it must be an object"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "auto", "warmup_max_lr": "x"}}}, "max_lr = 'x'"),
        ({"bf16": {"enabled": "no"}}, "bf16.enabled = 'no', but it must be true, false or auto"),
        ({"fp16": {"enabled": True}}, "fp16.enabled = True"),
        ({"zero_optimization": {"cpu_offload": True}}, "cpu_offload = True, but it must be false: write offload_opt"),
        ({"flops_profiler": {"enabled": True}}, "'flops_profiler', but train_micro_batch_size_per_gpu"),
        ({"tensorboard": {"folder": "x"}}, "tensorboard.folder, which is not supported"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "grad_accum_dtype = 'bf16'"),
        ({"steps_per_print": None}, "steps_per_print = None, but it must be a number"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "cpu_checkpointing = True"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as refused:
        read_deepspeed(config)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="does not exist"):
        read_deepspeed(tmp_path / "ds.json")
    (tmp_path / "ds.json").write_text("{")
    with pytest.raises(RequestError, match="is no JSON"):
        read_deepspeed(tmp_path / "ds.json")
