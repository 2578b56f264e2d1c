"""What a backend's runner and the checkpoints are told, by the arguments of a run."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from ttpu_train.arguments import TrainingArguments, steps_of
from ttpu_train.resuming import compare, kept_arguments


@pytest.mark.parametrize(
    ("given", "remat"),
    [
        ({}, "auto"),
        ({"gradient_checkpointing": True}, "full"),
        ({"gradient_checkpointing": False}, "none"),
        ({"gradient_checkpointing": True, "remat": "dots"}, "dots"),
        ({"remat": "full"}, "full"),
    ],
)
def test_what_is_computed_again_follows_from_both_arguments(given: Any, remat: str) -> None:
    assert TrainingArguments(**given).step_settings(1).remat == remat


def test_the_page_about_data_names_arguments_that_there_are() -> None:
    page = (Path(__file__).parents[3] / "docs" / "training-data.md").read_text()
    named = set(re.findall(r"`(\w+_\w+)(?:=[^`]*)?`", page))
    of_examples = {"input_ids", "attention_mask", "chat_template_kwargs"}
    of_trainer = {"train_dataset", "eval_dataset", "cache_dir", "processing_class", "chat_template"}
    assert named - of_examples - of_trainer <= {one.name for one in fields(TrainingArguments)}


def test_no_clipping_and_no_warmup_are_none_and_0() -> None:
    plain = TrainingArguments(max_grad_norm=0.0, bf16=False).step_settings(10)
    assert plain.optimizer.max_grad_norm is None and plain.optimizer.schedule.warmup_steps == 0
    assert plain.compute_dtype == "float32"
    assert [TrainingArguments(bf16=one).step_settings(1).compute_dtype for one in (True, None)] == ["bfloat16", "auto"]


def test_shares_of_a_run_are_rounded_up() -> None:
    assert [steps_of(value, 10) for value in (0.25, 0.01, 1, 3.0)] == [3, 1, 1, 3]
    assert steps_of(0.0, 10, least=0) == 0
    assert TrainingArguments(warmup_ratio=0.25).warmup(10) == 3
    assert TrainingArguments(warmup_ratio=0.25, warmup_steps=1).warmup(10) == 1


def test_the_best_checkpoint_stays_where_there_are_evaluations() -> None:
    assert TrainingArguments().checkpoint_policy().best_metric is None
    assert TrainingArguments(eval_strategy="epoch").checkpoint_policy().best_metric is None  # no metric is named
    args = TrainingArguments(eval_strategy="epoch", metric_for_best_model="hits", save_total_limit=2)
    policy = args.checkpoint_policy()
    assert (policy.keep, policy.best_metric, policy.greater_is_better) == (2, "eval_hits", True)


def test_arguments_of_a_checkpoint_are_those_of_json(caplog: pytest.LogCaptureFixture) -> None:
    def judge() -> None: ...

    args = TrainingArguments(mixture_weights=(1.0, 2.0))
    kept = kept_arguments(args, "grpo", {"reward_funcs": [judge], "beta": 0.1}, 8, 100)
    assert (kept["mixture_weights"], kept["reward_funcs"], kept["beta"]) == ([1.0, 2.0], ["judge"], 0.1)
    assert not compare(kept, dict(kept), tells=True) and not caplog.messages
    assert compare({**kept, "beta": 0.2}, kept, tells=False) == {"beta"} and not caplog.messages
    before = {name: value for name, value in kept.items() if name not in ("beta", "data_seed")}
    assert compare(before, kept, tells=True) == {"beta"}  # data_seed is None, as it was
    assert caplog.messages == ["resumed with other arguments than the checkpoint's: beta None → 0.1"]
