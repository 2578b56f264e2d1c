"""Checks a loaded stock model against itself. The logits after a prompt are computed three times: by the model when it
is given tokens alone, in one prefill, and by the prefill of its padded beginning and steps of decoding. Where a model
ignores its mask or its cache, looks ahead, or counts positions in its own way, they differ."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ttpu_any.aten.table import NEEDS_PLUGIN
from ttpu_any.programs import StockPrograms
from ttpu_any.steps import Manner
from ttpu_core.errors import UnsupportedError

logger = logging.getLogger(__name__)

LENGTH, PADDING, SLOTS = 16, 3, 64
"""Tokens of the prompt, how many slots of padding stand before its beginning, and slots of the cache."""

SHOWN = 3
"""How many reasons an error message names."""

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.15, "float16": 0.05}
"""Of the largest difference, in standard deviations of the logits."""


@dataclass(frozen=True)
class Difference:
    """How far the logits of a way to compute them are from the model's own, in standard deviations of the logits."""

    what: str
    error: float
    allowed: float

    @property
    def small(self) -> bool:
        """Whether it may be rounding."""
        return self.error <= self.allowed


def checked_programs(
    make: Callable[[Manner], StockPrograms], manners: Sequence[Manner], dtype: str, name: str
) -> StockPrograms:
    """The programs of a model in the first manner in which it agrees with itself.

    Args:
        make: makes the programs in a manner.
        manners: that are tried, in order.
        dtype: of the weights.
        name: of the model, for the error message.

    Raises:
        UnsupportedError: there is none: the model cannot be traced, or would be silently wrong.
    """
    reasons: list[str] = []
    alone: dict[int, np.ndarray] = {}
    for manner in manners:
        programs = make(manner)
        try:
            found = difference(programs, dtype, alone)
        except UnsupportedError as error:
            reasons.append(str(error).removesuffix(NEEDS_PLUGIN))
            continue
        except Exception as error:  # what the traced code of any model may raise
            reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
            continue
        if found.small:
            logger.info("%s agrees with itself in the manner %s: %.1e", name, manner, found.error)
            if not manner.cache:
                logger.warning("%s reads the whole text again for each token: its cache cannot be kept", name)
            return programs
        reasons.append(
            f"{found.what} gives logits that are {found.error:.2g} standard deviations from those of the model given "
            f"tokens alone, where {found.allowed:g} may be rounding"
        )
    raise UnsupportedError(
        f"{name} was to be run without a plugin, but in no manner does it agree with itself, so that what it generates "
        f"would be wrong: {_listed(reasons)}. This model needs a plugin"
        + ("." if dtype == "float32" else f"; if {dtype} rounds too much for it, pass dtype='float32'.")
    )


def difference(programs: StockPrograms, dtype: str, alone: dict[int, np.ndarray]) -> Difference:
    """Compare the logits after a prompt, when the model is given tokens alone, with those of one prefill, and with
    those after the prompt's beginning, padded where the model may be padded, and steps of decoding.

    Args:
        programs: in a manner.
        dtype: of the weights.
        alone: rows of a batch → the model's own logits [vocab], computed before; what is not there is added.

    Returns:
        The larger difference.

    Raises:
        UnsupportedError: the model cannot be traced.
    """
    rows, pads = programs.manner.rows, programs.manner.pads
    width = LENGTH if pads else LENGTH - PADDING
    tokens = _prompt(programs)
    whole = np.broadcast_to(tokens, (rows, LENGTH))
    shown = np.zeros((rows, width), np.int32)
    shown[:, width - (LENGTH - PADDING) :] = tokens[: LENGTH - PADDING]
    start = width - (LENGTH - PADDING)

    prefill = programs.checked_prefill(whole, 0, SLOTS)[0]
    if rows not in alone:
        alone[rows] = _row(programs.checked_alone(whole))
    expected = alone[rows]

    def compared(what: str, logits: Any) -> Difference:
        error = np.abs(_row(logits) - expected).max() / max(float(expected.std()), 1e-6)
        return Difference(what, float(error), TOLERANCE[dtype])

    prefilled = compared("a prefill", prefill)
    if not prefilled.small:
        return prefilled
    logits, state = programs.checked_prefill(shown, start, SLOTS)
    for place in range(LENGTH - PADDING, LENGTH):
        logits, state = programs.checked_decode(np.full(rows, tokens[place], np.int32), state)
    decoded = compared(f"decoding after a {'padded ' if pads else ''}prefill", logits)
    return decoded if not decoded.small else max(prefilled, decoded, key=lambda each: each.error)


def _listed(reasons: Sequence[str]) -> str:
    """Different reasons with their numbers; the first ones, of many."""
    different = list(dict.fromkeys(reasons))
    shown = [f"({place}) {reason}" for place, reason in enumerate(different[:SHOWN], 1)]
    more = len(different) - SHOWN
    return "; ".join(shown) + (f"; and {more} more" if more > 0 else "")


def _prompt(programs: StockPrograms) -> np.ndarray:
    """Random tokens without the one for padding, which some models skip wherever it stands."""
    vocab = programs.spec.vocab_size
    padding = getattr(programs.steps.model.config.get_text_config(decoder=True), "pad_token_id", None)
    tokens = np.random.default_rng(0).integers(0, vocab, LENGTH)
    return np.where(tokens == padding, (tokens + 1) % vocab, tokens).astype(np.int32)


def _row(logits: Any) -> np.ndarray:
    return np.asarray(logits)[-1].astype(np.float32)
