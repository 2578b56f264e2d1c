"""The lengths that rows of a user's own loader are padded to, so that few programs are compiled, and the same in every
process."""

from __future__ import annotations

from ttpu_core.errors import UnsupportedError
from ttpu_train.micro_batches import padded
from ttpu_train.runner import Batch, TrainRunner
from ttpu_train.watchdog import Gathers

STEPS = 4
"""Lengths between a power of two and the next."""
LEAST = 8
"""Tokens between two lengths, at least."""
WASTE = 1.25
"""A program that was compiled for rows of up to this many times the length is used again."""


class RowShapes:
    """Pads rows. The first length is taken as it is, so that rows of one length are never padded; later ones are
    rounded up to a length that has been used, or to the next of a few.

    Args:
        runner: whose programs take the rows; where several processes train, they agree on each length.
    """

    def __init__(self, runner: TrainRunner) -> None:
        self._runner = runner
        self._used: set[int] = set()
        self._packed = False

    def padded(self, batch: Batch) -> Batch:
        """The rows, as long as those of the other processes; with segments once any process has given some.

        Raises:
            UnsupportedError: several processes train, and the backend cannot compare what they give.
        """
        length, packed = batch.tokens.shape[1], batch.segments is not None
        if self._runner.layout.process_count > 1:
            if not isinstance(self._runner, Gathers):
                raise UnsupportedError(
                    f"{self._runner.layout.process_count} processes were to train on rows of their own loaders, but "
                    "this backend cannot compare their lengths: give training_data to ttpu.initialize, or use "
                    "backend='jax'."
                )
            every = self._runner.gathered(-length if packed else length)
            length, packed = int(max(abs(one) for one in every)), any(one < 0 for one in every)
        self._packed |= packed
        length = self._rounded(length)
        self._used.add(length)
        return padded(batch, length, packed=self._packed)

    def _rounded(self, length: int) -> int:
        if not self._used:
            return length
        fitting = [one for one in self._used if length <= one <= WASTE * length]
        return min(fitting) if fitting else rounded(length)


def rounded(length: int) -> int:
    """The next of a few lengths."""
    step = max(LEAST, 2 ** (length - 1).bit_length() // (2 * STEPS))
    return -(-length // step) * step
