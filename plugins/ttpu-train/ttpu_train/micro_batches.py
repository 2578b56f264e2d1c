"""Micro-batches of a loop that the user writes: their rows, their loss, and the update that they are part of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ttpu_core.errors import RequestError
from ttpu_train.data.loader import BatchLoader
from ttpu_train.runner import Batch, InFlight, StepValues, TrainRunner

INPUTS = ("input_ids", "labels", "attention_mask", "position_ids")
IGNORED = -100


class MicroLoss:
    """The loss of a micro-batch, a number that is computed when it is asked for (`float(loss)`, `loss.item()`).

    After the update that the micro-batch is part of, it is the mean loss of that whole update, with no further
    computation. Before that update, an evaluation of the micro-batch computes its cross-entropy.
    """

    def __init__(self, runner: TrainRunner, batch: Batch) -> None:
        self._runner, self._batch = runner, batch
        self._update: InFlight[StepValues] | None = None
        self._value: float | None = None

    def item(self) -> float:
        """The loss as a number, in nats a token."""
        if self._update is not None:
            return self._update.values().loss
        if self._value is None:
            found = self._runner.evaluate(self._batch).values()
            self._value = found.cross_entropy / max(found.tokens, 1e-9)
        return self._value

    def updated(self, values: InFlight[StepValues]) -> None:
        """The update with this micro-batch was given to the devices."""
        self._update = values

    def __float__(self) -> float:
        return self.item()

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __repr__(self) -> str:
        return f"MicroLoss({self.item():.6g})"


class MicroBatches:
    """The training data as micro-batches; iterating is one pass over them, and the next iteration is the next pass.

    Args:
        loader: of whole updates.
        parts: micro-batches of an update.
    """

    def __init__(self, loader: BatchLoader, parts: int) -> None:
        self._loader, self._parts = loader, parts

    def __len__(self) -> int:
        return self._loader.steps_per_epoch * self._parts

    def __iter__(self) -> Iterator[Batch]:
        epoch = int(self._loader.epoch + 1e-9)
        while int(self._loader.epoch + 1e-9) == epoch:
            yield from split(next(self._loader), self._parts)

    def state(self) -> dict[str, Any]:
        """The position after the last whole update, as JSON: for `client_state`."""
        return self._loader.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a position.

        Raises:
            CheckpointError: it is one in other data, or in another order.
        """
        self._loader.restore(state)


def batch_of(inputs: Mapping[str, Any]) -> Batch:
    """The rows that transformers' names describe: input_ids [rows, seq], and labels, attention_mask and position_ids of
    the same shape.

    Raises:
        RequestError: a name is unknown or missing, shapes differ, or labels are not the tokens themselves.
    """
    unknown = [name for name in inputs if name not in INPUTS]
    if unknown or "input_ids" not in inputs:
        raise RequestError(
            f"a micro-batch was given with {', '.join(inputs) or 'nothing'}, but it holds input_ids and may hold "
            f"{', '.join(INPUTS[1:])}: give these."
        )
    arrays = {name: np.asarray(value) for name, value in inputs.items() if value is not None}
    tokens = arrays["input_ids"].astype(np.int32)
    for name, array in arrays.items():
        if tokens.ndim != 2 or array.shape != tokens.shape:
            raise RequestError(
                f"a micro-batch was given whose {name} has the shape {list(array.shape)} and input_ids "
                f"{list(tokens.shape)}, but each is [rows, seq]: make them equal."
            )
    real = arrays.get("attention_mask", np.ones_like(tokens)) > 0
    positions = arrays.get("position_ids", np.cumsum(real, axis=1) - 1)
    labels = arrays.get("labels", tokens)
    wrong = (labels != tokens) & (labels != IGNORED)
    if wrong.any():
        raise RequestError(
            "a micro-batch was given whose labels are other tokens than its input_ids, but each token is predicted "
            f"from those before it: give labels that are the input_ids, not shifted, or {IGNORED}."
        )
    positions = np.where(real, positions, -1).astype(np.int32)
    return Batch(tokens, (real & (labels != IGNORED) & (positions > 0)).astype(np.float32), positions)


def split(batch: Batch, parts: int) -> Iterator[Batch]:
    """The rows of an update as micro-batches of equal size."""
    rows = len(batch.tokens) // parts
    for first in range(0, rows * parts, rows):
        own = slice(first, first + rows)
        segments = None if batch.segments is None else batch.segments[own]
        extra = {name: array[own] for name, array in batch.extra.items()}
        yield Batch(batch.tokens[own], batch.weights[own], batch.positions[own], segments, extra)


def joined(batches: tuple[Batch, ...]) -> Batch:
    """Micro-batches as the rows of one update, padded to the longest.

    Raises:
        RequestError: some have segments and others have not.
    """
    length = max(one.tokens.shape[1] for one in batches)

    def rows(name: str, fill: int) -> np.ndarray:
        arrays = [getattr(one, name) for one in batches]
        return np.concatenate(
            [np.pad(one, ((0, 0), (0, length - one.shape[1])), constant_values=fill) for one in arrays]
        )

    segmented = [one.segments is not None for one in batches]
    if any(segmented) != all(segmented):
        raise RequestError(
            "some micro-batches of an update were given with segments and others without, but they are one array: give "
            "segments with all of them, or with none."
        )
    extra = {name: np.concatenate([one.extra[name] for one in batches]) for name in batches[0].extra}
    segments = rows("segments", 0) if all(segmented) else None
    return Batch(rows("tokens", 0), rows("weights", 0), rows("positions", -1), segments, extra)
