"""Asks what a backend declares for its launch: what its processes need beside their place among the others. No
framework is imported for it."""

from __future__ import annotations

from collections.abc import Mapping

from ttpu_core.backend import Launches
from ttpu_core.errors import LaunchError
from ttpu_core.registry import BACKENDS, default_registry


class LaunchedBackend:
    """The backend that a launch is for, or none in particular.

    Args:
        name: what `--backend` names; None for processes that need no variables but the launch's own.

    Raises:
        LaunchError: no installed backend has this name.
        PluginError: what it declares cannot be used.
    """

    def __init__(self, name: str | None) -> None:
        known = sorted({record.name for record in default_registry().plugins(BACKENDS) if record.usable})
        if name is not None and name not in known:
            raise LaunchError(
                f"--backend {name!r} was given, but processes are launched for {' or '.join(known) or 'none'}, which "
                "is installed: pass that, install the backend, or leave it out for one that needs no variables of its "
                "own."
            )
        self._launches: Launches | None = None if name is None else default_registry().launches(name)
        self.passed_on = name if self._launches else None
        """The name that a launch on another machine is given; None for a backend that declares nothing for it."""

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the backend's own variables."""
        return self._launches.variables if self._launches else ()

    def check_processes(self, per_host: int) -> None:
        """Refuse more processes on a host than the backend has there.

        Raises:
            LaunchError: there are more.
        """
        if self._launches:
            self._launches.check_processes(per_host)

    def variables_for(
        self, processes: int, local_devices: int | None, given: Mapping[str, str], *, on_tpu_worker: bool
    ) -> dict[str, str]:
        """The backend's own variables of each process, see `ttpu_core.backend.Launches`.

        Raises:
            LaunchError: what the backend cannot run.
        """
        if self._launches is None:
            return {}
        return dict(self._launches.variables_for(processes, local_devices, given, on_tpu_worker=on_tpu_worker))
