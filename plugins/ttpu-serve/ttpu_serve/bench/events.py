"""Server-sent events. In: bytes as they come from a socket; out: the data of each whole event."""

from __future__ import annotations

from collections.abc import Iterator

MAX_EVENT_BYTES = 64 * 2**20


class EventDecoder:
    """Puts events together from pieces of any size.

    Lines end with LF or CRLF and nothing else: JSON texts may hold the other characters that Python takes for the end
    of a line."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The events that `piece` completes.

        Raises:
            ValueError: one is larger than any that a server sends on purpose.
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
