"""Calls the caller's own code between two tokens: logits processors and stopping criteria of transformers, or functions
of the same arguments. They run on the host, so that every step waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np

from ttpu_core.errors import RequestError
from ttpu_core.generation.ranges import short


@dataclass(frozen=True)
class HostCalls:
    """The callables of one call of `generate`, in order.

    They take token ids [rows, length] and scores [rows, vocab], as torch tensors where torch is installed, and else as
    NumPy arrays. `processors` return scores [rows, vocab], `criteria` bool [rows] or one bool: which rows end."""

    processors: tuple[Callable[..., Any], ...] = ()
    criteria: tuple[Callable[..., Any], ...] = ()

    @classmethod
    def of(cls, processors: Any, criteria: Any) -> HostCalls:
        """Read the two arguments of `generate`: a callable, several, or None.

        Raises:
            RequestError: something else.
        """
        return cls(_callables("logits_processor", processors), _callables("stopping_criteria", criteria))

    def within(self, seconds: float | None) -> HostCalls:
        """The same with one more criterion: `seconds` from now, all rows end; None adds none.

        Raises:
            RequestError: several processes generate together, whose clocks would end at different tokens.
        """
        if seconds is None:
            return self
        if jax.process_count() > 1:
            raise RequestError(
                f"max_time={seconds} was asked for in {jax.process_count()} processes, whose clocks differ: pass "
                "max_new_tokens instead."
            )
        end = time.monotonic() + seconds
        return HostCalls(self.processors, (*self.criteria, lambda *_: time.monotonic() > end))

    def processed(self, ids: np.ndarray, scores: np.ndarray, vocab: int) -> np.ndarray:
        """Scores after all processors.

        Args:
            ids: int64 [rows, length].
            scores: float32 [rows, columns], of which the first `vocab` are tokens.
            vocab: the size of the vocabulary.

        Returns:
            float32 [rows, columns].

        Raises:
            RequestError: a processor returns another shape.
        """
        if not self.processors:
            return scores
        given: Any = _tensor(np.array(scores[:, :vocab]))
        for processor in self.processors:
            given = processor(_tensor(ids), given)
        found = _array(given)
        if found.shape != (len(scores), vocab):
            raise RequestError(
                f"the logits processors returned scores of shape {found.shape}, but {(len(scores), vocab)} is needed: "
                "return the scores with their shape."
            )
        after = np.full(scores.shape, -np.inf, np.float32)
        after[:, :vocab] = found
        return after

    def ended(self, ids: np.ndarray, scores: Sequence[np.ndarray] | None) -> np.ndarray:
        """Which rows a criterion ends, bool [rows].

        Args:
            ids: int64 [rows, length].
            scores: float32 [rows, vocab] of each step, where they were asked for.

        Raises:
            RequestError: a criterion returns something else than bool [rows] or one bool.
        """
        ends = np.zeros(len(ids), np.bool_)
        for criterion in self.criteria:
            found = _array(criterion(_tensor(ids), None if scores is None else tuple(map(_tensor, scores))))
            if found.shape not in ((), ends.shape):
                raise RequestError(
                    f"a stopping criterion returned shape {found.shape} for {len(ids)} rows: return one bool for each."
                )
            ends |= found.astype(np.bool_)
        return ends


def _callables(name: str, value: Any) -> tuple[Callable[..., Any], ...]:
    many = tuple(value) if isinstance(value, list | tuple) else () if value is None else (value,)
    if not all(callable(one) for one in many):
        raise RequestError(f"{name} is {short(value)}, but a callable, or a list of them, is needed: correct it.")
    return many


def _tensor(array: np.ndarray) -> Any:
    """The array as users' code wants it; its memory is not shared with ours."""
    return import_module("torch").from_numpy(np.array(array)) if find_spec("torch") is not None else np.array(array)


def _array(value: Any) -> np.ndarray:
    value = value.detach() if hasattr(value, "detach") else value
    return np.asarray(value.cpu() if hasattr(value, "cpu") else value)
