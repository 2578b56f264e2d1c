"""The batches of a run: sources, tokens and row plans put together, read ahead by grain, with a position that can be
saved and restored to the row. The global batch does not depend on how many processes share it."""

from __future__ import annotations

import bisect
import math
import sys
import threading
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from ttpu_core.errors import CheckpointError, DataError, RequestError
from ttpu_train.data.packing import EpochPlan, RowPlanner
from ttpu_train.data.pairs import PairPlanner
from ttpu_train.data.settings import DataSettings
from ttpu_train.data.sources import sources_of
from ttpu_train.data.token_files import cache_folder, tokenized
from ttpu_train.data.tokenize import Tokenization
from ttpu_train.runner import Batch


def batch_loader(
    dataset: Any, tokenizer: Any, settings: DataSettings, share: int = 0, shares: int = 1
) -> BatchLoader:
    """The batches of a dataset, which is tokenized first if the cache does not hold its tokens.

    Args:
        dataset: a path, a glob or a folder of text, JSONL, JSON or parquet files; a `datasets.Dataset`; a sequence or
            iterable of examples; or a list or mapping of such sources.
        tokenizer: the checkpoint's, of transformers; None if all examples are token ids.
        settings: how examples become rows.
        share: which part of each global batch this process reads.
        shares: how many parts there are; processes whose devices hold the same rows read the same one.

    Raises:
        DataError: data that is missing or malformed.
        RequestError: settings that contradict the data.
    """
    return BatchLoader(row_planner(dataset, tokenizer, settings), settings, share, shares)


def row_planner(dataset: Any, tokenizer: Any, settings: DataSettings) -> RowPlanner:
    """The rows of a dataset, which is tokenized first if the cache does not hold its tokens.

    Raises:
        DataError: data that is missing or malformed.
        RequestError: settings that contradict the data.
    """
    tokenization, cache = Tokenization(tokenizer, settings), cache_folder(settings)
    files = tuple(tokenized(source, tokenization, cache) for source in sources_of(dataset, settings))
    return RowPlanner(files, settings)


class BatchLoader(Iterator[Batch]):
    """An iterator over a process's part of each global batch.

    Attributes:
        epoch: passes over the data so far: the share of rows in the present one; whole after an epoch's last batch.
        steps_per_epoch: batches of the first epoch. With shuffling and packing, others may have some more or fewer.
        rows_seen: rows of all processes so far, without those that only fill a batch.
        samples_next: False: nothing is sampled.

    Raises:
        RequestError: drop_last leaves no batch in an epoch.
    """

    samples_next = False

    def __init__(
        self, planner: RowPlanner | PairPlanner, settings: DataSettings, share: int, shares: int
    ) -> None:
        self._planner, self._settings = planner, settings
        self._share, self._shares = share, shares
        rows = planner.plan(0).rows
        self.steps_per_epoch = _batch_count(rows, settings, shares)
        if self.steps_per_epoch == 0:
            raise RequestError(
                f"dataloader_drop_last=True was given, but an epoch has {rows:,} rows and a global batch "
                f"{settings.rows * shares:,}, so that all would be dropped: pass False, smaller "
                "batches or more data.",
                param="drop_last",
            )
        self.rows_seen = 0
        self._place(0, 0, rows)
        self._iterator: Any = None
        self._batches: _Batches | None = None
        self._given = 0

    def __next__(self) -> Batch:
        if self._batches is None:
            self._open()
        batches = self._batches
        assert batches is not None
        if self._given >= len(batches):
            raise StopIteration
        batch: Batch = next(self._iterator)
        epoch, number = batches.locate(self._given)
        self._given += 1
        rows = batches.rows(epoch)
        first, end = batches.first_row(epoch, number), min(batches.first_row(epoch, number + 1), rows)
        self.rows_seen += end - first
        last = number + 1 == batches.count(epoch)
        self._place(epoch + 1 if last else epoch, 0 if last else end, rows)
        return batch

    def steps_of(self, epochs: float) -> int:
        """Batches of a number of epochs, each of which has as many as the first."""
        return math.ceil(self.steps_per_epoch * epochs)

    def _place(self, epoch: int, row: int, rows: int) -> None:
        """The next batch begins at a row of an epoch, which has `rows` of them."""
        self._epoch, self._row, self._epoch_rows = epoch, row, rows
        self.epoch = epoch + row / rows

    def state(self) -> dict[str, Any]:
        """The position, for JSON: of the batch that comes next, not of those that are read ahead. It holds for any
        number of processes and rows in a batch."""
        layout = self._planner.layout
        return {
            "epoch": self._epoch,
            "row": self._row,
            "epoch_rows": self._epoch_rows,
            "rows_seen": self.rows_seen,
            "data": self._identity | ({} if layout == 1 else {"layout": layout}),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position.

        Raises:
            CheckpointError: the position is one in other data, or in another order.
        """
        for name, ours in self._identity.items():
            theirs = state["data"].get(name)
            if theirs != ours and name == "tokens":
                raise CheckpointError(
                    "a data position was to be restored, but it is one in other training data, or in tokens of another "
                    "tokenizer or template: resume with the same data and settings, or start a new run from the "
                    "weights."
                )
            if theirs != ours:
                raise CheckpointError(
                    f"a data position was to be restored that was saved with {name}={theirs!r}, but this run has "
                    f"{name}={ours!r}: resume with the same data and settings, or start a new run from the weights."
                )
        if state["data"].get("layout", 1) != self._planner.layout:
            raise CheckpointError(
                "a data position was to be restored, but it was saved by a release that made other rows of the same "
                "data: it kept parts of split documents that have no token to be trained on. Start a new run from the "
                "weights, or resume with that release."
            )
        self.close()
        self._place(state["epoch"], state["row"], state["epoch_rows"])
        self.rows_seen = state["rows_seen"]

    def close(self) -> None:
        """Stop reading ahead."""
        if self._iterator is not None:
            self._iterator.close()
        self._iterator = self._batches = None

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """The data and settings that decide the order of rows."""
        settings = self._settings
        weights = settings.mixture_weights
        return {
            "tokens": self._planner.digest,
            "max_length": settings.max_length,
            "packing": settings.packing,
            "shuffle": settings.shuffle,
            "seed": settings.seed,
            "overlong": settings.overlong,
            "mixture_weights": None if weights is None else list(weights),
        }

    def _open(self) -> None:
        import grain

        settings = self._settings
        self._batches = _Batches(self._planner, settings, self._share, self._shares, self._epoch, self._row)
        threads = max(1, settings.num_workers)
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(threads, settings.prefetch))
        self._iterator = iter(grain.MapDataset.source(self._batches).to_iter_dataset(options))
        self._given = 0


class _Batches:
    """The batches from a position on, by number: a data source for grain, whose threads read it at once."""

    def __init__(
        self,
        planner: RowPlanner | PairPlanner,
        settings: DataSettings,
        share: int,
        shares: int,
        epoch: int,
        row: int,
    ) -> None:
        self._planner, self._settings, self._share, self._shares = planner, settings, share, shares
        self._epoch, self._row = epoch, row
        self._lock = threading.Lock()
        self._plans: dict[int, EpochPlan] = {}
        self._rows: list[int] = []  # of each epoch from the first
        self._ends: list[int] = []  # batches up to the end of each epoch

    def __len__(self) -> int:
        if self._settings.epochs is None:
            return sys.maxsize
        with self._lock:
            while self._epoch + len(self._ends) < self._settings.epochs:
                self._extend()
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Batch:
        epoch, number = self.locate(index)
        plan, each = self._plan(epoch), self._settings.rows
        first = self.first_row(epoch, number) + self._share * each
        first, last = min(first, plan.rows), min(first + each, plan.rows)
        try:
            batch = self._planner.batch(plan, first, last, each)
        except MemoryError as error:
            raise RequestError(
                f"batches of {each:,} rows of {self._settings.max_length:,} tokens were asked for, but this machine's "
                "memory does not hold one: lower per_device_train_batch_size (in evaluation "
                "per_device_eval_batch_size), gradient_accumulation_steps or max_length."
            ) from error
        size = self._settings.vocab_size
        if size is not None and batch.tokens.size and int(batch.tokens.max()) >= size:
            raise DataError(
                f"the data have the token id {int(batch.tokens.max()):,}, but the model's vocabulary has {size:,} "
                "tokens: give ids of the model's own tokenizer."
            )
        return batch

    def locate(self, index: int) -> tuple[int, int]:
        """The epoch of a batch and its number there."""
        with self._lock:
            while not self._ends or self._ends[-1] <= index:
                self._extend()
            place = bisect.bisect_right(self._ends, index)
            return self._epoch + place, index - (self._ends[place - 1] if place else 0)

    def first_row(self, epoch: int, number: int) -> int:
        """The first row of a global batch."""
        return (self._row if epoch == self._epoch else 0) + number * self._settings.rows * self._shares

    def rows(self, epoch: int) -> int:
        """Rows of an epoch."""
        return self._rows[epoch - self._epoch]

    def count(self, epoch: int) -> int:
        """Batches of an epoch."""
        place = epoch - self._epoch
        return self._ends[place] - (self._ends[place - 1] if place else 0)

    def _extend(self) -> None:
        """Count the next epoch's batches."""
        place = len(self._ends)
        plan = self._plans.get(self._epoch + place) or self._planner.plan(self._epoch + place)
        if len(self._plans) < 2:
            self._plans.setdefault(self._epoch + place, plan)
        rows = plan.rows
        count = _batch_count(rows - (self._row if place == 0 else 0), self._settings, self._shares)
        self._rows.append(rows)
        self._ends.append((self._ends[-1] if place else 0) + count)

    def _plan(self, epoch: int) -> EpochPlan:
        with self._lock:
            return self._planned(epoch)

    def _planned(self, epoch: int) -> EpochPlan:
        if epoch not in self._plans:
            self._plans[epoch] = self._planner.plan(epoch)
            while len(self._plans) > 2:  # threads read this epoch's batches and the next one's
                del self._plans[next(iter(self._plans))]
        return self._plans[epoch]


def _batch_count(rows: int, settings: DataSettings, shares: int) -> int:
    whole, rest = divmod(rows, settings.rows * shares)
    return whole + (rest > 0 and not settings.drop_last)
