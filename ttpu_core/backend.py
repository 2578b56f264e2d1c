"""The contract of a backend plugin. A backend is a class named by an entry point of the group `ttpu.backends`; the core
imports it only when it is used. Everything beyond `Backend` is a capability: a protocol of its own, which a backend has
by having its methods, and which is asked for with isinstance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from ttpu_core.loading import LoadOptions

if TYPE_CHECKING:
    from ttpu_core.architecture import Architecture
    from ttpu_core.calibration import InputStatistics
    from ttpu_core.checkpoint import Checkpoint
    from ttpu_core.config import ModelConfig
    from ttpu_core.generation.events import StreamEvent, Timings
    from ttpu_core.sharding.parallelism import Parallelism, Rules
    from ttpu_core.sharding.serving import ServedShapes, ServingLimits
    from ttpu_core.sharding.strategy import Strategy
    from ttpu_core.sharding.verification import Verification
    from ttpu_core.spec import ArchitectureSpec, Parameter
    from ttpu_core.token_scores import Array, TokenScores


Options = TypeVar("Options", bound=LoadOptions)


class LoadedModel(Protocol):
    """A model with its weights on a backend's devices, as `from_pretrained` returns it."""

    def generate(self, *inputs: Any, **arguments: Any) -> Any:
        """Continue prompts; names and meanings of the arguments are transformers'."""
        ...


class StreamingModel(Protocol):
    """The interface of a loaded model for the command line.

    Attributes:
        tokenizer: the checkpoint's transformers tokenizer, or None.
        timings: of loading, and of the last call of `stream`.
    """

    tokenizer: Any
    timings: Timings

    def stream(self, prompt: Any, **arguments: Any) -> Iterator[StreamEvent]:
        """Yield one event per new token."""
        ...


@runtime_checkable
class Backend(Protocol[Options]):
    """Runs what a family describes.

    Attributes:
        name: what users call it: the name of its entry point.
        options: `LoadOptions`, or a subclass with options of its own.
    """

    name: str
    options: type[Options]

    def open(self, architecture: Architecture, checkpoint: Checkpoint, options: Options) -> Any:
        """A model with the checkpoint's weights on this backend's devices (`LoadedModel`).

        Raises:
            CheckpointError, MappingError: the weights do not account for the architecture's parameters.
            RequestError: an option has a value that this backend refuses.
            UnsupportedError: this backend cannot run the architecture on these devices.
        """
        ...

    def doctor(self) -> Mapping[str, Any]:
        """Devices, versions and what is missing, for `ttpu doctor`: plain values only."""
        ...

    def kernels(self, architecture: Architecture) -> Mapping[str, str]:
        """Which implementation of each operation would serve this architecture, and why, for `ttpu info`."""
        ...


class Fallback(Protocol):
    """Runs models that no plugin describes, on one backend: a class named by an entry point of the group
    `ttpu.fallbacks`, whose name is the backend's."""

    def open(self, checkpoint: Checkpoint, options: Any) -> LoadedModel:
        """A model with the checkpoint's weights on the backend's devices. `options` are the backend's.

        Raises:
            CheckpointError, MappingError: the checkpoint's files are incomplete or malformed.
            RequestError: an option that needs a plugin.
            UnsupportedError: the model cannot be run, or would be silently wrong.
        """
        ...

    def describe(self, config: ModelConfig) -> Mapping[str, Any]:
        """What is known of a model without a plugin, for `ttpu info`: plain values only, among them
        `a_plugin_would_add`, a list of sentences, which is empty for a kind of model that no plugin can describe.

        Raises:
            UnsupportedError: it has no such model.
        """
        ...


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """Bytes that one device holds of a model that no plugin describes.

    Attributes:
        weights: its parameters and buffers.
        read: what a step reads of them, after the gathering of those that are spread along "fsdp".
        cache: of all rows.
    """

    weights: int
    read: int
    cache: int


@runtime_checkable
class PlansWithoutPlugin(Protocol):
    """A fallback that says what a model will hold."""

    def held_bytes(
        self, config: ModelConfig, meshes: Sequence[Mapping[str, int]], *, batch: int, context: int, dtype: str
    ) -> Sequence[HeldBytes]:
        """What each device holds on each of some meshes.

        Args:
            config: of the model.
            meshes: mesh axis → devices along it, of "fsdp" and "tensor".
            batch: rows of the cache.
            context: slots of each row.
            dtype: of the weights and the cache.

        Raises:
            UnsupportedError: the model cannot be traced, or has fewer positions than `context`.
        """
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


class AppliedPatch(Protocol):
    """A replacement in somebody else's model code, as a backend states it."""

    name: str
    target: str
    reason: str
    when: str
    source: str


@runtime_checkable
class Patches(Protocol):
    """A backend that runs a stock model with parts of it replaced."""

    def patches(self, architecture: Architecture) -> Iterable[AppliedPatch]:
        """What it replaces for this architecture, for `ttpu info`."""
        ...


@runtime_checkable
class Streams(Protocol):
    """A backend whose models are those of another library, which the command line cannot stream by itself."""

    def streaming(self, model: Any) -> StreamingModel:
        """The model as the command line needs it."""
        ...


@runtime_checkable
class Plans(Protocol):
    """A backend that says what a planned program runs on a TPU, and what its engine compiles there."""

    def planned_kernels(
        self,
        architecture: Architecture,
        *,
        served: bool = False,
        shards_sequence: bool = False,
        parallelism: Parallelism | None = None,
        rows: tuple[int, ...] = (),
    ) -> Mapping[str, str]:
        """Operation → implementation and why, on a TPU, for `ttpu plan`.

        Args:
            architecture: the model, with the formats of its quantized kernels.
            served: in an engine's steps, else in those of `generate` and of training.
            shards_sequence: the sequence is sharded.
            parallelism: the mesh, and what its axes shard; None for one device.
            rows: tokens of the programs; () for those of a usual decode step and prompt.
        """
        ...

    def served_shapes(
        self, spec: ArchitectureSpec, mesh: Mapping[str, int], strategy: Strategy, limits: ServingLimits, dtype: str
    ) -> ServedShapes:
        """Return the sizes of the steps that an engine compiles on TPUs, and the bytes of its cache and state.

        Args:
            spec: padded as the mesh needs it.
            mesh: of one replica.
            strategy: which mesh axes shard which logical axes.
            limits: of the engine.
            dtype: of weights, activations, and a cache that is not quantized.

        Raises:
            UnsupportedError: an engine cannot serve the model.
        """
        ...


@runtime_checkable
class Verifies(Protocol):
    """A backend that compiles the programs of a plan for TPUs that need not be there."""

    def verify_plan(
        self, architecture: Architecture, plan: Any, *, progress: Callable[[str], None] | None = None
    ) -> tuple[Verification, ...]:
        """Compile each program of a plan (`ttpu_plan.plan.Plan`) and return the compiler's figures; `progress` is
        called with each program's name."""
        ...


@runtime_checkable
class Serves(Protocol):
    """A backend whose models the serving engine drives. `ttpu_serve.runner.ServingBackend` is the same with the types
    of the engine; loaded models have an attribute `backend`, its name.

    Attributes:
        spans_processes: whether a runner computes on the devices of several processes, one on each host. In the first,
            `model_runner` returns the runner; in the others it does what the first one's runner is told, until that
            is released, and ends the process.
    """

    spans_processes: bool

    def model_runner(self, model: Any, config: Any, adapters: Mapping[str, Any] | None = None) -> Any:
        """A runner of a loaded model (`ttpu_serve.runner.ModelRunner`), without pages and programs.

        Args:
            config: the engine's settings (`ttpu_serve.api.engine_config.EngineConfig`).
            adapters: name → LoRA adapter (`ttpu_serve.runner.AdapterWeights`).
        """
        ...

    def options_beside(self, model: Any) -> LoadOptions:
        """Loading options for a second model on the devices of a loaded one, in the same dtype: a draft model."""
        ...

    def keep_compiled(self) -> Path | None:
        """Keep compiled programs between runs, unless the user wants none; their folder. Called before loading."""
        ...


@runtime_checkable
class CompilesAhead(Protocol):
    """A backend that compiles an engine's programs before it serves, for `ttpu compile`."""

    def compiled_folder(self, *, ahead: bool) -> Path:
        """Where compiled programs are kept: those for devices of this machine, or with `ahead` for others.

        Raises:
            RequestError: nowhere; the message says what to set.
        """
        ...

    def cache_counts(self) -> AbstractContextManager[Any]:
        """Counts, while it is entered, programs that came from the cache (`hits`) and that went into it (`written`)."""
        ...

    def compile_ahead(
        self,
        architecture: Architecture,
        topology: str,
        config: Any,
        *,
        dtype: str,
        parallelism_strategy: str | None = None,
        sharding_rules: Rules | None = None,
        plan: Any = None,
        attn_implementation: str = "auto",
        quantization: Any = None,
        residual_stream: str = "auto",
        progress: Callable[[str, float, float], None] | None = None,
    ) -> Any:
        """Compile an engine's programs for a slice that need not be there, and keep them.

        Args:
            topology: the slice, as in v5e:2x4.
            config: the engine's settings (`ttpu_serve.api.engine_config.EngineConfig`).
            dtype: what weights are held in.
            parallelism_strategy: how the model is sharded; None shards every layer over all devices.
            sharding_rules: logical axis → mesh axes, in place of the usual ones.
            plan: a plan, or its file, in place of a strategy and rules.
            attn_implementation: as for loading.
            quantization: of the weights, as for loading.
            residual_stream: as for loading.
            progress: called as progress("compile", programs done, programs in all).

        Returns:
            `ttpu_serve.ahead.AheadSlice`.

        Raises:
            UnsupportedError: no such slice or mesh, or a program does not fit.
            RequestError: settings that contradict the model or each other.
            MissingDependencyError: the compiler is not installed.
        """
        ...


@runtime_checkable
class Scores(Protocol):
    """A backend whose models are measured on texts: `ttpu eval`."""

    def text_logits(self, model: Any, tokens: Array, lengths: Array) -> Any:
        """Logits of whole texts, on this backend's devices.

        Args:
            model: as the backend loaded it.
            tokens: int32 [batch, seq], padded on the right.
            lengths: int [batch], the number of real tokens in each row.

        Returns:
            float32 [batch, seq, vocab], undefined at padding.
        """
        ...

    def token_scores(self, logits: Any, targets: Array, reference: Any = None) -> TokenScores:
        """Compare logits with the tokens that came next, and with another model's logits.

        Args:
            logits: float32 [batch, seq, vocab], as `text_logits` returns them.
            targets: int32 [batch, seq], the token after each.
            reference: another model's logits for the same tokens.
        """
        ...

    def weight_bytes(self, model: Any) -> int:
        """The bytes of a loaded model's weights, scales and zero points included, over all devices' copies once."""
        ...


class LayerRun(Protocol):
    """The layers of a model, run one after another over the same tokens. Parameters are given to each call by their
    path within the layer, so that no more than a layer is held."""

    def observe(
        self, layer: int, params: Mapping[str, Array], kernels: Sequence[str]
    ) -> Mapping[str, InputStatistics]:
        """Run a layer on what the layers before it returned, and keep nothing.

        Args:
            layer: the number of the next layer.
            params: path → float array, all parameters of the layer.
            kernels: the paths of the kernels whose inputs are wanted.

        Returns:
            Path → statistics; a kernel that the layer does not multiply by is left out.
        """
        ...

    def advance(self, layer: int, params: Mapping[str, Array]) -> None:
        """Run a layer, and keep what it returns for the next one."""
        ...


@runtime_checkable
class Calibrates(Protocol[Options]):
    """A backend that runs a model layer by layer and observes the inputs of its products: `ttpu quantize`."""

    name: str
    options: type[Options]

    def tokenizer(self, checkpoint: Checkpoint) -> Any:
        """The checkpoint's tokenizer, as loaded models have it, or None if the checkpoint has none."""
        ...

    def layer_run(
        self, architecture: Architecture, params: Mapping[str, Array], tokens: Array, options: Options, dtype: str
    ) -> LayerRun:
        """The layers of a model over some texts.

        Args:
            architecture: the model.
            params: path → float array, the parameters outside of layers.
            tokens: int32 [texts, seq], without padding.
            options: where the model runs.
            dtype: of weights and activations.

        Raises:
            UnsupportedError: the backend cannot run the model's layers one by one on these devices.
        """
        ...


@runtime_checkable
class Trains(Protocol):
    """A backend whose models can be trained. `ttpu_train.runner.TrainsWithRunner` is the same with the types of the
    trainer."""

    def row_layout(self, model: Any) -> Any:
        """Which rows of a batch a loaded model's mesh gives this process (`ttpu_train.runner.RowLayout`)."""
        ...

    def train_runner(self, model: Any, settings: Any) -> Any:
        """A runner (`ttpu_train.runner.TrainRunner`) that takes over a loaded model's weights.

        Args:
            model: as the backend loaded it.
            settings: of the run (`ttpu_train.runner.StepSettings`).

        Raises:
            RequestError: settings that contradict the model or each other.
            UnsupportedError: the backend cannot train this model so.
        """
        ...

    def export_checkpoint(
        self, place: Path, out: Path, *, identity: Mapping[str, Any], dtype: str, merge: bool = False
    ) -> None:
        """Write a run's checkpoint as a Hugging Face checkpoint, without devices of a slice.

        Args:
            place: the checkpoint's folder, in which `model` holds config and tokenizer.
            out: the folder to write.
            identity: whose checkpoint it is, as the runner's checkpoint files said.
            dtype: of the written weights.
            merge: of a run that trains adapters, write the base model with them merged, and not the adapter.

        Raises:
            CheckpointError: its files are damaged, or are not those that its identity tells of.
        """
        ...


@runtime_checkable
class CompilesTraining(Protocol):
    """A backend that compiles the update of a training run for devices that need not be there, for `ttpu train
    --dry-run`."""

    def compile_training(
        self,
        architecture: Architecture,
        topology: str,
        settings: Any,
        *,
        rows: int,
        length: int,
        packed: bool = False,
        parallelism_strategy: str | None = None,
    ) -> Any:
        """Compile it and return the compiler's figures (`ttpu_train.runner.CompiledTraining`).

        Args:
            architecture: the model.
            topology: the slice, as in v5e:4x4.
            settings: of the run (`ttpu_train.runner.StepSettings`).
            rows: that a device computes at once.
            length: tokens of a row.
            packed: rows hold several sequences.
            parallelism_strategy: how the model is sharded.
        """
        ...


class Launches(Protocol):
    """What a backend declares for `ttpu launch`, if its processes need variables of their own beside their place among
    the others: an object named by an entry point of the group `ttpu.launches`, whose name is the backend's. Its module
    must import no framework.

    variables: the names of these variables.
    """

    variables: tuple[str, ...]

    def check_processes(self, per_host: int) -> None:
        """Refuse more processes on a host than the backend has there.

        Raises:
            LaunchError: it cannot have so many.
        """
        ...

    def variables_for(
        self, processes: int, local_devices: int | None, given: Mapping[str, str], *, on_tpu_worker: bool
    ) -> Mapping[str, str]:
        """The variables of each process.

        Args:
            processes: how many there are in all, where the launcher knows.
            local_devices: CPU devices that each simulates; None for the accelerators that are there.
            given: the variables that they have anyhow, which stay as they are.
            on_tpu_worker: whether this machine is a worker of a TPU slice, which knows the others by itself.

        Raises:
            LaunchError: what the backend cannot run.
        """
        ...
