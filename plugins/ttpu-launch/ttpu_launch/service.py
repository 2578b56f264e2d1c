"""The service "rendezvous" (`ttpu_core.services.Rendezvous`), through which a backend joins the processes of a
launch."""

from __future__ import annotations

from ttpu_core.processes import Contract
from ttpu_launch import rendezvous, stdout


class RendezvousService:
    """Lets processes meet, and keeps their standard output clean."""

    def meet(self, contract: Contract) -> None:
        """See `ttpu_launch.rendezvous.meet`."""
        rendezvous.meet(contract)

    def keep_stdout(self) -> None:
        """See `ttpu_launch.stdout.keep_stdout`."""
        stdout.keep_stdout()


RENDEZVOUS = RendezvousService()
