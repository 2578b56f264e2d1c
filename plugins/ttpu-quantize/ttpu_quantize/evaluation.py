"""Measures a model on a text: perplexity, and how far its predictions are from those of a reference model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ttpu_core.backend import Scores
from ttpu_core.errors import RequestError
from ttpu_quantize.windows import Window, batches, windows

LOGITS_BYTES = 2**28
"""Most bytes of one batch's logits, where the number of rows is not given."""


@dataclass(frozen=True)
class Evaluation:
    """A model's figures on a text.

    Attributes:
        name: of the checkpoint, with the scheme by which it was quantized while it was loaded.
        tokens: number of tokens that were scored.
        loss: mean of minus the natural logarithm of each token's probability.
        weight_bytes: bytes of the weights on the devices.
        tokens_per_second: tokens that went through the model per second, those that overlap included, compilation
            excluded. With a reference, its forward passes are not counted.
        divergence: mean KL(reference || model) of the next-token distributions, in nats; None for the reference.
        agreement: share of tokens for which the likeliest token is the reference's; None for the reference.
    """

    name: str
    tokens: int
    loss: float
    weight_bytes: int
    tokens_per_second: float
    divergence: float | None = None
    agreement: float | None = None

    @property
    def perplexity(self) -> float:
        """e to the mean loss."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@dataclass(frozen=True)
class Text:
    """The tokens of a text and how they are cut."""

    tokens: tuple[int, ...]
    size: int
    stride: int
    rows: int
    cut: tuple[Window, ...]


def text_for(
    model: Any,
    text: str,
    *,
    size: int | None = None,
    stride: int | None = None,
    rows: int | None = None,
    limit: int | None = None,
) -> Text:
    """Tokenize a text as a model does, with the special tokens that its tokenizer adds.

    Args:
        model: a loaded model.
        text: the text.
        size: tokens of a window; None for the model's context, at most 2,048.
        stride: tokens from one window's start to the next one's; None for half a window.
        rows: windows per batch; None for as many as keep the logits below `LOGITS_BYTES`.
        limit: keep only so many tokens from the start of the text; None for all.

    Raises:
        RequestError: the model has no tokenizer, the text is too short, or the window does not fit into the context.
    """
    tokens = token_ids(model, text)[:limit]
    context = int(model.context)
    size = min(context, 2048) if size is None else size
    if size > context:
        raise RequestError(
            f"windows of {size:,} tokens were asked for, but this model's context holds {context:,}: lower --window."
        )
    stride = max(1, size // 2) if stride is None else stride
    cut = tuple(windows(len(tokens), size, stride))
    size = min(size, len(tokens))
    rows = max(1, LOGITS_BYTES // (4 * size * model.spec.vocab_size)) if rows is None else rows
    return Text(tokens, size, stride, min(rows, len(cut)), cut)


def token_ids(model: Any, text: str) -> tuple[int, ...]:
    """The tokens of a text by a loaded model's tokenizer; see `tokenized`."""
    return tokenized(model.tokenizer, text)


def tokenized(tokenizer: Any, text: str) -> tuple[int, ...]:
    """The tokens of a text, with the special tokens that the tokenizer adds.

    Raises:
        RequestError: there is no tokenizer.
    """
    if tokenizer is None:
        raise RequestError(
            "a text was to be read, but the checkpoint has no tokenizer files: copy tokenizer.json into its directory."
        )
    return tuple(int(token) for token in tokenizer(text, verbose=False)["input_ids"])


def evaluate_model(
    backend: Scores,
    name: str,
    model: Any,
    text: Text,
    reference: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Score every token of a text but the first.

    Args:
        backend: runs the model.
        name: what the figures are shown under.
        model: a loaded model.
        text: tokens and windows.
        reference: another loaded model with the same vocabulary, to compare with.
        progress: called with (windows done, windows in all) after each batch.
    """
    losses: list[np.ndarray] = []
    divergences: list[np.ndarray] = []
    agreements: list[np.ndarray] = []
    seconds, done, passed = 0.0, 0, 0
    for number, batch in enumerate(batches(text.tokens, text.cut, text.size, text.rows)):
        expected = None if reference is None else backend.text_logits(reference, batch.tokens, batch.lengths)
        if number == 0:  # compiles
            backend.token_scores(backend.text_logits(model, batch.tokens, batch.lengths), batch.targets)
        began = time.perf_counter()
        logits = backend.text_logits(model, batch.tokens, batch.lengths)
        scores = backend.token_scores(logits, batch.targets)
        seconds += time.perf_counter() - began
        losses.append(scores.loss[batch.scored])
        if expected is not None:
            compared = backend.token_scores(logits, batch.targets, expected)
            assert compared.divergence is not None
            assert compared.agrees is not None
            divergences.append(compared.divergence[batch.scored])
            agreements.append(compared.agrees[batch.scored])
        passed += int(batch.lengths.sum())
        done = min(done + text.rows, len(text.cut))
        if progress is not None:
            progress(done, len(text.cut))
    return Evaluation(
        name,
        sum(map(len, losses)),
        _mean(losses),
        backend.weight_bytes(model),
        passed / seconds,
        _mean(divergences) if divergences else None,
        _mean(agreements) if agreements else None,
    )


def check_comparable(reference: Any, model: Any, name: str, text: str) -> None:
    """Check that two models read a text alike.

    Raises:
        RequestError: their vocabularies differ, or their tokenizers cut the text differently.
    """
    sizes = reference.spec.vocab_size, model.spec.vocab_size
    if sizes[0] != sizes[1]:
        found = f"its vocabulary has {sizes[1]:,} tokens and the first one's {sizes[0]:,}"
    elif token_ids(reference, text) != token_ids(model, text):
        found = "its tokenizer cuts the text into other tokens than the first one's"
    else:
        return
    raise RequestError(
        f"{name} was to be compared with the first checkpoint, but {found}: compare checkpoints of one model."
    )


def _mean(parts: Sequence[np.ndarray]) -> float:
    return float(np.concatenate(parts).mean(dtype=np.float64))
