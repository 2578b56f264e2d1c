"""The protocols that a backend implements for the kit. A backend joins by an entry point of the group
`ttpu.models_under_test` with the backend's name. It names a class like `BackendUnderTest`, which does not have to
import the kit.

Every check may use `BackendUnderTest` and `ModelUnderTest`. Each other protocol serves some checks only; they do not
apply to a backend or model without its methods, and say so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np

from ttpu_conformance.environment import Device
from ttpu_conformance.errors import NotApplicable
from ttpu_core.architecture import Architecture
from ttpu_core.checkpoint import Checkpoint
from ttpu_core.errors import MissingDependencyError
from ttpu_core.plugin_records import MODELS_UNDER_TEST
from ttpu_core.registry import default_registry
from ttpu_core.spec import ArchitectureSpec

Task = Literal["decode", "prefill", "train"]
"""A program that is compiled for a chip."""


class ModelUnderTest(Protocol):
    """A loaded model."""

    def logits(self, ids: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        """float32 [batch, seq, vocab] of token `ids` [batch, seq], as a user calls the model; `mask` [batch, seq] is 0
        at padding."""
        ...

    def logits_in_parts(self, ids: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
        """float32 [batch, seq, vocab] when the token `ids` [batch, seq] come in parts of these lengths, each written
        into the cache after the one before."""
        ...

    def greedy_tokens(self, ids: np.ndarray, mask: np.ndarray, new_tokens: int) -> np.ndarray:
        """int [batch, new_tokens] after left-padded prompts, `ids` [batch, seq] with a `mask` [batch, seq], as a user
        generates; end tokens end nothing."""
        ...

    def loss_and_gradients(self, ids: np.ndarray) -> tuple[float, Mapping[str, np.ndarray]]:
        """The mean next-token cross entropy of token `ids` [batch, seq], and its gradient for each tensor of the
        checkpoint by the name that the mapping has for it."""
        ...

    def save(self, folder: Path) -> None:
        """Write a checkpoint, as a user does."""
        ...


class BackendUnderTest(Protocol):
    """Starts a backend, and loads models with it.

    Attributes:
        distributions: whose versions a report names.
    """

    name: str
    distributions: tuple[str, ...]

    def prepare(self, device: Device, virtual_devices: int) -> None:
        """Set the environment variables that the backend reads when it starts, for numbers on `device`, with so many
        devices on a CPU; what the user has set stays. Starts nothing."""
        ...

    def missing_device(self, device: Device) -> str | None:
        """Return why numbers cannot be computed on a device here, or None. Starts the backend."""
        ...

    def missing_devices(self, count: int) -> str | None:
        """Return why models cannot be sharded over so many devices in this process, or None."""
        ...

    def device_kinds(self) -> tuple[str, ...]:
        """Return the names of the device kinds, each once."""
        ...

    def load(
        self,
        architecture: Architecture,
        checkpoint: Checkpoint,
        *,
        dtype: str,
        mesh: str | None,
        attn_implementation: str,
    ) -> ModelUnderTest:
        """Load a model.

        Args:
            architecture: what the plugin says of the checkpoint's config.
            checkpoint: as transformers saved it.
            dtype: "float32" or "bfloat16".
            mesh: such as "fsdp=2,tensor=4"; None for one device.
            attn_implementation: "auto", or one of `attention_implementations`.

        Raises:
            TTPUError: the checkpoint does not fit the description, or the backend cannot run it so.
        """
        ...

    def refuse_mesh(self, spec: ArchitectureSpec, mesh: str) -> None:
        """Return where a model can be sharded on a mesh.

        Raises:
            UnsupportedError: it cannot, and why.
        """
        ...

    def forget_programs(self) -> None:
        """Drop caches of programs that will not run again."""
        ...


@runtime_checkable
class StacksLayers(Protocol):
    """A model that can run equal layers stacked, in one loop."""

    def stacked_logits(self, ids: np.ndarray) -> np.ndarray:
        """float32 [batch, seq, vocab] of token `ids` [batch, seq], with equal layers stacked and scanned over.

        Raises:
            UnsupportedError: this model's layers cannot be stacked.
        """
        ...


@runtime_checkable
class RunsReferenceCode(Protocol):
    """A model that runs the code of transformers itself. Where that code's logits depend on padding (llama4's chunks
    begin at the first slot, not at the first token), so do this model's."""

    runs_reference_code: Literal[True]


@runtime_checkable
class ShowsResidualStream(Protocol):
    """A model that is built from the description, so that a changed description can explain a difference."""

    def residual_stream(self, ids: np.ndarray, layers: int, *, several: bool = False) -> np.ndarray:
        """The residual stream [batch, seq, hidden] of token `ids` [batch, seq] after so many layers; after all of them,
        with the final norm. Where a model has `several`, all of them [batch, seq, streams, hidden], without that
        norm."""
        ...


@runtime_checkable
class ShowsKeys(Protocol):
    """A model that is built from the description, and keeps keys as transformers does: normed and turned."""

    def keys(self, ids: np.ndarray, layer: int) -> np.ndarray:
        """What one layer's attention keeps of token `ids` [batch, seq]: [batch, kv_heads, seq, head_dim]."""
        ...


@runtime_checkable
class ShowsSharding(Protocol):
    """A model that says how its parameters are sharded."""

    def replicated_share(self) -> float:
        """Return the share of the parameters' elements that are replicated on every device."""
        ...

    def sharded_share(self, axis: str, within: str = "") -> tuple[float | None, Mapping[str, float]]:
        """Return how much of the kernels whose paths contain `within` is sharded along a mesh axis.

        Returns:
            The share of their elements that is, None where there are no such kernels; and the shares of those that are
            not, by path without its layer's number, the largest first."""
        ...


@runtime_checkable
class TracesDecoding(Protocol):
    """A model whose decode program can be traced anew."""

    def layer_definitions(self) -> Sequence[Any]:
        """Return the definitions that distinguish the layers' traced bodies, from newly made layers."""
        ...

    def decode_program(self, rows: int, slots: int) -> str:
        """The text of the decode program before the compiler sees it, traced anew with layers that are made anew."""
        ...


class ProgramCount(Protocol):
    """The number of programs that a backend compiled, and the operations that it left to the host.

    Attributes:
        compiles: programs that were compiled.
        fallbacks: operations that ran on the host because the backend has none of them → times.
    """

    @property
    def compiles(self) -> int: ...

    @property
    def fallbacks(self) -> Mapping[str, int]: ...


@runtime_checkable
class CountsPrograms(Protocol):
    """A model whose backend counts what it compiles."""

    def programs_of(self, run: Callable[[], Any]) -> ProgramCount:
        """Count the programs that calling `run` compiles and the operations that it leaves to the host."""
        ...


@runtime_checkable
class RecordsPrograms(CountsPrograms, Protocol):
    """A model whose operations are recorded one by one, so that a forward pass may come apart into several programs."""

    recorded: bool


@runtime_checkable
class IsServed(Protocol):
    """A model that the serving engine runs."""

    def for_engine(self) -> Any:
        """Return the argument of `ttpu.LLM` in place of a checkpoint."""
        ...


@runtime_checkable
class HasAttentionImplementations(Protocol):
    """A backend with several implementations of attention."""

    def attention_implementations(self) -> Sequence[str]:
        """Return their names, the reference first."""
        ...


class CompiledProgram(Protocol):
    """The compiler's figures for one program. Sizes are bytes on one device, times are seconds of one run."""

    @property
    def task(self) -> Any: ...
    @property
    def topology(self) -> str: ...
    @property
    def mesh(self) -> tuple[tuple[str, int], ...]: ...
    @property
    def layers(self) -> Any: ...
    @property
    def num_parameters(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def hbm_bytes(self) -> int: ...
    @property
    def cache_bytes(self) -> int: ...
    @property
    def aliased_bytes(self) -> int: ...
    @property
    def cache_in_place(self) -> bool: ...
    @property
    def collectives(self) -> Sequence[Any]: ...
    @property
    def total_seconds(self) -> float: ...  # kernels too, while copies in the background share HBM
    @property
    def compile_seconds(self) -> float: ...


@runtime_checkable
class CompilesForChips(Protocol):
    """A backend that compiles for TPUs that need not be there."""

    def compiled(
        self,
        architecture: Architecture,
        chip: str,
        task: Task,
        *,
        rows: int,
        context: int,
        slice_name: str | None,
        mesh: str | None,
    ) -> CompiledProgram | None:
        """Compile the program of a task for a slice of a chip.

        Args:
            rows: sequences of decode; a prefill reads one, a training step one for each device.
            context: cache slots of a row, and tokens of a prefill and of a training step.
            slice_name: the slice; None for the smallest that holds it.
            mesh: its mesh; None for the backend's choice.

        Returns:
            None where no slice of up to 256 chips holds it.

        Raises:
            MissingDependencyError: the compiler is not installed.
            UnsupportedError: it does not fit, or cannot be compiled.
        """
        ...


T = TypeVar("T")


def able(thing: Any, protocol: Callable[..., T], what: str) -> T:
    """Return the same object, typed as one of the protocols above.

    Raises:
        NotApplicable: it has not; `what` ends the sentence that says so.
    """
    if not isinstance(thing, protocol):  # type: ignore[arg-type]
        raise NotApplicable(f"this backend {what}")
    found: T = thing
    return found


def backend_name(name: str | None = None) -> str:
    """Return the name of the backend that is meant, without importing it; None takes the default backend."""
    return name or default_registry().default_backend()


@cache
def backend_under_test(name: str | None = None) -> BackendUnderTest:
    """Return the backend of a name, by its entry point; None takes the default backend.

    Raises:
        MissingDependencyError: no backend of this name can be checked here.
        PluginError: it cannot be imported, or two distributions claim its name.
    """
    name = backend_name(name)
    found = default_registry().names(MODELS_UNDER_TEST)
    if name not in found:
        raise MissingDependencyError(
            f"conformance on the backend {name!r} was asked for, but the installed backends with an entry point in "
            f"{MODELS_UNDER_TEST} are {', '.join(found) or 'none'}: install its distribution, such as "
            f"ttpu-{name.replace('_', '-')}, or name another with --backend."
        )
    made: BackendUnderTest = default_registry().load(MODELS_UNDER_TEST, name, "conformance on the backend")()
    return made
