"""A tokenizer for workloads, read from a tokenizer.json, so that clients can count prompt tokens without a
framework."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ttpu_core.errors import RequestError


class WorkloadTokenizer:
    """Encodes and decodes texts, with the subset of transformers' tokenizer methods that workloads use."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is a `tokenizers.Tokenizer`."""
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.all_special_ids = [token for token, entry in added.items() if entry.special]

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def load_tokenizer(name: str) -> WorkloadTokenizer:
    """Load the tokenizer of a directory with a tokenizer.json, or of a Hub id.

    Raises:
        RequestError: the tokenizer cannot be loaded.
    """
    from tokenizers import Tokenizer

    try:
        path = Path(name).expanduser()
        if path.exists():
            return WorkloadTokenizer(Tokenizer.from_file(str(path / "tokenizer.json" if path.is_dir() else path)))
        return WorkloadTokenizer(Tokenizer.from_pretrained(name))
    except Exception as error:  # tokenizers raises many kinds
        reason = " ".join(str(error).split())[:200]
        raise RequestError(
            f"--tokenizer {name!r} was given, but it cannot be loaded ({reason}): name a directory that has a "
            "tokenizer.json."
        ) from error
