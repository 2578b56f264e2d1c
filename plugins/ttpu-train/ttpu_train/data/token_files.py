"""Tokens on disk. Each source is tokenized once into a folder of memory-mapped arrays, which later runs and the other
processes of a machine read. A folder appears whole or not at all; its name is a hash of what decides its content."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from ttpu_core.cli.console import stderr_console
from ttpu_core.errors import DataError
from ttpu_train.data.settings import DataSettings
from ttpu_train.data.sources import Source
from ttpu_train.data.tokenize import Document, Tokenization
from ttpu_train.interrupts import StopRequest

INDEX, TOKENS, WEIGHTS, OFFSETS, FLAGS = "index.json", "tokens.int32", "weights.uint8", "offsets.npy", "flags.npy"
SHOW_AFTER = 2.0  # seconds of tokenizing before a progress bar appears


@dataclass(frozen=True)
class TokenFile:
    """The documents of one source.

    Attributes:
        tokens: int32 [tokens], of all documents, one after the other; on disk.
        weights: uint8 [tokens], 1 where a token is trained on; on disk.
        offsets: int64 [documents + 1], where each document begins.
        first_weighted: int64 [documents], the first token after a document's first that is trained on; -1 for none.
        divisible: bool [documents], whether a long document may be split.
        digest: a hash of all of it.
    """

    tokens: np.ndarray
    weights: np.ndarray
    offsets: np.ndarray
    first_weighted: np.ndarray
    divisible: np.ndarray
    digest: str


def cache_folder(settings: DataSettings) -> Path:
    """Where tokens are kept."""
    if settings.cache_dir is not None:
        return Path(settings.cache_dir).expanduser()
    root = os.environ.get("TTPU_CACHE")
    return (Path(root).expanduser() if root else Path.home() / ".cache" / "ttpu") / "tokens"


def tokenized(source: Source, tokenization: Tokenization, cache: Path) -> TokenFile:
    """A source's tokens, from the cache if they are there. Of several processes one tokenizes, and the others wait.

    Raises:
        DataError: the source is malformed, or the cache cannot be written.
    """
    key = hashlib.blake2b(f"{tokenization.key()}\n{source.key()}".encode(), digest_size=16).hexdigest()
    folder = cache / key
    if (found := _read(folder)) is not None:
        return found
    try:
        with _locked(cache, key):
            if (found := _read(folder)) is None:
                _write(folder, source, tokenization)
                found = _read(folder)
    except OSError as error:
        raise DataError(
            f"the tokens of {source.name} were to be kept in {cache}, but writing failed ({error}): make room there, "
            "or name another folder by cache_dir or the environment variable TTPU_CACHE."
        ) from error
    assert found is not None
    return found


def _read(folder: Path) -> TokenFile | None:
    """The tokens in a folder, or None if they are not there or not whole."""
    try:
        index = json.loads((folder / INDEX).read_text())
        sizes = [(folder / name).stat().st_size for name in (TOKENS, WEIGHTS)]
        offsets, flags = np.load(folder / OFFSETS), np.load(folder / FLAGS)
    except (OSError, ValueError, EOFError):
        return None
    if sizes != [4 * index["tokens"], index["tokens"]] or len(offsets) != index["documents"] + 1:
        return None
    tokens = np.memmap(folder / TOKENS, np.int32, "r")
    weights = np.memmap(folder / WEIGHTS, np.uint8, "r")
    return TokenFile(tokens, weights, offsets, flags[0], flags[1].astype(bool), index["digest"])


def _write(folder: Path, source: Source, tokenization: Tokenization) -> None:
    """Tokenize into a folder beside the right one, then rename it."""
    for left in folder.parent.glob(f"{folder.name}.part-*"):  # of a process that was killed: this one has the lock
        shutil.rmtree(left, ignore_errors=True)
    part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.part-", dir=folder.parent))
    try:
        writer = _Writer(part)
        with StopRequest() as stop:
            for document in _watched(tokenization.documents(source.examples()), source.name):
                writer.add(document)
                stop.pass_on()
        stop.pass_on()
        writer.finish(source.name)
        if folder.exists():  # it was not whole
            shutil.rmtree(folder)
        try:
            part.rename(folder)
        except OSError:
            if _read(folder) is None:  # not because another machine was faster, where the lock does not reach
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


class _Writer:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lengths: list[int] = []
        self._flags: list[tuple[int, bool]] = []
        self._digest = hashlib.blake2b(digest_size=16)
        self._tokens, self._weights = (folder / TOKENS).open("wb"), (folder / WEIGHTS).open("wb")

    def add(self, document: Document) -> None:
        later = np.flatnonzero(document.weights[1:])
        tokens, weights = document.tokens.tobytes(), document.weights.tobytes()
        self._tokens.write(tokens)
        self._weights.write(weights)
        self._lengths.append(len(document.tokens))
        self._flags.append((int(later[0]) + 1 if len(later) else -1, document.divisible))
        for part in (tokens, weights, b"%d %d;" % (len(document.tokens), document.divisible)):
            self._digest.update(part)

    def finish(self, name: str) -> None:
        for file in (self._tokens, self._weights):
            _flushed(file)
        if not self._lengths:
            raise DataError(
                f"{name} was given as training data, but it holds no example: give it some, or leave it out."
            )
        offsets = np.concatenate([[0], np.cumsum(self._lengths, dtype=np.int64)])
        for file_name, array in ((OFFSETS, offsets), (FLAGS, np.asarray(self._flags, np.int64).T)):
            with (self._folder / file_name).open("wb") as file:
                np.save(file, array)
                _flushed(file)
        index = {"source": name, "documents": len(self._lengths), "tokens": int(offsets[-1])}
        (self._folder / INDEX).write_text(json.dumps({**index, "digest": self._digest.hexdigest()}))


def _flushed(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


@contextmanager
def _locked(cache: Path, key: str) -> Iterator[None]:
    """Hold a file lock, which ends with its process, however that ends."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{key}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _watched(documents: Iterator[Document], name: str) -> Iterator[Document]:
    """The documents, with their number on a terminal if they take long."""
    if not sys.stderr.isatty():
        yield from documents
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    bar = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=stderr_console(), transient=True
    )
    task = bar.add_task(f"tokenizing {name}", total=None)
    begun, shown, count, tokens = time.monotonic(), False, 0, 0
    try:
        for document in documents:
            count, tokens = count + 1, tokens + len(document.tokens)
            if not shown and time.monotonic() - begun > SHOW_AFTER:
                bar.start()
                shown = True
            if count % 256 == 0:
                bar.update(task, description=f"tokenizing {name}: {count:,} documents, {tokens:,} tokens")
            yield document
    finally:
        bar.stop()
