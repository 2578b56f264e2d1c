"""A server process. In: an application and where to listen; out: it serves until it is told to leave, then drains."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import uvicorn

from ttpu_core.errors import RequestError
from ttpu_jax.server.settings import ServerSettings

KEEP_ALIVE_SECONDS = 60


@dataclass(frozen=True)
class Place:
    """Where a server listens; port 0 takes any that is free. The files of a certificate make it https."""

    host: str = "127.0.0.1"
    port: int = 8000
    certificate: str | None = None
    private_key: str | None = None

    def bind(self) -> socket.socket:
        """The socket, which refuses connections until the server is ready; taken before a model is loaded for nothing.

        Raises:
            RequestError: the place is taken, or is none of this machine's.
        """
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            bound = socket.socket(family, kind, protocol)
        except OSError as error:
            raise self._refusal(error) from error
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError as error:
            bound.close()
            raise self._refusal(error) from error
        return bound

    def url(self, bound: socket.socket) -> str:
        """What a browser on this machine opens."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(
            self.host, f"[{self.host}]" if ":" in self.host else self.host
        )
        return f"{'https' if self.certificate else 'http'}://{host}:{bound.getsockname()[1]}"

    def _refusal(self, error: OSError) -> RequestError:
        return RequestError(
            f"the server was to listen at {self.host}:{self.port}, but it cannot ({error.strerror or error}): choose "
            "another --host or --port, or end what listens there."
        )


class Server(uvicorn.Server):
    """uvicorn's, which says when it is ready, and whose process ends with status 0 once it has drained."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        if self.started:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal ends the server when it has drained, a second Ctrl-C at once."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True


def run(
    app: Any,
    settings: ServerSettings,
    place: Place,
    bound: socket.socket,
    *,
    ready: Callable[[str], None],
    log_level: str = "warning",
    access_log: bool = False,
) -> None:
    """Serve until SIGTERM or Ctrl-C; `ready` is told the URL."""
    config = uvicorn.Config(
        app,
        log_level=log_level,
        access_log=access_log,
        timeout_graceful_shutdown=settings.drain_seconds,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        ssl_certfile=place.certificate,
        ssl_keyfile=place.private_key,
        server_header=False,
    )
    with bound:
        Server(config, lambda: ready(place.url(bound))).run(sockets=[bound])
