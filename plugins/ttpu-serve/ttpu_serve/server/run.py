"""Runs an application as a server process until a signal stops it, then drains it."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from ttpu_core.errors import RequestError
from ttpu_serve.api.output_queue import EngineDeadError
from ttpu_serve.server.connections import ConnectionGuard, log_no_faults_of_clients
from ttpu_serve.server.settings import ServerSettings

KEEP_ALIVE_SECONDS = 60
OPEN_FILES = 65_536
SEND_BYTES = 2**17
"""That the system holds for a client that does not read; it doubles them."""
LAST_WORDS_SECONDS = 5
"""In which clients must have read what is left when the engine has drained."""
SWITCH_SECONDS = 0.0005
"""After which a thread that runs Python code lets others run. The engine's thread waits this long whenever it comes
back from the device while requests are parsed. With Python's own 5 ms, a step beside large requests takes several times
as long."""


@dataclass(frozen=True)
class Place:
    """The address at which a server listens; port 0 selects a free port. With a certificate the server uses https. With
    `uds` it listens at this path as a Unix domain socket, and not at host and port."""

    host: str = "127.0.0.1"
    port: int = 8000
    certificate: str | None = None
    private_key: str | None = None
    uds: str | None = None

    def bind(self) -> socket.socket:
        """Bind the socket before the model is loaded. It refuses connections until the server is ready.

        Raises:
            RequestError: the address is in use or invalid, or the certificate cannot be used.
        """
        self._check_certificate()
        if self.uds is not None:
            return self._bind_path(self.uds)
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            bound = socket.socket(family, kind, protocol)
        except OSError as error:
            raise self._refusal(error) from error
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
            bound.bind(address)
        except OSError as error:
            bound.close()
            raise self._refusal(error) from error
        return bound

    @staticmethod
    def _bind_path(path: str) -> socket.socket:
        """Bind a Unix domain socket; one that nobody listens at any more is replaced."""
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if Path(path).is_socket():
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
                    if asked.connect_ex(path):
                        Path(path).unlink()
            bound.bind(path)
        except OSError as error:
            bound.close()
            raise RequestError(
                f"the server was to listen at --uds {path}, but it cannot ({error.strerror or error}): choose another "
                "path, or end what listens there."
            ) from error
        return bound

    def url(self, bound: socket.socket) -> str:
        """Return the URL for a browser on this machine; of a Unix domain socket, its path."""
        if self.uds is not None:
            return f"unix:{self.uds}"
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
    """uvicorn's server with a callback when it is ready and exit status 0 after it has drained.

    It keeps listening while `drain` runs, so that load balancers and clients get a refusal, and streams end with a
    message instead of a closed connection.
    """

    def __init__(
        self, config: uvicorn.Config, ready: Callable[[], None], drain: Callable[[], Coroutine[Any, Any, Any]]
    ) -> None:
        super().__init__(config)
        self._ready, self._drain = ready, drain
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._signals = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain and exit on the first signal; exit at once on a second Ctrl-C."""
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


def config_of(
    app: Any, settings: ServerSettings, place: Place, *, log_level: str, access_log: bool = False
) -> uvicorn.Config:
    """Return how uvicorn runs the server.

    Args:
        app: the application.
        settings: the server's settings.
        place: the address.
        log_level: of the server's own lines.
        access_log: log every request, at any level.
    """
    log_no_faults_of_clients()
    config = uvicorn.Config(
        app,
        http=ConnectionGuard(settings.max_connections, settings.max_incomplete).protocol(),
        timeout_graceful_shutdown=LAST_WORDS_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        ssl_certfile=place.certificate,
        ssl_keyfile=place.private_key,
        server_header=False,
        ws="none",  # an upgrade is answered as any request
        log_level=log_level,
        access_log=access_log,
    )
    if access_log:  # whose lines have the level INFO, whatever the server's own level is
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    return config


def _allow_many_files() -> None:
    """Raise the number of files that this process may have open, of which each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _collect_no_more_what_stays() -> None:
    """Keep what is there from the garbage collector, which would walk the model's and the libraries' objects again and
    again for the sake of requests, a fifth of a second at a time."""
    gc.collect()
    gc.freeze()


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
    """Serve until SIGTERM or Ctrl-C.

    Args:
        app: the application of `create_app`.
        settings: the server's settings.
        place: the address.
        bound: the socket of `place.bind`.
        ready: called with the URL when the server accepts requests.
        log_level: uvicorn's log level.
        access_log: log every request, at any level.

    Raises:
        EngineDeadError: the engine failed, so that a supervisor should start another process.
    """
    config = config_of(app, settings, place, log_level=log_level, access_log=access_log)
    _allow_many_files()
    sys.setswitchinterval(SWITCH_SECONDS)
    _collect_no_more_what_stays()
    with bound:
        engine = app.state.service.engine
        drain = partial(engine.drain, settings.drain_timeout)
        server = Server(config, lambda: ready(place.url(bound)), drain)

        def leave() -> None:
            server.should_exit = True  # what is told of the failure is still sent

        engine.on_death = leave
        try:
            server.run(sockets=[bound])
        finally:
            if place.uds is not None:
                Path(place.uds).unlink(missing_ok=True)
        if engine.error is not None:
            raise EngineDeadError(f"the engine failed ({engine.error}): start the server again.")
