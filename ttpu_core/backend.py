"""What the core asks of a backend plugin. A backend is a class named by an entry point of the group `ttpu.backends`;
the core imports it only when it is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from ttpu_core.architecture import Architecture
    from ttpu_core.checkpoint import Checkpoint


@runtime_checkable
class Backend(Protocol):
    """Runs what a family describes."""

    name: str

    def load(self, architecture: Architecture, checkpoint: Checkpoint, **options: Any) -> Any:
        """A model with the checkpoint's weights on this backend's devices."""
        ...

    def doctor(self) -> Mapping[str, Any]:
        """Devices, versions and what is missing, for `ttpu doctor`: plain values only."""
        ...

    def kernels(self, architecture: Architecture) -> Mapping[str, str]:
        """Which implementation of each operation would serve this architecture, and why, for `ttpu info`."""
        ...
