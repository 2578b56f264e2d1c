"""What the tests of training data share: the tokenizer that ships with the repository, and writers of small files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ttpu_train.data.settings import DataSettings
from ttpu_train.data.sources import sources_of
from ttpu_train.data.token_files import TokenFile
from ttpu_train.data.tokenize import Document, Tokenization
from ttpu_train.runner import Batch

CHECKPOINT = Path(__file__).parents[3] / "examples" / "checkpoints" / "pydoc-llama"
BOS, EOS, USER, ASSISTANT = 1, 2, 3, 4


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(CHECKPOINT)


def write_lines(path: Path, examples: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(example) + "\n" for example in examples), encoding="utf-8")
    return path


def documents(dataset: Any, **settings: Any) -> list[Document]:
    """The documents of a dataset, without a cache."""
    given = DataSettings(**settings)
    tokenization = Tokenization(tokenizer(), given)
    return [found for source in sources_of(dataset, given) for found in tokenization.documents(source.examples())]


def token_file(*lengths: int, divisible: bool = True, first: int = 100) -> TokenFile:
    """Documents of these lengths, whose tokens are all different."""
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    tokens = np.arange(first, first + offsets[-1], dtype=np.int32)
    first_weighted = np.where(np.asarray(lengths) > 1, 1, -1)
    flags = np.full(len(lengths), divisible)
    return TokenFile(tokens, np.ones(len(tokens), np.uint8), offsets, first_weighted, flags, f"{lengths} {first}")


def sequences_in(batch: Batch) -> list[tuple[list[int], list[float]]]:
    """The sequences of a batch, as tokens and weights; and check positions, segments and padding."""
    found = []
    for row in range(len(batch.tokens)):
        positions = batch.positions[row]
        segments = batch.segments[row] if batch.segments is not None else (positions >= 0).astype(np.int32)
        for segment in range(1, int(segments.max(initial=0)) + 1):
            inside = segments == segment
            assert positions[inside].tolist() == list(range(inside.sum()))
            assert np.ptp(np.flatnonzero(inside)) == inside.sum() - 1  # without a gap
            found.append((batch.tokens[row][inside].tolist(), batch.weights[row][inside].tolist()))
        assert (positions[segments == 0] < 0).all()
        assert not batch.weights[row][segments == 0].any()
    return found
