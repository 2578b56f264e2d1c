"""The web page at `/` with a chat and live metrics: three files without external resources."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import APIRouter, Response

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def router() -> APIRouter:
    """Return the routes of its files."""
    routes = APIRouter(include_in_schema=False)
    folder = files("ttpu_serve.server") / "web"
    for path, name, kind in (
        ("/", "index.html", "text/html"),
        ("/page.js", "page.js", "text/javascript"),
        ("/page.css", "page.css", "text/css"),
    ):
        routes.add_api_route(path, _serving((folder / name).read_bytes(), kind), methods=["GET"])
    return routes


def _serving(content: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    async def serve() -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return serve
