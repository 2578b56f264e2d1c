"""Refusals that depend on the engine's load, not on the request: the same request may succeed later."""

from __future__ import annotations

from ttpu_core.errors import RequestError


class QueueFullError(RequestError):
    """The waiting queue is full; the same request may succeed later."""
