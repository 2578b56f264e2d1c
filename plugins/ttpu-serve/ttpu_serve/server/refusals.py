"""Paces refusals, so that a client whose requests are all refused does not take the server from others."""

from __future__ import annotations

import time

BURST = 2.0
"""Seconds whose refusals a client may get at once."""
LONGEST = 5.0
"""Seconds that a refusal waits at most."""
MOST_CLIENTS = 10_000
"""That are remembered before those are forgotten whose next refusal would not wait."""


class RefusalPace:
    """When each client's next refusal may be sent: by the generic cell rate algorithm (ITU-T I.371), a rate with a
    burst."""

    def __init__(self, rate: float | None) -> None:
        """
        Args:
            rate: refusals of one client in a second; None is unlimited.
        """
        self._rate = rate
        self._due: dict[str, float] = {}  # when a client would be due if it had kept to the rate from the beginning

    def wait(self, client: str) -> float:
        """Count a refusal of a client; return the seconds after which to send it."""
        if self._rate is None:
            return 0.0
        now = time.monotonic()
        if len(self._due) >= MOST_CLIENTS:
            self._due = {name: due for name, due in self._due.items() if due > now}
        due = max(self._due.get(client, now), now)
        self._due[client] = min(due + 1 / self._rate, now + BURST + LONGEST)
        return min(max(due - now - BURST, 0.0), LONGEST)
