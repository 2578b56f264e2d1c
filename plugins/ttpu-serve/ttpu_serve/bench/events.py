"""Decodes server-sent events from the byte chunks of a socket."""

from __future__ import annotations

from collections.abc import Iterator

MAX_EVENT_BYTES = 64 * 2**20


class EventDecoder:
    """Assembles events from byte chunks of any size.

    Only LF and CRLF end a line: JSON texts may contain other characters that Python treats as line ends.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yield the data of each event that `piece` completes.

        Raises:
            ValueError: an event exceeds the maximum size.
        """
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data = []
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
