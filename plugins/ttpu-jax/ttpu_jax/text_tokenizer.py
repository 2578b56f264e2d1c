"""A checkpoint's tokenizer for plain text without transformers, whose import takes half of the time until `ttpu
generate` compiles its first program. transformers decides which class reads a checkpoint's files, and how; where that
reads text exactly as the tokenizers library reads tokenizer.json, a note in the user's cache folder says so, and the
next process believes it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttpu_core.checkpoint import Checkpoint
from ttpu_jax.runner.compilation_cache import is_closed, programs_folder
from ttpu_jax.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger(__name__)

FILE = "tokenizer.json"
READ = (
    *(FILE, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "config.json"),
)
"""The files that transformers makes a tokenizer of, or chooses its class by."""
OTHER_READER = "tekken.json"
"""Which mistral-common reads, where it is installed."""
SAMPLES = ("", "a", " a  b\n\tc", "Ça coûte 12,50 €; it's ½ of 日本語 \U0001f600", "\x00\u200b\ufeff")
"""Texts that both have to read alike. Special tokens are tried as well."""


class TextTokenizer:
    """Reads and writes plain text. Anything else, such as a chat template, is asked of the tokenizer of transformers,
    which is loaded then.

    Attributes:
        backend_tokenizer: the `tokenizers.Tokenizer` that transformers' tokenizer has as well.
        eos_token_id, pad_token_id: those of transformers' tokenizer, or None.
    """

    def __init__(self, checkpoint: Checkpoint, backend: Tokenizer, eos: int | None, pad: int | None) -> None:
        self.backend_tokenizer, self.eos_token_id, self.pad_token_id = backend, eos, pad
        self._checkpoint = checkpoint
        self._whole: Any = None

    def __call__(self, text: Any, **options: Any) -> Any:
        """Return {"input_ids": …} of one text; other calls are those of transformers' tokenizer."""
        if isinstance(text, str) and options.keys() <= {"verbose"}:
            return {"input_ids": self.backend_tokenizer.encode(text).ids}
        return self.whole()(text, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.whole(), name)

    def whole(self) -> Any:
        """Return the tokenizer of transformers.

        Raises:
            CheckpointError: transformers cannot read the files.
        """
        if self._whole is None:
            self._whole = load_tokenizer(self._checkpoint)
        return self._whole


def text_tokenizer(checkpoint: Checkpoint) -> Any:
    """Return a `TextTokenizer` of a checkpoint where a note says that it reads text rightly, else the tokenizer of
    transformers, or None where it has no tokenizer files.

    Raises:
        CheckpointError: files that transformers cannot read.
    """
    if not checkpoint.has_tokenizer:
        return None
    note = _note_of(checkpoint)
    if note is None:
        return load_tokenizer(checkpoint)
    if (noted := _read(note)) is not None:
        return TextTokenizer(checkpoint, _backend(checkpoint), noted["eos_token_id"], noted["pad_token_id"])
    tokenizer = load_tokenizer(checkpoint)
    try:
        alike = _reads_alike(tokenizer, _backend(checkpoint))
    except Exception as error:  # tokenizers raises no narrower kind for texts that it cannot read
        log.debug("%s is left to transformers: %s", checkpoint.source, error)
        alike = False
    if alike:
        _write(note, {name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id")})
    return tokenizer


def _backend(checkpoint: Checkpoint) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(checkpoint.path / FILE))
    except Exception as error:  # tokenizers raises no narrower kind
        raise checkpoint.unreadable_tokenizer(error) from error


def _reads_alike(tokenizer: Any, backend: Tokenizer) -> bool:
    """Whether transformers' tokenizer reads and writes plain text as `backend` does."""
    own = getattr(tokenizer, "backend_tokenizer", None)
    if own is None or own.encode_special_tokens or backend.truncation is not None or backend.padding is not None:
        return False
    if own.to_str() != backend.to_str():
        return False
    special = "".join(map(str, tokenizer.all_special_tokens))
    return all(
        list(tokenizer(text, verbose=False)["input_ids"]) == backend.encode(text).ids
        for text in (*SAMPLES, special, f"a {special} b")
    )


def _note_of(checkpoint: Checkpoint) -> Path | None:
    """Return where the note about a checkpoint's files lies; None where none can."""
    if not (checkpoint.path / FILE).is_file() or (checkpoint.path / OTHER_READER).exists():
        return None
    folder = programs_folder("tokenizers")
    if folder is None:
        return None
    found = hashlib.blake2b(digest_size=16)
    versions = [version(name) for name in ("transformers", "tokenizers")]
    found.update(json.dumps([str(checkpoint.path.resolve()), versions]).encode())
    for name in READ:
        path = checkpoint.path / name
        content = path.read_bytes() if path.is_file() else None
        found.update(f"{name} {None if content is None else len(content)}\n".encode() + (content or b""))
    return folder / f"{found.hexdigest()}.json"


def _read(note: Path) -> dict[str, int | None] | None:
    """Return what a note says; None where there is none, or one that others may have written."""
    try:
        if not is_closed(note.stat()):
            return None
        noted = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return noted if isinstance(noted, dict) and noted.keys() == {"eos_token_id", "pad_token_id"} else None


def _write(note: Path, noted: dict[str, int | None]) -> None:
    """Write a note; a folder that cannot be written to is no reason to fail."""
    part = note.with_suffix(f".{os.getpid()}")
    try:
        part.write_text(json.dumps(noted), encoding="utf-8")
        part.replace(note)
    except OSError as error:
        log.debug("%s is not written: %s", note, error)
