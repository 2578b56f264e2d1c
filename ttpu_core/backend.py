"""What the core asks of a backend plugin. A backend is a class named by an entry point of the group `ttpu.backends`;
the core imports it only when it is used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from ttpu_core.architecture import Architecture
    from ttpu_core.checkpoint import Checkpoint
    from ttpu_core.spec import Parameter


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


class AppliedPatch(Protocol):
    """A replacement in somebody else's model code, as a backend states it."""

    name: str
    target: str
    reason: str
    when: str
    source: str


@runtime_checkable
class PatchingBackend(Backend, Protocol):
    """A backend that runs a stock model with parts of it replaced."""

    def patches(self, architecture: Architecture) -> Iterable[AppliedPatch]:
        """What it replaces for this architecture, for `ttpu info`."""
        ...


@runtime_checkable
class StockModelBackend(Backend, Protocol):
    """A backend whose models are those of another library, which the command line cannot stream by itself."""

    def streaming(self, model: Any) -> Any:
        """The model as the command line needs it: `tokenizer`, `timings`, `stream`."""
        ...


class CausalModel(Protocol):
    """A language model as pure functions of its parameters, on a backend's arrays. Generation, an engine's runner, the
    compiler's reports and the conformance kit are given one and never make it themselves.

    Attributes:
        parameters: path → shape, logical axes and initialization of each parameter.
        placements: path → where the backend holds it: a sharding over devices.
    """

    @property
    def parameters(self) -> Mapping[str, Parameter]: ...

    @property
    def placements(self) -> Mapping[str, Any]: ...

    def empty_cache(self, batch: int, slots: int, dtype: Any) -> Any:
        """What `forward` keeps of earlier tokens: room for `slots` tokens in each of `batch` rows."""
        ...

    def forward(
        self, params: Mapping[str, Any], tokens: Any, positions: Any = None, cache: Any = None
    ) -> tuple[Any, Any]:
        """Logits float32 [batch, seq, vocab] of tokens [batch, seq], and the cache with these tokens in it."""
        ...

    def ragged_forward(self, params: Mapping[str, Any], tokens: Any, batch: Any, caches: Any) -> tuple[Any, Any]:
        """The residual stream [tokens, hidden] of tokens [tokens] of many sequences, and the caches with these tokens
        in them; `batch` says which tokens belong to which sequence and where each sequence's pages are."""
        ...
