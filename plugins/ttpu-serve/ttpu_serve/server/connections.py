"""Limits of connections: how many one address has, how long a request may arrive, and how long a closed connection may
hold what its client does not read."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
import time
from collections import Counter, defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ttpu_serve.server.errors import ApiError

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as HTTPProtocol
else:
    HTTPProtocol = AutoHTTPProtocol

SWEEP_SECONDS = 1.0
"""Between two looks at all connections."""
HEAD_SECONDS = 20.0
"""In which a connection must have sent the head of its first request, and of every other from its first byte on."""
GRACE_SECONDS = 1.0
"""From which on a request that has not arrived counts as incomplete."""
LINGER_SECONDS = 5.0
"""For which a connection that was closed may still send what its client has not read."""
_FAULTS_OF_CLIENTS = ("Invalid HTTP request received.", "ASGI callable returned without completing response.")
"""What uvicorn logs where a client sends no HTTP, and where one does not read its answer."""


def _no_fault_of_a_client(record: logging.LogRecord) -> bool:
    return record.getMessage() not in _FAULTS_OF_CLIENTS


def log_no_faults_of_clients() -> None:
    """Keep out of the server's log what any client can write there as often as it likes."""
    log = logging.getLogger("uvicorn.error")
    if _no_fault_of_a_client not in log.filters:
        log.addFilter(_no_fault_of_a_client)


class ConnectionGuard:
    """Watches the connections of one server."""

    def __init__(self, max_connections: int | None, max_incomplete: int) -> None:
        """
        Args:
            max_connections: of one address; None is any number.
            max_incomplete: connections of one address that are sending a request for more than a second.
        """
        self._most, self._most_incomplete = max_connections, max_incomplete
        self._connections: set[GuardedConnection] = set()
        self._of_address: Counter[str] = Counter()
        self._sweeping: asyncio.TimerHandle | None = None

    def protocol(self) -> type[GuardedConnection]:
        """The class of connections that this guard watches, for uvicorn."""
        return type("Connection", (GuardedConnection,), {"guard": self})

    def add(self, connection: GuardedConnection) -> None:
        """Watch a new connection, or end it, if its address has too many."""
        self._connections.add(connection)
        self._of_address[connection.address] += 1
        if self._sweeping is None:
            self._sweeping = connection.loop.call_later(SWEEP_SECONDS, self._sweep, connection.loop)
        if self._most is not None and connection.address and self._of_address[connection.address] > self._most:
            connection.refuse(
                ApiError(
                    f"your address has {self._most:,} connections, which is as many as one may have: close some.",
                    status=429,
                    kind="rate_limit_error",
                    code="rate_limit_exceeded",
                )
            )

    def remove(self, connection: GuardedConnection) -> None:
        """Forget a connection that is lost."""
        self._connections.discard(connection)
        self._of_address[connection.address] -= 1
        if not self._of_address[connection.address]:
            del self._of_address[connection.address]

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = time.monotonic()
        incomplete: dict[str, list[GuardedConnection]] = defaultdict(list)
        for connection in list(self._connections):
            connection.check(now)
            if connection.is_incomplete(now) and connection.address:
                incomplete[connection.address].append(connection)
        for found in incomplete.values():
            for connection in sorted(found, key=lambda each: each.began)[: max(len(found) - self._most_incomplete, 0)]:
                connection.refuse(
                    ApiError(
                        f"{len(found)} requests of your address arrive slowly, where {self._most_incomplete} may: "
                        "send requests whole.",
                        status=429,
                        kind="rate_limit_error",
                        code="rate_limit_exceeded",
                    )
                )
        self._sweeping = loop.call_later(SWEEP_SECONDS, self._sweep, loop) if self._connections else None


class GuardedConnection(HTTPProtocol):
    """uvicorn's connection, which tells when the request that arrives began.

    Attributes:
        guard: that watches it.
        address: of the client; empty where there is none, as on Unix sockets.
        began: when the request that arrives, or the connection, began, by `time.monotonic`.
    """

    guard: ConnectionGuard

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Watch the connection."""
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self.began = time.monotonic()
        self._head, self._silent = True, True  # whether a head is awaited, and nothing came at all
        self._closed: float | None = None
        self.guard.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Watch it no more."""
        super().connection_lost(exc)
        self.guard.remove(self)

    def data_received(self, data: bytes) -> None:
        """Note whether a request began."""
        if self.transport.is_closing():  # it was refused
            return
        before = self.cycle
        self._silent = False
        super().data_received(data)
        cycle: Any = self.cycle
        if cycle is not before:
            self._head = False
            self.began = time.monotonic()
        elif not self._head and (cycle is None or cycle.response_complete):
            self._head = True
            self.began = time.monotonic()

    def is_incomplete(self, now: float) -> bool:
        """Whether a request began to arrive some time ago, and has not arrived."""
        cycle: Any = self.cycle
        arrives = self._head or (cycle is not None and cycle.more_body and not cycle.response_complete)
        return arrives and now - self.began > GRACE_SECONDS and not self.transport.is_closing()

    def check(self, now: float) -> None:
        """End the connection, if its request's head takes too long, or if its client does not read what was sent."""
        if self.transport.is_closing():
            self._closed = now if self._closed is None else self._closed
            if now - self._closed > LINGER_SECONDS:
                with suppress(OSError, AttributeError):  # else the system holds what was not read for minutes
                    reset = struct.pack("ii", 1, 0)
                    self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                self.transport.abort()
        elif self._head and now - self.began > HEAD_SECONDS:
            if self._silent:
                self.transport.close()
                return
            self.refuse(
                ApiError(
                    f"the head of the request did not arrive within {HEAD_SECONDS:g} s: send it faster.",
                    status=408,
                    kind="timeout_error",
                    code="request_timeout",
                )
            )

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        cycle: Any = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.close()  # in the middle of an answer there is no place for another
            return
        self.refuse(
            ApiError("what was sent is no HTTP/1.1 request: see RFC 9112 for how one is written.", code="invalid_http")
        )

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing of requests to speak another protocol, which are answered as any: clients of all kinds make
        them."""

    def refuse(self, error: ApiError) -> None:
        """Send an error, and close the connection."""
        body = json.dumps(error.body).encode()
        head = (
            f"HTTP/1.1 {error.status} Refused\r\ncontent-type: application/json\r\nconnection: close\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
