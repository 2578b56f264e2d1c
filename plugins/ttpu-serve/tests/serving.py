"""A server in a thread of this process, over a socket, as clients of any kind meet it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import uvicorn

from ttpu_serve.api.async_engine import AsyncEngine
from ttpu_serve.server import ServerSettings, create_app
from ttpu_serve.server.run import Place, Server, config_of


@dataclass
class Running:
    """A server that runs."""

    url: str
    core: Any
    engine: AsyncEngine
    server: uvicorn.Server
    thread: threading.Thread

    def client(self, key: str = "none", **options: Any) -> Any:
        """The official client of OpenAI's API; it does not try again, so that errors show."""
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **options)

    def http(self, **options: Any) -> httpx.Client:
        """A plain client."""
        return httpx.Client(base_url=self.url, timeout=30, **options)

    def stop(self) -> None:
        """As by SIGTERM: drain, then leave."""
        self.server.handle_exit(signal.SIGTERM, None)


@contextmanager
def running(core: Any, settings: ServerSettings | None = None, tracer: Any = None) -> Iterator[Running]:
    """Serve a core on a free port of this machine."""
    settings = settings or ServerSettings()
    if settings.refusal_rate == ServerSettings().refusal_rate:  # tests are refused more in a second than clients are
        settings = replace(settings, refusal_rate=None)
    engine = AsyncEngine(core)
    app = create_app(engine, settings, tracer)
    place = Place(port=0)
    bound = place.bind()
    config = config_of(app, settings, place, log_level="error")
    server = Server(config, lambda: None, lambda: engine.drain(settings.drain_timeout))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started and thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.005)
    try:
        yield Running(place.url(bound), core, engine, server, thread)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not leave"


def until(true: Callable[[], Any], seconds: float = 10) -> None:
    """Wait for something to become true."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)
