"""Micro-batches of a loop that the user writes: their rows, their loss, and the update that they are part of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_train.data.loader import BatchLoader
from ttpu_train.runner import Batch, EvalValues, InFlight, StepValues

INPUTS = ("input_ids", "labels", "attention_mask", "position_ids")
IGNORED = -100


class MicroLoss:
    """The loss of a micro-batch, a number that is computed when it is asked for (`float(loss)`, `loss.item()`).

    After the update that the micro-batch is part of, it is the mean loss of that whole update, with no further
    computation. Before that update, an evaluation of the micro-batch computes its cross-entropy. It also stands for the
    output of a transformers model: `loss` and `[0]` are itself.

    Args:
        evaluate: computes the sums over a batch with the weights as they are.
        batch: the rows.
    """

    def __init__(self, evaluate: Callable[[Batch], InFlight[EvalValues]], batch: Batch) -> None:
        self._evaluate, self._batch = evaluate, batch
        self._update: InFlight[StepValues] | None = None
        self._value: float | None = None

    @property
    def loss(self) -> MicroLoss:
        """Itself, as loops read it from the output of a model of transformers."""
        return self

    def __getitem__(self, index: int) -> MicroLoss:
        if index != 0:
            raise UnsupportedError(
                f"the output [{index}] of the engine was asked for, but it gives the loss alone, [0]: compute logits "
                "with engine.module."
            )
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise UnsupportedError(
            f"loss.{name} was asked for, but the engine gives a number and no tensor: read it by float(loss) or "
            "loss.item(), and pass the loss itself to engine.backward()."
        )

    def item(self) -> float:
        """The loss as a number, in nats a token. Where several processes train, each must ask."""
        if self._update is not None:
            return self._update.values().loss
        if self._value is None:
            found = self._evaluate(self._batch).values()
            self._value = found.cross_entropy / max(found.tokens, 1e-9)
        return self._value

    def detach(self) -> MicroLoss:
        """Itself: it holds no gradients."""
        return self

    def updated(self, values: InFlight[StepValues]) -> None:
        """The update with this micro-batch was given to the devices."""
        self._update = values

    def __float__(self) -> float:
        return self.item()

    def __add__(self, other: Any) -> float:
        return self.item() + float(other)

    __radd__ = __add__

    def __mul__(self, other: Any) -> float:
        return self.item() * float(other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> float:
        return self.item() / float(other)

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


def batch_of(inputs: Mapping[str, Any], vocabulary: int | None = None) -> Batch:
    """The rows that transformers' names describe: input_ids [rows, seq], and labels, attention_mask and position_ids of
    the same shape. Where position_ids do not go on by 1, another sequence begins, as in transformers, and tokens attend
    to their own sequence alone; beside an attention_mask that is where they fall.

    Args:
        inputs: by name.
        vocabulary: tokens are below it; None compares none.

    Raises:
        RequestError: a name is unknown or missing, shapes differ, tokens are no whole numbers of the vocabulary, the
            mask holds other numbers than 0 and 1, or labels are not the tokens themselves.
    """
    unknown = [name for name in inputs if name not in INPUTS]
    if unknown or "input_ids" not in inputs:
        raise RequestError(
            f"a micro-batch was given with {', '.join(inputs) or 'nothing'}, but it holds input_ids and may hold "
            f"{', '.join(INPUTS[1:])}: give these."
        )
    arrays = {name: np.asarray(value) for name, value in inputs.items() if value is not None}
    given = arrays["input_ids"]
    if given.ndim != 2 or not np.issubdtype(given.dtype, np.integer):
        raise RequestError(
            f"a micro-batch was given whose input_ids are {given.dtype} {list(given.shape)}, but they are whole "
            "numbers [rows, seq]: give such an array or tensor."
        )
    tokens = given.astype(np.int32)
    for name, array in arrays.items():
        if array.shape != tokens.shape:
            raise RequestError(
                f"a micro-batch was given whose {name} has the shape {list(array.shape)} and input_ids "
                f"{list(tokens.shape)}, but each is [rows, seq]: make them equal."
            )
    mask = arrays.get("attention_mask", np.ones_like(tokens))
    other = mask[(mask != 0) & (mask != 1)]
    if other.size:
        raise RequestError(
            f"a micro-batch was given whose attention_mask holds {other[0]:g}, but it is 1 for tokens and 0 for "
            "padding: tell of several sequences in a row by position_ids that begin again at 0."
        )
    real = mask > 0
    positions = arrays.get("position_ids", np.cumsum(real, axis=1) - 1)
    real &= positions >= 0
    wrong = real & ((tokens < 0) | (tokens >= (np.iinfo(np.int32).max if vocabulary is None else vocabulary)))
    if wrong.any():
        raise RequestError(
            f"a micro-batch was given with the token {tokens[wrong][0]}, but the model's are from 0 to below "
            f"{vocabulary or 'its vocabulary'}: use the model's tokenizer, and an attention_mask for padding."
        )
    begins = _begins(positions, real, masked="attention_mask" in arrays)
    labels = arrays.get("labels", tokens)
    wrong = (labels != tokens) & (labels != IGNORED)
    if wrong.any():
        raise RequestError(
            "a micro-batch was given whose labels are other tokens than its input_ids, but each token is predicted "
            f"from those before it: give labels that are the input_ids, not shifted, or {IGNORED}."
        )
    positions = np.where(real, positions, -1).astype(np.int32)
    segments = np.where(real, np.cumsum(begins, axis=1), 0).astype(np.int32)
    weights = (real & (labels != IGNORED) & ~begins).astype(np.float32)
    return Batch(tokens, weights, positions, segments if segments.max(initial=0) > 1 else None)


def _begins(positions: np.ndarray, real: np.ndarray, *, masked: bool) -> np.ndarray:
    """bool [rows, seq], where a sequence begins: at each row's first token, and where a position does not follow that
    of the token before; in rows with a mask, whose positions may have gaps, where it is no greater."""
    places = np.maximum.accumulate(np.where(real, np.arange(real.shape[1]), -1), axis=1)
    before = np.concatenate([np.full_like(places[:, :1], -1), places[:, :-1]], axis=1)  # the place of the token before
    previous = np.take_along_axis(positions, np.maximum(before, 0), axis=1)
    other = positions <= previous if masked else positions != previous + 1
    return real & ((before < 0) | other)


def split(batch: Batch, parts: int) -> Iterator[Batch]:
    """The rows of an update as micro-batches of equal size."""
    rows = len(batch.tokens) // parts
    for first in range(0, rows * parts, rows):
        own = slice(first, first + rows)
        segments = None if batch.segments is None else batch.segments[own]
        extra = {name: array[own] for name, array in batch.extra.items()}
        yield Batch(batch.tokens[own], batch.weights[own], batch.positions[own], segments, extra)


def joined(batches: tuple[Batch, ...]) -> Batch:
    """Micro-batches as the rows of one update, padded to the longest."""
    length = max(one.tokens.shape[1] for one in batches)
    packed = any(one.segments is not None for one in batches)
    rows = [padded(one, length, packed=packed) for one in batches]
    extra = {name: np.concatenate([one.extra[name] for one in rows]) for name in rows[0].extra}
    segments = [one.segments for one in rows if one.segments is not None]
    return Batch(
        np.concatenate([one.tokens for one in rows]),
        np.concatenate([one.weights for one in rows]),
        np.concatenate([one.positions for one in rows]),
        np.concatenate(segments) if packed else None,
        extra,
    )


def padded(batch: Batch, length: int, *, packed: bool) -> Batch:
    """Rows of `length` tokens, with segments if `packed`."""
    segments = batch.segments
    if packed and segments is None:
        segments = (batch.positions >= 0).astype(np.int32)

    def rows(array: np.ndarray, fill: int = 0) -> np.ndarray:
        return np.pad(array, ((0, 0), (0, length - array.shape[1])), constant_values=fill)

    return Batch(
        rows(batch.tokens),
        rows(batch.weights),
        rows(batch.positions, -1),
        None if segments is None else rows(segments),
        batch.extra,
    )
