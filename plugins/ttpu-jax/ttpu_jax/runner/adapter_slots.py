"""A runner's LoRA adapters, as an engine uses them: their names and numbers, and their slots in the runner's
parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttpu_jax.runner.lora import Adapters
    from ttpu_serve.runner import AdapterWeights, LowRankUpdate


class LoadedAdapters:
    """The adapters in `params`, the runner's dictionary of arrays."""

    def __init__(self, adapters: Adapters, params: dict[str, Any]) -> None:
        self._adapters, self._params = adapters, params

    @property
    def names(self) -> Mapping[str, int]:
        """The loaded adapters: name → number, from 1."""
        return self._adapters.names

    def salt(self, name: str) -> bytes:
        """Return the bytes that distinguish cached prefixes of this adapter from all others."""
        return self._adapters.salt(name)

    def check(self, weights: AdapterWeights) -> Mapping[str, LowRankUpdate]:
        """Check an adapter's weights and return the argument of `load`; see `Adapters.updates`."""
        return self._adapters.updates(weights)

    def load(self, name: str, checked: Mapping[str, LowRankUpdate], busy: Collection[int]) -> None:
        """Load an adapter; see `Adapters.put`."""
        self._adapters.put(self._params, name, checked, busy)

    def unload(self, name: str) -> None:
        """Unload an adapter; running requests that use it finish with it."""
        self._adapters.unload(name)
