"""What serving refuses beside a request's own values: a request that came at a bad time, and may come again."""

from __future__ import annotations

from ttpu_core.errors import RequestError


class QueueFullError(RequestError):
    """As many requests wait as the engine was told to let wait; the same request may succeed later."""
