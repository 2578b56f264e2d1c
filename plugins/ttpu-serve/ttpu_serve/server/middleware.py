"""ASGI middleware before every request: it checks hosts, API keys, body sizes and the number of concurrent
requests."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
import socket
import time
import uuid
from collections import Counter
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ttpu_serve.api.async_engine import LEAVING
from ttpu_serve.api.output_queue import EngineClosingError
from ttpu_serve.server.arriving import ArrivingBody
from ttpu_serve.server.client_key import given_key
from ttpu_serve.server.errors import ApiError, respond
from ttpu_serve.server.events import ARRIVAL, CLIENT, ClientGoneError
from ttpu_serve.server.given_fields import GIVEN_FIELDS, WARNING_HEADER, GivenFields
from ttpu_serve.server.refusals import RefusalPace
from ttpu_serve.server.service import Service
from ttpu_serve.server.traces import TRACE, RequestTrace

OPEN_PATHS = frozenset(
    {"/", "/page.js", "/page.css", "/openapi.json"}
    | {"/health", "/load", "/metrics", "/ping", "/stats", "/version"}
)
"""Need no key, and are served however much there is to do."""
READ_SECONDS, PART_SECONDS = 60.0, 10.0
"""In which a client must have sent its body, and the next part of it."""
MOST_ARRIVING = 2**28
"""Bytes of all bodies that have not arrived as a whole."""
UPLOAD_PATH = "/v1/files"
"""Where bodies are not held in memory, but written to a file as they arrive."""
UPLOAD_RATE = 2**20
"""Bytes of an upload for each of which it may take a second longer than other bodies."""
FORM_BYTES = 2**16
"""Of the form around a file."""
MOST_UPLOADS, MOST_UPLOADS_OF_CLIENT = 64, 8
"""Files that arrive at once."""
ADMIN_PATHS = frozenset(
    {
        "/sleep",
        "/wake_up",
        "/is_sleeping",
        "/reset_prefix_cache",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    }
)
"""What no other site's page may ask for in the name of the browser's user; a key, which such pages lack, keeps them out
as well. Neither may it store files here, nor cancel batches: forms need no permission of the browser."""
STORE_PATHS = ("/v1/files", "/v1/batches")
_PLAIN = re.compile(r"[\x21-\x7e]{1,128}")


class RequestMiddleware:
    """Checks the API key (401), the body's size (413) and the number of requests (429), reads the body, and assigns an
    id to and counts every request."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        settings = service.settings
        self._app, self._settings, self._metrics, self._tracer = app, settings, service.metrics, service.tracer
        self._most_bytes = service.most_body_bytes
        self._keys = [key.encode() for key in settings.api_keys]
        self._running = self._arriving = 0  # requests, and bytes of bodies
        self._uploads: Counter[str] = Counter()  # of each client
        self._refusals = RefusalPace(settings.refusal_rate)
        self._hosts = {"localhost", socket.gethostname().lower(), *(name.lower() for name in settings.allowed_hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if root := self._settings.root_path.rstrip("/"):
            scope["root_path"] = root
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        name = given if _PLAIN.fullmatch(given) else uuid.uuid4().hex
        started, status = time.monotonic(), 499  # nginx's status for a client that left
        fields = GivenFields(self._settings.strict_fields)
        GIVEN_FIELDS.set(fields)
        trace = None if self._tracer is None else RequestTrace()
        TRACE.set(trace)

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                added = MutableHeaders(scope=message)
                added["x-request-id"] = name
                if warning := fields.warning:
                    added[WARNING_HEADER] = warning
            await send(message)

        refusal: list[Message] = []

        async def paced(message: Message) -> None:
            """Keep a refusal until the request has left its place among those that run."""
            if refusal or (message["type"] == "http.response.start" and 400 <= message["status"] < 500):
                refusal.append(message)
            else:
                await named(message)

        try:
            await self._guarded(scope, headers, receive, paced)
            if refusal:
                await self._pace(scope)
            for message in refusal:
                await named(message)
        except ClientGoneError:
            pass
        finally:
            route = scope.get("route")
            path = getattr(route, "path", None) or "other"
            self._metrics.http(path, status, time.monotonic() - started)
            if self._tracer is not None and trace is not None and _own_path(scope) not in OPEN_PATHS:
                self._tracer.end(trace, headers, path, status, name)

    async def _pace(self, scope: Scope) -> None:
        """Wait until a refusal may be sent to this address; a server that leaves waits no longer."""
        seconds = self._refusals.wait(str((scope.get("client") or ("",))[0]))
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(seconds)

    async def _guarded(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        limited = _own_path(scope) not in OPEN_PATHS
        began = False

        async def noting(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            self._check_host(headers)
            if not limited:  # reads no bodies, and holds none
                await self._app(scope, receive, noting)
                return
            self._check_key(scope, headers)
            self._check_site(scope, headers)
            _check_encoding(headers)
            # Without keys, a header must not make one client many.
            client = given_key(headers) if self._keys else str((scope.get("client") or ("",))[0])
            if self._settings.batches and scope["method"] == "POST" and _own_path(scope) == UPLOAD_PATH:
                await self._upload(client, scope, headers, receive, noting)
                return
            self._check_number()
            body = await self._body(headers, receive)
            self._check_number()
            ARRIVAL.set(time.monotonic())
            CLIENT.set((client, len(body)))
            self._running += 1
            try:
                await self._app(scope, _replayed(body, receive), noting)
            finally:
                self._running -= 1
        except ClientGoneError:
            raise
        except asyncio.CancelledError:  # by a server that leaves and waits no longer
            if not began:
                await respond(EngineClosingError(LEAVING), str(scope["path"]))(scope, receive, send)
        except Exception as error:  # bugs as well: the response has a name, is counted, and ends its connection well
            if began:
                raise
            await respond(error, str(scope["path"]))(scope, receive, send)

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        if not self._keys or scope["method"] == "OPTIONS":
            return
        given = given_key(headers).encode()
        found = "another one" if given else "one in another form" if headers.get("authorization") else "none"
        # Every key is compared, in constant time, so that time tells nothing.
        if not sum([hmac.compare_digest(given, known) for known in self._keys]):
            raise ApiError(
                f"this server asks for an API key, but the request has {found}: send the header 'Authorization: Bearer "
                "KEY'.",
                status=401,
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _check_host(self, headers: Headers) -> None:
        """Refuse names that are not this server's: another site's page may lead its own name to this machine, and the
        browser then takes this server for that site."""
        if self._keys or "*" in self._hosts:
            return
        given = headers.get("host", "")
        name = given.partition("]")[0].lstrip("[") if given.startswith("[") else given.partition(":")[0]
        name = name.lower().removesuffix(".")
        # Browsers always name the host; what names none is a prober.
        if not name or name in self._hosts or name.endswith(".localhost") or _is_address(name):
            return
        raise ApiError(
            f"the request is for the host {name[:100]!r}, but this server has no API key, and answers under "
            "addresses, localhost and its own names: start it with a key, or name the host by --allowed-host.",
            status=421,
            kind="permission_error",
            code="unknown_host",
        )

    def _check_site(self, scope: Scope, headers: Headers) -> None:
        path = _own_path(scope)
        stores = path.startswith(STORE_PATHS) and scope["method"] == "POST"
        if self._keys or not (path in ADMIN_PATHS or stores):
            return
        origin = headers.get("origin")
        if origin is None:
            foreign = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        else:
            own = origin.partition("://")[2] == headers.get("host")
            foreign = not own and origin not in self._settings.allowed_origins
        if foreign:
            what = "batches" if stores else "administration"
            raise ApiError(
                f"another site's page ({origin or 'of unknown origin'}) asks for {what}, but this server has no API "
                "key to tell friends by: start it with one, or name the site by --allowed-origin.",
                status=403,
                kind="permission_error",
                code="foreign_site",
            )

    def _check_number(self) -> None:
        most = self._settings.max_concurrent
        if self._running >= most:
            raise _too_much(f"{most} requests are worked on, which is as many as may be: try again in a second.")

    async def _upload(self, client: str, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        """Handle a request whose body is read by its endpoint, as it arrives."""
        if self._uploads[client] >= MOST_UPLOADS_OF_CLIENT or self._uploads.total() >= MOST_UPLOADS:
            raise _too_much("too many files arrive at once: try again when others have arrived.")
        most = self._settings.max_file_bytes + FORM_BYTES
        arriving = ArrivingBody(
            headers, receive, most, seconds=READ_SECONDS, part_seconds=PART_SECONDS, bytes_per_second=UPLOAD_RATE
        )

        async def next_part() -> Message:
            part = await arriving.part()
            return {"type": "http.request", "body": part or b"", "more_body": part is not None}

        self._uploads[client] += 1
        try:
            await self._app(scope, next_part, send)
        finally:
            self._uploads[client] -= 1
            if not self._uploads[client]:
                del self._uploads[client]

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        """The whole body; one that is too large is read on for a while, and dropped."""
        arriving = ArrivingBody(headers, receive, self._most_bytes, seconds=READ_SECONDS, part_seconds=PART_SECONDS)
        parts: list[bytes] = []
        held = 0
        try:
            while (part := await arriving.part()) is not None:
                parts.append(part)
                self._arriving += len(part)
                held += len(part)
                if arriving.more and self._arriving > MOST_ARRIVING:
                    raise _too_much("too many large bodies arrive at once: try again in a second.")
        finally:
            self._arriving -= held
        return b"".join(parts)


def _too_much(message: str) -> ApiError:
    """A refusal for now."""
    return ApiError(
        message,
        status=429,
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": "1"},
    )


def _check_encoding(headers: Headers) -> None:
    """Refuse bodies that are compressed, or whose end a proxy may see elsewhere than this server."""
    if "transfer-encoding" in headers and "content-length" in headers:
        raise ApiError(
            "the request has both Content-Length and Transfer-Encoding, which say where its body ends in two ways: "
            "send one of them.",
            code="invalid_http",
            headers={"Connection": "close"},
        )
    encoding = headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise ApiError(
            f"the body is encoded by {encoding[:40]!r}, but this server unpacks none: send it as it is.",
            status=415,
            code="unsupported_media_type",
        )


def _own_path(scope: Scope) -> str:
    """Return the path without the root path of a proxy that does not strip it, as the routes have it."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that first delivers the body that was read."""
    waiting = [body]  # popped, so that a request that runs for long does not hold it

    async def replay() -> Message:
        if not waiting:
            return await receive()
        return {"type": "http.request", "body": waiting.pop(), "more_body": False}

    return replay
