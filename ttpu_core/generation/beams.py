"""The bookkeeping of beam search, in NumPy: the running and the finished beams of each prompt. A backend computes the
best continuations of the running beams, and gives them here, step by step.

The search is transformers' (`GenerationMixin._beam_search` of version 5), in float32 as there, so that it finds the
same beams in the same order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ttpu_core.generation.option_values import EarlyStopping

LOW = np.float32(-1e9)
"""The score of a beam that is not there yet."""


@dataclass(frozen=True)
class BeamOptions:
    """How beams are searched for.

    Attributes:
        num_beams: running beams of each prompt, and finished ones that are kept.
        length_penalty: a finished beam's log-probability is divided by its number of new tokens to this power.
        early_stopping: True ends a prompt's search with as many finished beams as are kept; False where the running
            beams are worse than all of them at their present length; "never" where they can become no better.
    """

    num_beams: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False


class Beams:
    """The beams of a batch of prompts.

    Args:
        options: how to search.
        limits: the most new tokens of each prompt.

    Attributes:
        step: new tokens of the running beams.
        tokens: int64 [prompts, beams, steps], those of the running beams; the first `step` are set.
        scores: float32 [prompts, beams], sums of their log-probabilities.
        finished_tokens: int64 [prompts, beams, steps], the best finished beams first.
        finished_scores: float32 [prompts, beams], after the length penalty.
        finished_rows: int32 [prompts, beams, steps], the running beam of the whole batch that each token continued; -1
            after the last.
        done: whether the search has ended.
    """

    def __init__(self, options: BeamOptions, limits: list[int]) -> None:
        self.options, self._limits, self.step, self.done = options, np.array(limits), 0, False
        shape = (len(limits), options.num_beams)
        self.tokens = np.zeros((*shape, max(limits)), np.int64)
        self._rows = np.full(self.tokens.shape, -1, np.int32)
        self.scores = np.zeros(shape, np.float32)
        self.scores[:, 1:] = LOW  # so that the first step continues one of the equal beams alone
        self.finished_tokens, self.finished_rows = self.tokens.copy(), self._rows.copy()
        self.finished_scores = np.full(shape, LOW)
        self._finished = np.zeros(shape, np.bool_)
        self._may_improve = np.ones((shape[0], 1), np.bool_)

    def candidates(self, tokens: np.ndarray, beams: np.ndarray) -> np.ndarray:
        """Return the new tokens of continuations, int64 [prompts, number, step + 1].

        Args:
            tokens: int [prompts, number], the last token of each.
            beams: int [prompts, number], the running beam that each continues.
        """
        before = _rows_of(self.tokens[:, :, : self.step], beams)
        return np.concatenate([before, tokens[:, :, None].astype(np.int64)], axis=2)

    def advance(
        self, sums: np.ndarray, tokens: np.ndarray, beams: np.ndarray, ended: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Take one step.

        Args:
            sums: float32 [prompts, number], log-probabilities of continuations, the best first; at least two for each
                beam and token that ends one.
            tokens: int [prompts, number], the last token of each.
            beams: int [prompts, number], the running beam that each continues.
            ended: bool [prompts, number], those that nothing can follow, before the limit of length.

        Returns:
            int32 [prompts * beams] each: the last tokens of the new running beams, and the running beam of the whole
            batch that each continues.
        """
        count, full = self.options.num_beams, self._limits <= self.step  # the limits of shorter answers have passed
        ended = ended | (self._limits <= self.step + 1)[:, None]
        rows = beams + np.arange(len(beams))[:, None] * count
        longer, longer_rows = _rows_of(self.tokens, beams), _rows_of(self._rows, beams)
        longer[:, :, self.step], longer_rows[:, :, self.step] = tokens, rows

        running = sums + ended.astype(np.float32) * LOW
        best = _best(running, count)
        self._finish(sums, longer, longer_rows, ended)
        self.tokens, self._rows = _rows_of(longer, best), _rows_of(longer_rows, best)
        self.scores = np.take_along_axis(running, best, axis=1)
        last, chosen = self.tokens[:, :, self.step], self._rows[:, :, self.step]
        self.step += 1
        self._may_improve &= self._can_improve() & (self._limits > self.step)[:, None]
        enough = self.options.early_stopping is True and bool((self._finished | full[:, None]).all())
        self.done = not self._may_improve.any() or enough or bool(ended.all())
        return last.reshape(-1).astype(np.int32), chosen.reshape(-1)

    def _finish(self, sums: np.ndarray, tokens: np.ndarray, rows: np.ndarray, ended: np.ndarray) -> None:
        """Keep the best of the finished beams and of the continuations that have just ended."""
        count = self.options.num_beams
        new = ended & (np.arange(ended.shape[1]) < count)  # the others are there so that enough beams go on
        scores = sums / np.float32((self.step + 1) ** self.options.length_penalty)
        if self.options.early_stopping is True:
            scores = scores + self._finished.all(axis=1, keepdims=True).astype(np.float32) * LOW
        scores = scores + (~self._may_improve).astype(np.float32) * LOW
        scores = scores + (~new).astype(np.float32) * LOW
        all_scores = np.concatenate([self.finished_scores, scores], axis=1)
        best = _best(all_scores, count)
        self.finished_scores = np.take_along_axis(all_scores, best, axis=1)
        self.finished_tokens = _rows_of(np.concatenate([self.finished_tokens, tokens], axis=1), best)
        self.finished_rows = _rows_of(np.concatenate([self.finished_rows, rows], axis=1), best)
        self._finished = np.take_along_axis(np.concatenate([self._finished, new], axis=1), best, axis=1)

    def _can_improve(self) -> np.ndarray:
        """bool [prompts, 1]: whether the best running beam may become better than the worst finished one."""
        penalty = self.options.length_penalty
        longest = self.options.early_stopping == "never" and penalty > 0
        lengths = self._limits if longest else np.full(len(self._limits), self.step)
        possible = self.scores[:, :1] / (lengths[:, None] ** penalty).astype(np.float32)
        worst = np.where(self._finished, self.finished_scores.min(axis=1, keepdims=True), LOW)
        return np.any(possible > worst, axis=1, keepdims=True)


def _best(scores: np.ndarray, number: int) -> np.ndarray:
    """Places of the highest scores of each row [rows, columns], in descending order; the first of equal ones."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :number]


def _rows_of(array: np.ndarray, places: np.ndarray) -> np.ndarray:
    return np.take_along_axis(array, places[:, :, None], axis=1)
