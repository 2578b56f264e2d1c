"""The LoRA adapters of an engine: read from files, and put into the runner's slots."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ttpu_core.errors import RequestError
from ttpu_serve.adapters.files import read_adapter
from ttpu_serve.runner import AdapterSlots


class EngineAdapters:
    """The adapters in a runner's slots, by name.

    Args:
        slots: what holds them; None where there is no room for any.
    """

    def __init__(self, slots: AdapterSlots | None) -> None:
        self._slots = slots

    @property
    def names(self) -> dict[str, int]:
        """Names of the adapters, each with its number."""
        return {} if self._slots is None else dict(self._slots.names)

    def prepare(self, name: str, directory: str, *, asleep: bool) -> Callable[..., None]:
        """Read an adapter in PEFT's format, which may run in any thread.

        Args:
            name: of the adapter.
            directory: that holds it.
            asleep: the engine is, so that it has no slots.

        Returns:
            A function that puts it into a slot, in the engine's thread. It takes the numbers of adapters that requests
            still use, and `asleep`, whether the engine sleeps by then.

        Raises:
            RequestError: there is no room for adapters, or the directory holds none.
            CheckpointError, MappingError, UnsupportedError: this model cannot use the adapter.
        """
        checked = self._room_for(name, asleep).check(read_adapter(directory))

        def load(busy: Collection[int], *, asleep: bool) -> None:
            self._room_for(name, asleep).load(name, checked, busy)

        return load

    def unload(self, name: str) -> None:
        """Take an adapter out of its slot; requests that use it finish with it.

        Raises:
            RequestError: no adapter of this name is loaded.
        """
        if self._slots is None or name not in self._slots.names:
            known = ", ".join(self.names) or "none"
            raise RequestError(f"the adapter {name!r} was to be unloaded, but those loaded are: {known}.")
        self._slots.unload(name)

    def _room_for(self, name: str, asleep: bool) -> AdapterSlots:
        if self._slots is None or asleep:
            no_room = "it was built without room for them: set max_adapters"
            why = no_room if self._slots is None else "it is asleep: wake it up"
            raise RequestError(f"the adapter {name!r} was to be loaded into this engine, but {why}.")
        return self._slots
