"""Reads an uploaded form as it arrives: its file goes to the store piece by piece, and its few fields to memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from ttpu_serve.server.batches.file_store import FileStore, IncomingFile
from ttpu_serve.server.errors import ApiError

WRITTEN = 2**20
"""Bytes that are written at once, in a thread."""
MOST_PARTS = 16
MOST_HEADER_BYTES, MOST_FIELD_BYTES = 4096, 1024
MOST_NAME = 255


class Upload:
    """A form that arrives.

    fields: its texts by name. file: what is written, None before it begins. filename: as the client calls it.
    """

    def __init__(self, content_type: str, store: FileStore, owner: str, most_bytes: int) -> None:
        """
        Args:
            content_type: the request's header.
            store: gets the file.
            owner: the client.
            most_bytes: of the file.

        Raises:
            ApiError: the body is no form.
        """
        kind, options = parse_options_header(content_type)
        if kind.lower() != b"multipart/form-data" or not options.get(b"boundary"):
            raise ApiError(
                f"the header Content-Type is {content_type[:80]!r}, but a file is sent as a form: send "
                "'multipart/form-data; boundary=…' with the fields file and purpose, as OpenAI's client does.",
                status=415,
                code="unsupported_media_type",
            )
        self.fields: dict[str, str] = {}
        self.file: IncomingFile | None = None
        self.filename = ""
        self._store, self._owner, self._most = store, owner, most_bytes
        self._boundary = options[b"boundary"]
        self._head = self._parts = 0  # bytes of the part's headers, and parts so far
        self._header, self._value = b"", b""
        self._disposition = b""
        self._name: str | None = None  # of the field that arrives
        self._field = b""
        self._size = 0  # of the file
        self._pending = bytearray()
        self._ended = False

    async def read(self, parts: AsyncIterator[bytes]) -> None:
        """Read the form to its end.

        Args:
            parts: of the body, as they arrive.

        Raises:
            ApiError: the form is malformed, or holds too much.
        """
        try:
            parser = MultipartParser(self._boundary, self._callbacks())
            async for part in parts:
                parser.write(part)
                if len(self._pending) >= WRITTEN:
                    await self._write()
            parser.finalize()
        except FormParserError as error:
            raise _malformed(str(error)) from error
        if not self._ended:
            raise _malformed("its end is missing")
        await self._write()

    async def _write(self) -> None:
        if self.file is not None:
            written, self._pending = self._pending, bytearray()
            await asyncio.to_thread(self.file.write, bytes(written))

    def _callbacks(self) -> Any:
        return {
            "on_part_begin": self._on_part_begin,
            "on_header_field": self._on_header_field,
            "on_header_value": self._on_header_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers_finished,
            "on_part_data": self._on_part_data,
            "on_part_end": self._on_part_end,
            "on_end": self._on_end,
        }

    def _on_part_begin(self) -> None:
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise _malformed(f"it has more than {MOST_PARTS} fields")
        self._head, self._disposition = 0, b""

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._value += data[start:end]

    def _count(self, size: int) -> None:
        self._head += size
        if self._head > MOST_HEADER_BYTES:
            raise _malformed(f"a field of it has more than {MOST_HEADER_BYTES:,} bytes of headers")

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition.decode("latin-1"))
        name = _text(options.get(b"name", b""))
        if b"filename" not in options:
            self._name, self._field = name, b""
            if not name or name in self.fields:
                raise _malformed(f"the field {name[:40]!r} has no name, or is there twice")
            return
        if name != "file" or self.file is not None:
            raise ApiError(
                f"the form has a file in the field {name[:40]!r}, but takes one alone, in the field 'file': leave out "
                "others.",
                param=name[:40] or None,
            )
        self._name = None
        self.filename = _plain(_text(options[b"filename"]))
        self.file = self._store.begin(self._owner)

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name is not None:
            self._field += data[start:end]
            if len(self._field) > MOST_FIELD_BYTES:
                raise _malformed(f"the field {self._name[:40]!r} has more than {MOST_FIELD_BYTES:,} bytes")
            return
        self._size += end - start
        if self._size > self._most:
            raise ApiError(
                f"the file has more than {self._most:,} bytes, which is the most that this server takes: send several.",
                status=413,
                param="file",
                code="request_too_large",
            )
        self._pending += data[start:end]

    def _on_part_end(self) -> None:
        if self._name is not None:
            self.fields[self._name] = _text(self._field)
            self._name = None

    def _on_end(self) -> None:
        self._ended = True


def _text(value: bytes) -> str:
    return value.decode("utf-8", errors="replace")


def _plain(filename: str) -> str:
    """Return a file's name without folders and control characters."""
    name = filename.replace("\\", "/").rpartition("/")[2]
    return "".join(letter for letter in name if letter.isprintable())[:MOST_NAME] or "file.jsonl"


def _malformed(reason: str) -> ApiError:
    return ApiError(f"the body is a form that cannot be read ({reason}): correct it.", code="invalid_form")
