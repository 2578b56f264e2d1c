"""A server process. In: an application and where to listen; out: it serves until it is told to leave, then drains."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from ttpu_core.errors import RequestError
from ttpu_serve.server.settings import ServerSettings

KEEP_ALIVE_SECONDS = 60
LAST_WORDS_SECONDS = 5
"""In which clients must have read what is left when the engine has drained."""


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
            RequestError: the place is taken, or is none of this machine's; or the certificate cannot be used.
        """
        self._check_certificate()
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

    def _check_certificate(self) -> None:
        if self.certificate is None:
            if self.private_key is not None:
                raise RequestError(
                    f"--ssl-keyfile {self.private_key} was given without --ssl-certfile, so that http would be served: "
                    "pass both."
                )
            return
        try:
            # Without a password, for nobody may be there to type it.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.private_key, lambda: "")
        except (OSError, ValueError) as error:
            raise RequestError(
                f"https was to be served with the certificate {self.certificate} and the key "
                f"{self.private_key or 'in it'}, but they cannot be used ({error}): pass PEM files that belong "
                "together, the key without a password."
            ) from error

    def _refusal(self, error: OSError) -> RequestError:
        return RequestError(
            f"the server was to listen at {self.host}:{self.port}, but it cannot ({error.strerror or error}): choose "
            "another --host or --port, or end what listens there."
        )


class Server(uvicorn.Server):
    """uvicorn's, which says when it is ready, and whose process ends with status 0 once it has drained.

    It goes on to listen while `drain` runs, so that balancers and clients are told that it leaves, and streams end by
    what `drain` tells them rather than by a connection that closes."""

    def __init__(
        self, config: uvicorn.Config, ready: Callable[[], None], drain: Callable[[], Coroutine[Any, Any, Any]]
    ) -> None:
        super().__init__(config)
        self._ready, self._drain = ready, drain
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._signals = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal ends the server when it has drained, a second Ctrl-C at once."""
        self._signals += 1
        if self._signals > 1 and sig == signal.SIGINT:
            self.force_exit = self.should_exit = True
        elif self._signals == 1 and self.started and self._loop is not None:
            self._loop.call_soon_threadsafe(self._begin_to_leave)
        elif not self.started:
            self.should_exit = True

    def _begin_to_leave(self) -> None:
        self._draining = asyncio.ensure_future(self._leave())

    async def _leave(self) -> None:
        try:
            await self._drain()
        finally:
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
        timeout_graceful_shutdown=LAST_WORDS_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        ssl_certfile=place.certificate,
        ssl_keyfile=place.private_key,
        server_header=False,
    )
    with bound:
        engine = app.state.service.engine
        drain = partial(engine.drain, settings.drain_timeout)
        Server(config, lambda: ready(place.url(bound)), drain).run(sockets=[bound])
