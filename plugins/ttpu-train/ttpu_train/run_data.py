"""The data of a run as its arguments, its method and its mesh make them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttpu_train.arguments import TrainingArguments
from ttpu_train.data.loader import BatchLoader, batch_loader
from ttpu_train.data.pairs import PairPlanner
from ttpu_train.data.settings import DataSettings
from ttpu_train.methods import Method
from ttpu_train.preference import PreferenceMethod
from ttpu_train.runner import RowLayout, TrainRunner

Planners = dict[tuple[int, bool], tuple[Any, PairPlanner]]
"""Rows of preferences by the id of their dataset and whether they are trained on, with the dataset, which stays so that
no other one gets its id."""


@dataclass(frozen=True)
class RunData:
    """Makes the loaders of a run.

    Attributes:
        args: of the run.
        method: of the run; None for "sft".
        tokenizer: of texts.
        layout: which rows are this process's.
        vocab_size: that ids lie below; None checks none.
        cache_dir: where tokenized data are kept.
        planners: rows of preferences that were made before.
    """

    args: TrainingArguments
    method: Method | None
    tokenizer: Any
    layout: RowLayout
    vocab_size: int | None
    cache_dir: str | Path | None
    planners: Planners

    def rows(self, *, training: bool) -> int:
        """This process's rows of a batch."""
        args, layout = self.args, self.layout
        each = args.per_device_train_batch_size * args.gradient_accumulation_steps
        return (each if training else args.per_device_eval_batch_size) * layout.shards // layout.share_count

    def settings(self, *, training: bool) -> DataSettings:
        """How rows are made of examples."""
        args = self.args
        return DataSettings(
            rows=self.rows(training=training),
            max_length=args.max_length,
            packing=args.packing,
            shuffle=training,
            seed=args.seed if args.data_seed is None else args.data_seed,
            epochs=None if training and args.max_steps > 0 else math.ceil(args.num_train_epochs) if training else 1,
            text_field=args.dataset_text_field,
            assistant_only_loss=args.assistant_only_loss,
            completion_only_loss=args.completion_only_loss,
            document_separator=args.document_separator,
            mixture_weights=None if args.mixture_weights is None or not training else tuple(args.mixture_weights),
            overlong=args.overlong,
            drop_last=training and args.dataloader_drop_last,
            num_workers=args.dataloader_num_workers if training else 0,
            vocab_size=self.vocab_size,
            cache_dir=self.cache_dir,
        )

    def loader(self, dataset: Any, runner: Callable[[], TrainRunner], *, training: bool) -> BatchLoader:
        """The batches of a dataset; `runner` gives the model that preferences are compared with."""
        settings = self.settings(training=training)
        if isinstance(self.method, PreferenceMethod):
            planner = self.planner(dataset, training=training)
            if not training:
                self.method.refer(planner, runner(), 1)
            return self.method.loader(planner, settings, self.layout)
        return batch_loader(dataset, self.tokenizer, settings, self.layout.share_index, self.layout.share_count)

    def planner(self, dataset: Any, *, training: bool) -> PairPlanner:
        """The rows of preferences, kept because comparing them with the model before training takes long."""
        assert isinstance(self.method, PreferenceMethod)
        key = id(dataset), training
        if key not in self.planners:
            made = self.method.planner(dataset, self.tokenizer, self.settings(training=training))
            self.planners[key] = dataset, made
        return self.planners[key][1]
