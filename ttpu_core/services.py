"""Protocols of the services that other distributions provide to backends and commands.
`default_registry().service(name)` returns the object that an entry point of the group `ttpu.services` names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ttpu_core.generation.sampling_params import SamplingParams
    from ttpu_core.loading import Purpose
    from ttpu_core.processes import Contract
    from ttpu_core.sharding.hardware import Topology
    from ttpu_core.sharding.parallelism import Parallelism
    from ttpu_core.sharding.strategy import Strategy
    from ttpu_core.sharding.training_state import PlannedUpdate
    from ttpu_core.spec import ArchitectureSpec


Quantization = str
"""A shorthand of `ttpu_core.quantization.QuantizationConfig`, such as int8 or w4a16-g128."""


class Planner(Protocol):
    """The service "planner": chooses a mesh for parallelism_strategy="auto", reads plans, and predicts memory."""

    def fastest_mesh(
        self,
        spec: ArchitectureSpec,
        topology: Topology,
        *,
        strategy: Strategy,
        dtype: str,
        quantization: Quantization | None = None,
        purpose: Purpose = "generate",
        accepts: Callable[[Parallelism], bool] | None = None,
    ) -> Parallelism | None:
        """Return the fastest mesh of these slices on which the model is predicted to fit.

        Args:
            strategy: which mesh axes shard which logical axes.
            dtype: of weights, activations and cache.
            quantization: of the layers' weights.
            purpose: what the model is opened for; "serve" is one serving engine over all devices.
            accepts: whether the backend can run a mesh; None accepts all.

        Returns:
            None if the backend accepts none.

        Raises:
            UnsupportedError: the model fits on none; the message says by how much, and what would help.
        """
        ...

    def plan_for(
        self,
        plan: Any,
        spec: ArchitectureSpec,
        *,
        dtype: str,
        quantization: Quantization | None,
        purpose: Purpose,
        backend: str,
    ) -> Parallelism:
        """Return the mesh of a plan that suits the model and its weights; to serve, of one replica. Warns if the plan
        was made for smaller weights, or has other replicas.

        Args:
            plan: a `ttpu_plan.plan.Plan`, or the file that `ttpu plan --save` wrote.
            spec: the model.
            dtype: dtype of the weights; a name that no plan has ("auto") is not compared.
            quantization: quantization of the weights.
            purpose: what the model is opened for.
            backend: name of the backend for error messages.

        Raises:
            RequestError: `plan` is something else.
            PlanError: the plan is damaged, or was made for another model or for weights of another kind.
            UnsupportedError: an engine is to be opened, but the plan shards along axes that engines do not.
        """
        ...

    def planned_update(self, plan: Any) -> PlannedUpdate:
        """Return what a plan says of the training step that it was made for.

        Args:
            plan: as for `plan_for`.

        Raises:
            RequestError: `plan` is something else.
            PlanError: the plan is damaged, or is not one to train.
        """
        ...

    def training_memory(self, spec: ArchitectureSpec, planned: PlannedUpdate, dtype: str) -> Mapping[str, int]:
        """Predict the bytes of each device at the peak of a training step, by purpose: "weights" (masters) and
        "optimizer", which are held between steps, and others.

        Args:
            spec: the architecture.
            planned: the step.
            dtype: of activations and of the weights that they are multiplied with.

        Raises:
            UnsupportedError: a mesh that does not divide the model, or whose memory is not predicted.
        """
        ...


class RolloutEngine(Protocol):
    """What a trainer asks of an engine that samples with the weights in training."""

    def add(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        """Add a request for one sequence.

        Raises:
            RequestError: the prompt or a value cannot be served.
        """
        ...

    def step(self) -> Sequence[Any]:
        """Compute a step and return what it added: objects with request_id, token_ids, text, logprobs (for each token:
        id → an object with logprob), prompt_logprobs (the same of the prompt's tokens, with rank; None for the first),
        finish_reason (None while the sequence grows) and error."""
        ...

    def abort(self, request_id: str) -> None:
        """Drop a request."""
        ...

    def update_weights(self, weights: Any) -> None:
        """Take weights over, awake or asleep, and forget what was computed with the old ones."""
        ...

    def sleep(self) -> None:
        """Free the devices' memory."""
        ...

    def wake_up(self) -> None:
        """Undo `sleep`."""
        ...

    def close(self) -> None:
        """Free the devices' memory for good."""
        ...


class Engines(Protocol):
    """The service "engine": builds engines that serve loaded models of any backend that `Serves`.

    Attributes:
        option_names: the settings that `config` takes.
    """

    option_names: tuple[str, ...]

    def config(self, options: Mapping[str, Any]) -> Any:
        """Checked settings of an engine.

        Raises:
            RequestError: a value that cannot be served.
        """
        ...

    def build(self, model: Any, config: Any, progress: Callable[[str, float, float], None] | None = None) -> Any:
        """An engine for a loaded model.

        Raises:
            UnsupportedError: a model, or a mesh, that an engine cannot serve.
            RequestError: settings that contradict the model or each other, or too little memory.
        """
        ...


class LoadedTasks(Protocol):
    """Tasks with their data."""

    def evaluate(
        self, engine: RolloutEngine, tokenizer: Any, max_model_len: int, *, quiet: bool = False
    ) -> dict[str, float]:
        """Run the tasks on an engine and return TASK_METRIC → value, without standard errors.

        Args:
            engine: awake, built with prompt_logprobs.
            tokenizer: of its model, of transformers.
            max_model_len: tokens of the engine's sequences.
            quiet: show no progress.

        Raises:
            UnsupportedError: a task generates with options that an engine does not have.
            TTPUError: a request failed in the engine.
        """
        ...


class Harness(Protocol):
    """The service "harness": tasks of the lm-evaluation-harness."""

    def load(
        self,
        tasks: Sequence[str],
        *,
        num_fewshot: int | None = None,
        limit: float | None = None,
        apply_chat_template: bool = False,
    ) -> LoadedTasks:
        """Find tasks and read their data.

        Args:
            tasks: names of tasks, groups or tags, or paths of YAML files.
            num_fewshot: examples before each question; None as the tasks say.
            limit: examples of each task; below 1, their share; None takes all.
            apply_chat_template: write prompts as the tokenizer's chat template does.

        Raises:
            MissingDependencyError: the harness is not installed.
            RequestError: a task that does not exist, or runs code.
            DataError: the data of a task cannot be read.
        """
        ...


class Rendezvous(Protocol):
    """The service "rendezvous": processes meet before a framework connects them."""

    def meet(self, contract: Contract) -> None:
        """Wait until all processes of the contract are there.

        Raises:
            LaunchError: some do not come in time, or two have the same number.
        """
        ...

    def keep_stdout(self) -> None:
        """Give Python's stdout a descriptor of its own, so that lines which a collective library writes to descriptor
        1 do not mix with the program's output."""
        ...
