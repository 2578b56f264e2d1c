"""Paces refusals, so that a client whose requests are all refused does not take the server from others."""

from __future__ import annotations

from ttpu_serve.api.client_pace import ClientPace

BURST = 2.0
"""Seconds whose refusals a client may get at once."""
LONGEST = 5.0
"""Seconds that a refusal waits at most."""


class RefusalPace:
    """When each client's next refusal may be sent."""

    def __init__(self, rate: float | None) -> None:
        """
        Args:
            rate: refusals of one client in a second; None is unlimited.
        """
        self._rate = rate
        self._pace = ClientPace(BURST, LONGEST)

    def wait(self, client: str) -> float:
        """Count a refusal of a client; return the seconds after which to send it."""
        if self._rate is None:
            return 0.0
        seconds = self._pace.wait(client)
        self._pace.charge(client, 1 / self._rate)
        return seconds
