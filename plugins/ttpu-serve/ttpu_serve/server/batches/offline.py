"""Answers the lines of a file without a server. Answers are kept as they come in a file beside the output, from which a
later run goes on; the output appears when all are there, in the order of the lines."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from ttpu_core.cli.console import note
from ttpu_core.errors import RequestError
from ttpu_serve.api.async_engine import AsyncEngine
from ttpu_serve.server.batches.answers import Answer
from ttpu_serve.server.batches.endpoints import ENDPOINTS
from ttpu_serve.server.batches.executor import LineExecutor
from ttpu_serve.server.batches.lines import Line, LineCheck, LineReader, RawLine, digest_of, read_line
from ttpu_serve.server.batches.record import Usage
from ttpu_serve.server.service import Service
from ttpu_serve.server.settings import ServerSettings

if TYPE_CHECKING:
    from ttpu_serve.execution.engine_core import EngineCore

MOST_LINE_BYTES, MOST_LINE_VALUES = 2**28, 2**31
"""Of a line; it is the user's own."""


class OfflineWork:
    """The lines of a file, and their answers.

    total: lines. resumed: of them, those that an earlier run answered. succeeded, failed: those that were answered now.
    usage: tokens of the answers of now. partial: where answers are kept until all are there.

    Raises:
        RequestError: a file cannot be used, a line is wrong, or an earlier run left answers that nobody asked to use.
    """

    owner = ""

    def __init__(
        self, source: Path, output: Path, *, resume: bool, on_answer: Callable[[bool], None] = lambda failed: None
    ) -> None:
        """
        Args:
            source: the file of lines.
            output: where the answers go. An existing file is replaced.
            resume: go on with the answers that an earlier run left; where it left none, a line on stderr says so.
            on_answer: called in another thread after each answer, with whether it is an error.
        """
        self.partial = output.with_name(f"{output.name}.partial")
        self.total = self.resumed = self.succeeded = self.failed = 0
        self.usage = Usage()
        self.on_answer = on_answer
        self._output = output
        self._places: dict[int, int] = {}  # number of a line → where its answer begins
        self._source = _opened(source, "rb", "requests were to be read from")
        self._answers: IO[bytes] | None = None
        try:
            if output.is_dir() or (output.exists() and output.samefile(source)):
                raise RequestError(
                    f"answers were to be written to {output}, but it is a folder or the input: name another file."
                )
            was_left = self.partial.exists()
            if was_left and not resume:
                raise RequestError(
                    f"answers were to be written to {output}, but {self.partial} has those of an earlier run: pass "
                    "--resume to go on with it, or delete it."
                )
            self._answers = _opened(self.partial, "a+b", "answers were to be written to")
            self._reader = LineReader(self._source, MOST_LINE_BYTES)
            self._check(source, _answered(self._answers, self.partial))
            if resume and not was_left:
                replaced = f", and {output} is replaced" if output.exists() else ""
                note(
                    f"warning: --resume was given, but there is no {self.partial} to go on with: all requests are "
                    f"answered anew{replaced}"
                )
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> OfflineWork:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def next(self) -> RawLine | None:
        """Return the next line without an answer, or None when all were returned."""
        while (raw := self._reader.next()) is not None and raw.number in self._places:
            pass
        return raw

    def read(self, raw: RawLine) -> Line:
        """Return a line's request."""
        return read_line(raw, ENDPOINTS, MOST_LINE_VALUES)

    def done(self, line: Line, answer: Answer) -> None:
        """Write an answer."""
        assert self._answers is not None
        self._places[line.number] = self._answers.seek(0, os.SEEK_END)
        self._answers.write(json.dumps(answer.as_json(), allow_nan=False).encode() + b"\n")
        self._answers.flush()
        self.succeeded += answer.succeeded
        self.failed += not answer.succeeded
        if answer.succeeded:
            self.usage.add(answer.body.get("usage"))
        self.on_answer(not answer.succeeded)

    def finish(self) -> None:
        """Write the output, whole or not at all, and delete what was kept for it."""
        assert self._answers is not None
        handle, name = tempfile.mkstemp(prefix=f".{self._output.name}.", dir=self._output.absolute().parent)
        try:
            with os.fdopen(handle, "wb") as file:
                for number in sorted(self._places):
                    self._answers.seek(self._places[number])
                    file.write(self._answers.readline())
                file.flush()
                os.fsync(file.fileno())
            shutil.copymode(self.partial, name)
            Path(name).replace(self._output)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        self._close()
        self.partial.unlink()

    def _check(self, source: Path, kept: dict[bytes, int]) -> None:
        """Check all lines, and note which have been answered."""

        def find(line: Line) -> None:
            place = kept.pop(digest_of(line.custom_id), None)
            if place is not None:
                self._places[line.number] = place

        check = LineCheck(self._reader, ENDPOINTS, most_values=MOST_LINE_VALUES, most_lines=None, on_line=find)
        while check.some():
            pass
        if check.problems:
            first, more = check.problems[0], len(check.problems) - 1
            rest = f" {more} more lines are wrong." if more else ""
            place = source if first["code"] == "empty_file" else f"{source}, line {first['line']}"
            raise RequestError(f"{place}: {first['message']}{rest}")
        if kept:
            raise RequestError(
                f"{self.partial} has answers to {len(kept):,} lines that {source} does not have, so that it is of "
                "another input: delete it, or name another output."
            )
        self.total, self.resumed = check.count, len(self._places)
        self._reader.rewind()

    def _close(self) -> None:
        """Close the files, and delete the partial one if it holds nothing."""
        self._source.close()
        if self._answers is not None and not self._answers.closed:
            empty = not self._answers.seek(0, os.SEEK_END)
            self._answers.close()
            if empty:
                self.partial.unlink(missing_ok=True)


async def answer_file(core: EngineCore, settings: ServerSettings, work: OfflineWork, at_once: int) -> None:
    """Answer all lines of a file. The engine is closed at the end.

    Args:
        core: the engine.
        settings: how requests are read, and answers made.
        work: the lines.
        at_once: sequences that are worked on at once.

    Raises:
        TTPUError: the engine failed.
        OSError: an answer cannot be written.
    """
    engine = AsyncEngine(core)
    service = Service(engine, settings)
    executor = LineExecutor(service, at_once)
    engine.start()
    try:
        await executor.run(work)
    finally:
        await engine.shutdown(0)
        executor.close()
        service.close()


def _answered(answers: IO[bytes], path: Path) -> dict[bytes, int]:
    """Return where the answers of an earlier run begin, by the digests of their ids, errors left out. A last line that
    is not whole is cut off.

    Raises:
        RequestError: the file holds something else.
    """
    found: dict[bytes, int] = {}
    place = answers.seek(0)
    while line := answers.readline():
        if not line.endswith(b"\n"):
            answers.truncate(place)
            break
        try:
            told = json.loads(line)
            name, status = str(told["custom_id"]), told["response"]["status_code"]
        except (ValueError, KeyError, TypeError) as error:
            raise RequestError(
                f"{path} was to be gone on with, but it holds other things than answers: name another output."
            ) from error
        if status == 200:
            found[digest_of(name)] = place
        place += len(line)
    return found


def _opened(path: Path, mode: str, what: str) -> Any:
    try:
        return path.open(mode)
    except OSError as error:
        raise RequestError(
            f"{what} {path}, but that cannot be ({error.strerror or error}): name a file that this user may use."
        ) from error

