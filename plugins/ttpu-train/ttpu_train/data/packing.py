"""Which sequences stand in which row of an epoch. Plans are computed from lengths alone, so every process and every
resumed run computes the same one. grain's packing is not used: it packs what its own process reads, in the order of
reading, so that rows would depend on the number of processes and resuming would repeat an epoch."""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ttpu_core.errors import DataError, RequestError
from ttpu_train.data.settings import DataSettings
from ttpu_train.data.token_files import TokenFile
from ttpu_train.runner import Batch

WINDOW = 16_384  # sequences that are packed together: the order of an epoch, and a mixture's shares, hold among windows


@dataclass(frozen=True)
class Sequences:
    """Every sequence that an epoch may hold: parts of documents that fit into a row.

    Attributes:
        starts: int64 [sequences], the first token in its file.
        lengths: int64 [sequences], in tokens.
        bounds: int64 [files + 1]: file `f` has the sequences from `bounds[f]` to `bounds[f + 1]`.
        left_out: parts of split documents that are none of them, as they have no token of weight.
    """

    starts: np.ndarray
    lengths: np.ndarray
    bounds: np.ndarray
    left_out: int = 0


@dataclass(frozen=True)
class EpochPlan:
    """The rows of one epoch: row `r` holds the sequences `members[bounds[r]:bounds[r + 1]]`."""

    members: np.ndarray
    bounds: np.ndarray

    @cached_property
    def rows(self) -> int:
        """Rows of all processes."""
        return len(self.bounds) - 1


class RowPlanner:
    """The rows of each epoch, and their tokens.

    Attributes:
        sequences: that an epoch may hold.
        digest: a hash of all documents.
        layout: how documents become sequences, for positions to be compared: 2 where parts of split documents are left
            out, which older releases made sequences of; else 1.

    Raises:
        RequestError: mixture_weights are not as many as the sources.
    """

    def __init__(self, files: tuple[TokenFile, ...], settings: DataSettings) -> None:
        weights = settings.mixture_weights
        if weights is not None and len(weights) != len(files):
            raise RequestError(
                f"mixture_weights has {len(weights)} weights, but the dataset has {len(files)} sources: pass one "
                "weight for each member of the list or mapping of sources.",
                param="mixture_weights",
            )
        if settings.assistant_only_loss and all(file.divisible.all() for file in files):
            warnings.warn(
                "assistant_only_loss was given, but it has no effect on data without conversations (messages)",
                stacklevel=2,
            )
        self._files, self._settings = files, settings
        self.sequences = sequences_of(files, settings)
        self.digest = hashlib.blake2b(" ".join(file.digest for file in files).encode(), digest_size=16).hexdigest()
        self.layout = 2 if self.sequences.left_out else 1
        self._latest: tuple[int, EpochPlan] | None = None

    def plan(self, epoch: int) -> EpochPlan:
        """The rows of an epoch, numbered from 0."""
        settings = self._settings
        if not settings.shuffle and settings.mixture_weights is None:
            epoch = 0  # all are alike
        if self._latest is None or self._latest[0] != epoch:
            order = self._order(epoch)
            plan = self._packed(order, epoch) if settings.packing else EpochPlan(order, np.arange(len(order) + 1))
            self._latest = epoch, plan
        return self._latest[1]

    def batch(self, plan: EpochPlan, first: int, last: int, rows: int) -> Batch:
        """Rows `first` to `last` of an epoch, and empty ones after them.

        Args:
            plan: of the epoch.
            first: the first row.
            last: the row after the last.
            rows: of the batch; as many as `last - first`, or more.
        """
        shape = (rows, self._settings.max_length)
        tokens, positions = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
        weights, segments = np.zeros(shape, np.float32), np.zeros(shape, np.int32)
        counted = np.arange(self._settings.max_length, dtype=np.int32)
        for row in range(first, last):
            at, here = 0, row - first
            members = plan.members[plan.bounds[row] : plan.bounds[row + 1]]
            for segment, member in enumerate(members.tolist(), 1):
                file = self._files[int(np.searchsorted(self.sequences.bounds, member, "right")) - 1]
                start, length = int(self.sequences.starts[member]), int(self.sequences.lengths[member])
                end = at + length
                tokens[here, at:end] = file.tokens[start : start + length]
                weights[here, at + 1 : end] = file.weights[start + 1 : start + length]
                positions[here, at:end] = counted[:length]
                segments[here, at:end] = segment
                at = end
        return Batch(tokens, weights, positions, segments if self._settings.packing else None)

    def _order(self, epoch: int) -> np.ndarray:
        """The sequences of an epoch, in order."""
        bounds, weights = self.sequences.bounds, self._settings.mixture_weights
        if weights is None:
            return self._permutation(int(bounds[-1]), epoch)
        # Each source is one endless stream of its passes, of which an epoch takes the next part; so a long source is
        # read to its end over several epochs. The epoch is as long as the source that its weight exhausts first allows.
        sizes, shares = np.diff(bounds), np.asarray(weights) / np.sum(weights)
        counts = np.maximum(1, np.floor(np.min(sizes / shares) * shares * (1 + 1e-12)).astype(np.int64))
        taken, places = [], []
        for source, (size, count) in enumerate(zip(sizes.tolist(), counts.tolist(), strict=True)):
            begin, end = epoch * count, (epoch + 1) * count
            passes = [self._permutation(size, number, source) for number in range(begin // size, (end - 1) // size + 1)]
            stream = np.concatenate(passes)[begin % size :][:count]
            taken.append(stream + bounds[source])
            places.append((np.arange(count) + 0.5) / count)  # spread evenly
        return np.concatenate(taken)[np.argsort(np.concatenate(places), kind="stable")]

    def _permutation(self, size: int, *stream: int) -> np.ndarray:
        if not self._settings.shuffle:
            return np.arange(size)
        return permutation(size, self._settings.seed, *stream)

    def _packed(self, order: np.ndarray, epoch: int) -> EpochPlan:
        members: list[int] = []
        sizes: list[int] = []
        for number, begin in enumerate(range(0, len(order), WINDOW)):
            part = order[begin : begin + WINDOW]
            bins = best_fit(self.sequences.lengths[part], self._settings.max_length)
            # Bins of long sequences come first; a row shall not tell by its number how long its sequences are.
            turns = permutation(len(bins), self._settings.seed, epoch, number, 1) if self._settings.shuffle else None
            for turn in range(len(bins)) if turns is None else turns.tolist():
                members.extend(part[bins[turn]].tolist())
                sizes.append(len(bins[turn]))
        return EpochPlan(np.asarray(members, np.int64), np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]))


def sequences_of(files: tuple[TokenFile, ...], settings: DataSettings) -> Sequences:
    """Documents as sequences of at most `max_length` tokens.

    Parts of a split document overlap by one token. The first token of a sequence has no weight, so each token of the
    document but its first is predicted exactly once. Documents without a token of weight in reach are left out, and so
    are such parts of split ones.

    Raises:
        DataError: a document is too long and `overlong` is "refuse", or no sequence is left.
    """
    width, starts, lengths, counts = settings.max_length, [], [], []
    cut = left_out = 0
    for file in files:
        sizes = np.diff(file.offsets)
        long = sizes > width
        if settings.overlong == "refuse" and long.any():
            at = int(np.argmax(long))
            raise DataError(
                f"document {at} of the training data has {sizes[at]:,} tokens, but max_length is {width:,} and "
                "overlong='refuse': raise max_length, or pass overlong='split' or 'truncate'."
            )
        split = long & (file.divisible if settings.overlong is None else settings.overlong == "split")
        cut += int((long & ~split).sum())
        parts = np.where(split, -(-(sizes - 1) // (width - 1)), 1)  # each but the first begins with a token again
        parts[(file.first_weighted < 0) | (~split & (file.first_weighted >= width))] = 0
        document = np.repeat(np.arange(len(sizes)), parts)
        number = np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)
        offset = number * (width - 1)
        taught = np.ones(len(document), bool)
        for part in np.flatnonzero((split & ~file.divisible)[document]).tolist():  # as of a prompt
            begin = file.offsets[document[part]] + offset[part]
            end = min(begin + width, file.offsets[document[part] + 1])
            taught[part] = file.weights[begin + 1 : end].any()
        left_out += int((~taught).sum())
        document, offset = document[taught], offset[taught]
        starts.append(file.offsets[document] + offset)
        lengths.append(np.minimum(sizes[document] - offset, width))
        counts.append(len(document))
        if not len(document):
            raise DataError(
                f"training data with {len(sizes):,} documents was given, but none has a token to be trained on within "
                f"its first {width:,} tokens (max_length): raise max_length, or give longer documents."
            )
    if cut:
        warnings.warn(
            f"{cut:,} conversations or completions have more than {width:,} tokens (max_length), and their ends are "
            "left out: raise max_length to train on all of them.",
            stacklevel=2,
        )
    bounds = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    return Sequences(np.concatenate(starts), np.concatenate(lengths), bounds, left_out)


def best_fit(lengths: np.ndarray, width: int) -> list[np.ndarray]:
    """Best-fit decreasing: the longest sequence first, each into the fullest row that it fits into.

    Args:
        lengths: int64 [sequences], none above `width`.
        width: tokens of a row.

    Returns:
        The sequences of each row, in order. Rows are ordered by their first sequence.
    """
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(width + 1)]
    open_rooms = 0  # bit `n` is set if a row has room for n tokens
    sizes = lengths.tolist()
    for sequence in np.argsort(-lengths, kind="stable").tolist():
        length = sizes[sequence]
        fitting = open_rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                open_rooms ^= 1 << room
            rows[row].append(sequence)
        else:
            room, row = width, len(rows)
            rows.append([sequence])
        if left := room - length:
            with_room[left].append(row)
            open_rooms |= 1 << left
    return [np.asarray(row) for row in sorted(sorted(row) for row in rows)]


def permutation(size: int, *stream: int) -> np.ndarray:
    """A random order of `size` things, int64 [size], the same with every release of numpy, which promises that for raw
    bits alone."""
    bits = np.random.Philox(np.random.SeedSequence(stream)).random_raw(size)
    return np.argsort(bits, kind="stable")
