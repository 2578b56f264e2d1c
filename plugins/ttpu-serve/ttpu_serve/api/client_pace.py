"""Paces what clients cost a server, so that one who costs much does not take it from others."""

from __future__ import annotations

import os
import time

MOST_CLIENTS = 10_000
"""That are remembered before those are forgotten who need not wait."""


class ClientPace:
    """When each client may go on, by the generic cell rate algorithm (ITU-T I.371): a rate with a burst. Costs are in
    seconds of the client's own rate: at a share s of a processor, work of t seconds costs t / s."""

    def __init__(self, burst: float, longest: float) -> None:
        """
        Args:
            burst: seconds of costs that a client may have at once.
            longest: seconds that a client waits at most, however much it cost.
        """
        self._burst, self._longest = burst, longest
        self._due: dict[str, float] = {}  # when a client would be due if it had kept to the rate from the beginning

    def wait(self, client: str) -> float:
        """Return the seconds after which a client may go on; 0 is at once."""
        now = time.monotonic()
        return min(max(self._due.get(client, now) - now - self._burst, 0.0), self._longest)

    def charge(self, client: str, seconds: float) -> None:
        """Add to what a client cost."""
        now = time.monotonic()
        if len(self._due) >= MOST_CLIENTS:
            self._due = {name: due for name, due in self._due.items() if due > now}
        due = max(self._due.get(client, now), now)
        self._due[client] = min(due + seconds, now + self._burst + self._longest)


class ProcessorPace(ClientPace):
    """Paces the processor time of clients: one may take an eighth of the machine's processors, but always a quarter of
    one, and two seconds at once beyond it."""

    SHARE = max((os.cpu_count() or 1) / 8, 0.25)
    """Processors."""

    def __init__(self) -> None:
        super().__init__(burst=2.0 / self.SHARE, longest=10.0)

    def worked(self, client: str, seconds: float) -> None:
        """Add seconds of one processor that worked for a client."""
        self.charge(client, seconds / self.SHARE)
