"""The lines of one batch of the server, and the two files that their answers go to."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import IO

from ttpu_serve.server.batches.answers import Answer, unanswered
from ttpu_serve.server.batches.file_store import FileStore, IncomingFile
from ttpu_serve.server.batches.lines import Line, LineReader, RawLine, read_line
from ttpu_serve.server.batches.record import Batch
from ttpu_serve.server.errors import ApiError


class BatchWork:
    """A batch that is worked on. All methods but `read` run in the thread for files."""

    def __init__(self, batch: Batch, store: FileStore, source: IO[bytes], *, most_bytes: int, most_values: int) -> None:
        """
        Args:
            batch: whose lines they are; its counts are kept up to date.
            store: gets the files.
            source: the file of lines.
            most_bytes: of a line.
            most_values: the most values of a line.
        """
        self.owner = batch.owner
        self.reader = LineReader(source, most_bytes)
        self._batch, self._store, self._source, self._most_values = batch, store, source, most_values
        self._files: dict[str, IncomingFile] = {}
        self._done: set[int] = set()  # numbers of lines

    @property
    def urls(self) -> Collection[str]:
        """The endpoint that lines may name."""
        return (self._batch.endpoint,)

    def next(self) -> RawLine | None:
        """Return the next line, or None when all were returned."""
        return self.reader.next()

    def read(self, raw: RawLine) -> Line:
        """Return a line's request.

        Raises:
            ApiError: it is none.
        """
        return read_line(raw, self.urls, self._most_values)

    def done(self, line: Line, answer: Answer) -> None:
        """Write an answer.

        Raises:
            ApiError: the client's files have as many bytes as they may.
        """
        batch = self._batch
        self._write(batch.output_id if answer.succeeded else batch.error_id, answer.as_json())
        self._done.add(line.number)
        if answer.succeeded:
            batch.succeeded += 1
            batch.usage.add(answer.body.get("usage"))
        else:
            batch.failed += 1

    def tell_unanswered(self, code: str, message: str) -> None:
        """Write an error for each line without an answer, as far as there is room."""
        self.reader.rewind()
        while (raw := self.reader.next()) is not None:
            if raw.number in self._done:
                continue
            try:
                self._write(self._batch.error_id, unanswered(self.read(raw).custom_id, code, message))
            except ApiError:  # no room
                return

    def finish(self) -> None:
        """Show the files to the client."""
        self._source.close()
        try:
            for name, file in self._files.items():
                kind = "output" if name == self._batch.output_id else "error"
                file.finish(file_name(self._batch.id, kind), "batch_output", self._batch.output_seconds)
                self._batch.written.append(name)
        finally:
            for file in self._files.values():
                file.discard()

    def _write(self, name: str, value: object) -> None:
        if name not in self._files:
            self._files[name] = self._store.begin(self.owner, name)
        self._files[name].write(json.dumps(value, allow_nan=False).encode() + b"\n")


def file_name(batch: str, kind: str) -> str:
    """Return the name of a file that a batch writes."""
    return f"{batch}_{kind}.jsonl"
