"""Asks a backend which variables and limits its processes have in a launch. No framework is imported for this."""

from __future__ import annotations

from collections.abc import Mapping

from ttpu_core.backend import Launches
from ttpu_core.errors import LaunchError
from ttpu_core.plugin_records import BACKENDS
from ttpu_core.registry import default_registry


class LaunchedBackend:
    """The backend of a launch, or none.

    Args:
        name: the value of `--backend`; None for processes that need no variables but the launch's own.

    Raises:
        LaunchError: no installed backend has this name.
        PluginError: the backend's declaration cannot be used.
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
        """The backend's name for a launch on another machine, or None if the backend declares nothing."""

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the backend's own variables."""
        return self._launches.variables if self._launches else ()

    def check_processes(self, per_host: int) -> None:
        """Refuse more processes per host than the backend supports.

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
            LaunchError: the backend cannot run these processes.
        """
        if self._launches is None:
            return {}
        return dict(self._launches.variables_for(processes, local_devices, given, on_tpu_worker=on_tpu_worker))
