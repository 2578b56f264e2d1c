"""The API key that a request brings, and the name under which what a client stores is kept."""

from __future__ import annotations

import hashlib

from fastapi import Request
from starlette.datastructures import Headers


def given_key(headers: Headers) -> str:
    """Return the key of `Authorization: Bearer KEY`, or else of `X-API-Key`, where Anthropic's clients have it."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def owner_of(request: Request) -> str:
    """Return a name for the client that sent a request, which does not tell its key; all clients of a server without
    keys are one, ""."""
    if not request.app.state.service.settings.api_keys:
        return ""
    return hashlib.sha256(given_key(request.headers).encode()).hexdigest()[:32]
