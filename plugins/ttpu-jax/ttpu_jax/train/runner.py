"""`JaxTrainRunner`: the weights and the optimizer state of a run on devices, and the compiled programs that update,
evaluate and read them. It implements `ttpu_train.runner.TrainRunner`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_core.mapping import pad_mapping, stack_layers
from ttpu_core.sharding.hardware import chip_of_device_kind
from ttpu_core.sharding.training_state import ADAMW
from ttpu_core.spec import Parameter, axes
from ttpu_core.spec.parameters import stacked_parameters
from ttpu_jax.model.causal_model import Remat
from ttpu_jax.model.loss import TokenBatch
from ttpu_jax.params.dtypes import model_dtype
from ttpu_jax.params.export import on_host
from ttpu_jax.params.placement import Placement
from ttpu_jax.params.quantized import shardings_of
from ttpu_jax.train.adapter_files import identity_of_adapters, read_adapter, write_adapter
from ttpu_jax.train.adapters import Adapters, find_adapters
from ttpu_jax.train.from_settings import step_from_settings, trained_paths
from ttpu_jax.train.held import HeldParameters
from ttpu_jax.train.objectives.preference import completion_logprobs
from ttpu_jax.train.objectives.token_logprobs import token_logprobs
from ttpu_jax.train.rollouts import HandedWeights, Handover, RolloutModel
from ttpu_jax.train.step import Figures, mean_of

if TYPE_CHECKING:
    from ttpu_jax.causal_lm import JaxCausalLM
    from ttpu_jax.train.checkpoints import OrbaxStore
    from ttpu_train.runner import Batch, CheckpointPolicy, StepSettings

Values = TypeVar("Values")
REMATS: tuple[Remat, ...] = ("none", "dots", "full")


@dataclass(frozen=True)
class Rows:
    """Which rows of a batch are this process's; see `ttpu_train.runner.RowLayout`."""

    shards: int = 1
    process_index: int = 0
    process_count: int = 1
    device_count: int = 1


@dataclass(frozen=True)
class Updated:
    """The figures of an update; see `ttpu_train.runner.StepValues`."""

    loss: float
    cross_entropy: float
    tokens: float
    grad_norm: float
    learning_rate: float
    skipped: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluated:
    """The sums of a batch; see `ttpu_train.runner.EvalValues`."""

    cross_entropy: float
    tokens: float
    correct: float
    total: float
    divisor: float
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Pending(Generic[Values]):
    """Figures that devices may still be computing: an array, and what makes values of it."""

    array: jax.Array
    read: Callable[..., Values]

    def ready(self) -> bool:
        """Whether `values` returns without waiting."""
        return bool(cast(Any, self.array).is_ready())

    def values(self) -> Values:
        """The figures, when they are there."""
        return self.read(*(float(one) for one in np.asarray(self.array)))


def row_layout(placement: Placement) -> Rows:
    """Which rows of a batch a placement gives this process.

    Raises:
        UnsupportedError: processes share rows.
    """
    if placement.mesh is None:
        return Rows()
    shards = prod(placement.mesh.shape[axis] for axis in placement.axes_of(axes.BATCH))
    processes = jax.process_count()
    if processes > 1:
        sharding = placement.sharding((axes.BATCH,), (shards,), "the rows")
        own = {index[0].start or 0 for index in sharding.addressable_devices_indices_map((shards,)).values() if index}
        if len(own) * processes != shards:
            raise UnsupportedError(
                f"{processes} processes were to train with rows divided over {shards} devices, but several of them "
                "hold the same rows: use a mesh whose axes data and fsdp together are a multiple of the processes."
            )
    return Rows(shards, jax.process_index(), processes, placement.mesh.size)


class JaxTrainRunner:
    """Takes over a loaded model's weights: its parameters are empty until `model` gives them back.

    Args:
        model: as the backend loaded it.
        settings: of the run.

    Attributes:
        step_count: updates so far.
        held: how parameters are held and stored.
        optimizer_state: of the trained parameters.
        params: stacked path → master weight; of a parameter that is not trained, the weight as it was loaded. Where
            adapters are trained, their arrays by name too.
        adapters: that are trained; None trains weights.

    Raises:
        RequestError: settings that contradict the model or each other.
        UnsupportedError: the model is quantized or served by an engine, or the mesh pads what the optimizer takes
            whole.
    """

    def __init__(self, model: JaxCausalLM, settings: StepSettings) -> None:
        _refuse(model, settings)
        self.settings, self._model = settings, model
        self.step_count = 0
        programs = model.programs
        self.layout = row_layout(programs.runtime.placement)
        self.held = HeldParameters(model.spec, programs.spec, model.paddings)
        self._table: dict[str, Parameter] = stacked_parameters(programs.spec)
        self.adapters = None
        if settings.adapters is None:
            trained = trained_paths(settings.trainable, self._table, self.held.copies, model.spec.model_type)
        else:
            mapping = model.architecture.mapping
            self.adapters = find_adapters(settings.adapters, mapping, programs.spec, model.paddings)
            trained = self.adapters.whole
        config = model.architecture.config
        self._step = step_from_settings(
            settings, programs.spec, programs.runtime, model.paddings, config, self._table, trained, self.adapters
        )
        assert self._step.zero is not None
        self._zero, dtype = self._step.zero, self._step.dtype
        self._remat = cast("Remat | None", None if settings.remat == "auto" else settings.remat)
        self._whole = self._zero.weights.whole()
        self._shardings: dict[str, Any] = {
            path: self._zero.state(path, parameter)
            if path in trained
            else shardings_of(self._zero.weights, path, parameter)
            for path, parameter in self._table.items()
        }
        master = np.dtype(ADAMW.master_dtype)
        kept = {path: model.params[self.held.copies.get(path, (path,))[0]].dtype for path in self._table}
        dtypes = {path: master if path in trained else kept[path] for path in self._table}
        self.params = self.held.taken_over(model.params, self._shardings, dtypes)
        self.parameter_count = sum(parameter.size for parameter in self.held.stored.values())
        self.trained_count = sum(self.held.stored[path].size for path in trained)
        self._kept = frozenset(self._table) if self.adapters is None else trained
        if self.adapters is not None:
            self._add_adapters(self.adapters)
        shapes = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding), self.params
        )
        self._state_shardings = jax.tree.map(lambda leaf: leaf.sharding, self._step.abstract_state(shapes))
        self.optimizer_state = jax.jit(self._step.init, out_shardings=self._state_shardings)(self.params)
        chip = chip_of_device_kind(programs.runtime.placement.devices[0].device_kind)
        self.peak_flops = chip.bf16_flops if chip is not None and dtype.name == "bfloat16" else None
        self._programs: dict[Any, Any] = {}
        self._compiled_bytes: int | None = None
        self._metrics: tuple[str, ...] = ()
        """The names of the objective's figures, in the order of a program's results; known when one was traced."""
        self._initial: dict[str, jax.Array] | None = None
        objective: Any = settings.objective
        if objective is not None and objective.method == "grpo" and objective.beta:
            self._initial = jax.jit(lambda params: jax.tree.map(jnp.copy, self._step.computed(params)))(self.params)

    def step(self, batch: Batch) -> Pending[Updated]:
        """Update the weights. The first batch of a shape compiles its program.

        Raises:
            RequestError: rows that the layout's shards and the accumulation do not divide.
        """
        self._take_back()
        placed = self._placed(batch, self.settings.accumulation)
        number = np.int32(self.step_count)
        key = "update", _form(placed)
        if key not in self._programs:
            self._programs[key] = self._compiled_update(placed, number)
        self.params, self.optimizer_state, figures = self._programs[key](
            self.params, self.optimizer_state, placed, number
        )
        self.step_count += 1
        return Pending(figures, partial(_updated, self._metrics))

    def evaluate(self, batch: Batch) -> Pending[Evaluated]:
        """The loss of a batch with the weights as they are.

        Raises:
            RequestError: rows that the layout's shards do not divide.
        """

        def sums(params: Mapping[str, Any], batch: TokenBatch) -> jax.Array:
            found = self._step.sums(self._step.computed(params), batch)
            self._metrics = tuple(found.metrics)
            divisor = found.weight if found.divisor is None else found.divisor
            metrics = [figure for pair in found.metrics.values() for figure in pair]
            return jnp.stack([found.cross_entropy, found.weight, found.correct, found.total, divisor, *metrics])

        array = self._run("evaluate", sums, self._placed(batch))
        return Pending(array, partial(_evaluated, self._metrics))

    def logits(self, batch: Batch) -> np.ndarray:
        """float32 [rows, seq, vocab], of this process's rows.

        Raises:
            RequestError: rows that the layout's shards do not divide.
        """
        model = self._step.model

        def logits(params: Mapping[str, Any], batch: TokenBatch) -> jax.Array:
            weights = self._step.computed(params)
            hidden = model.hidden(weights, batch.tokens, batch.positions, batch.segments)
            return model.logits(weights, hidden)[..., : model.spec.vocab_size]

        placed = self._placed(batch)
        return _own_rows(self._run("logits", logits, placed, placed.tokens.sharding))

    def any_process(self, flag: bool) -> bool:
        """Whether any process gives True; each must call it at the same place. With one process, `flag`."""
        if self.layout.process_count == 1:
            return flag
        return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))

    def gathered(self, value: float) -> tuple[float, ...]:
        """The value of each process, in their order; each must call it at the same place."""
        if self.layout.process_count == 1:
            return (value,)
        every = multihost_utils.process_allgather(np.asarray(value, np.float32))
        return tuple(float(one) for one in np.ravel(every))

    def start_trace(self, folder: Path) -> None:
        """Begin to trace with JAX's profiler, into a folder that TensorBoard and Perfetto read."""
        jax.block_until_ready(self.params)  # updates before the first that is traced are done
        folder.mkdir(parents=True, exist_ok=True)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # each call of Python would be an event, and writing them takes long
        jax.profiler.start_trace(str(folder), profiler_options=options)

    def stop_trace(self) -> None:
        """Wait for the devices and write the trace."""
        jax.block_until_ready(self.params)
        jax.profiler.stop_trace()

    def compiled_bytes(self) -> int | None:
        """The peak bytes of a device in the compiled update, or None before the first."""
        return self._compiled_bytes

    def checkpoints(self, folder: Path, policy: CheckpointPolicy) -> OrbaxStore:
        """The checkpoints of this run in a folder, which is made if it is not there. Config and tokenizer are kept in
        the folder `model` beside it."""
        from ttpu_jax.train.checkpoints import OrbaxStore

        return OrbaxStore(self, folder, policy)

    def save_pretrained(self, folder: Path, dtype: str) -> Path:
        """Write the weights as a Hugging Face checkpoint, in `dtype`; where adapters are trained, the adapter in peft's
        format."""
        kind = model_dtype(dtype)
        if self.adapters is not None:
            arrays = {path: on_host(value) for path, value in self.stored_arrays()[0].items()}
            return write_adapter(folder, self.adapter_identity(), arrays, self._model.architecture, kind)
        mapping = stack_layers(pad_mapping(self._model.architecture.mapping, self._model.paddings), self.held.padded)
        return self._model.save_parameters(
            folder, mapping, {path: value.astype(kind) for path, value in self.params.items()}, kind
        )

    def model(self) -> JaxCausalLM:
        """The loaded model with the weights as they are, to generate with; the next update takes them back."""
        if not self._model.params:
            table = self._model.spec.parameters
            dtypes = {path: np.dtype(one.dtype) if one.dtype else self._model.dtype for path, one in table.items()}
            placements = dict(self._model.programs.model.placements)
            params: Mapping[str, Any] = self.params
            if self.adapters is not None:
                params = jax.jit(self._bound)(params)
                placement = self._model.programs.runtime.placement
                placements |= self.adapters.layer_shardings(params, placements, placement)
            self._model.params.update(self.held.unstacked(params, placements, dtypes))
        return self._model

    def _bound(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters with adapters in their kernels, in the dtype of the loaded model."""
        assert self.adapters is not None
        own = self.adapters.table()
        cast = {name: params[name].astype(self._model.dtype) for name, one in own.items() if one.dtype is None}
        return self.adapters.bound({**params, **cast}, self._zero.weights)

    # -- for rollouts --

    @cached_property
    def _handover(self) -> Handover:
        return Handover(self._model, self._step.dtype)

    def rollout_model(self) -> RolloutModel:
        """The model in training, for a serving engine on the same devices.

        Raises:
            UnsupportedError: adapters are trained.
        """
        if self.adapters is not None:
            raise UnsupportedError(
                "an engine was to sample with the weights in training, but adapters are trained, which it cannot read "
                "from the trainer: train the weights themselves, without peft_config."
            )
        self._take_back()
        return self._handover.rollout_model(self.params)

    def rollout_weights(self) -> HandedWeights:
        """The present weights, for that engine's `update_weights`: the next update ends them."""
        self._take_back()
        return self._handover.weights(self.params)

    def token_logprobs(self, batch: Batch, temperature: float, *, initial: bool = False) -> np.ndarray:
        """float32 [rows, seq], the log-probability of each token of this process's rows given those before it, where
        the batch has weight; 0 elsewhere.

        Args:
            batch: the rows.
            temperature: that logits are divided by.
            initial: of the weights before training, which are kept for an objective with `beta`.

        Raises:
            RequestError: rows that the layout's shards do not divide, or weights that were not kept.
        """
        if initial and self._initial is None:
            raise RequestError(
                "log-probabilities of the weights before training were asked for, but they are kept only for an "
                "objective that compares with them: set its beta."
            )
        at_once = self.settings.loss.tokens_at_once

        def logprobs(params: Mapping[str, Any], batch: TokenBatch) -> jax.Array:
            found, _ = token_logprobs(self._step.model, self._step.computed(params), batch, temperature, at_once)
            return jnp.where(batch.weights != 0, found, 0.0)

        placed = self._placed(batch)
        weights = self._initial if initial else None
        return _own_rows(self._run(f"logprobs {temperature}", logprobs, placed, placed.tokens.sharding, weights))

    # -- for preferences --

    def row_logprobs(self, batch: Batch) -> np.ndarray:
        """float32 [rows of all processes], in their order: the log-probability of each row's tokens that have weight,
        by the weights as they are. An adapter that has not been trained changes none.

        Raises:
            RequestError: rows that the layout's shards do not divide.
        """
        at_once = self.settings.loss.tokens_at_once

        def logprobs(params: Mapping[str, Any], batch: TokenBatch) -> jax.Array:
            return completion_logprobs(self._step.model, self._step.computed(params), batch, at_once)

        return np.asarray(self._run("row logprobs", logprobs, self._placed(batch)))

    # -- for checkpoints --

    @property
    def source(self) -> JaxCausalLM:
        """The loaded model, whose weights this runner may hold."""
        return self._model

    @property
    def stored_names(self) -> frozenset[str]:
        """The parameters that checkpoints hold: all, or where adapters are trained, what is trained."""
        return self._kept

    def stored_arrays(self) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Master weights by stacked path and the optimizer's state by name, both without padding."""
        return self._stored(self._of_checkpoints()), self._stored(_named(self.optimizer_state))

    def adapter_identity(self) -> dict[str, Any] | None:
        """What says which adapters a checkpoint holds; None where weights are trained."""
        return None if self.adapters is None else identity_of_adapters(self.adapters, self._model)

    def stored_shapes(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Shapes, dtypes and shardings of `stored_arrays`."""

        def shapes(arrays: Mapping[str, jax.Array]) -> dict[str, Any]:
            return {name: self._stored_shape(name, array) for name, array in arrays.items()}

        return shapes(self._of_checkpoints()), shapes(_named(self.optimizer_state))

    def _of_checkpoints(self) -> dict[str, jax.Array]:
        return {path: value for path, value in self.params.items() if path in self._kept}

    def put(self, params: Mapping[str, jax.Array], state: Mapping[str, jax.Array], step: int) -> None:
        """Take over arrays as `stored_arrays` gives them."""
        self._take_back()
        leaves, tree = jax.tree.flatten(self.optimizer_state)
        names = list(_named(self.optimizer_state))
        shardings = {name: leaf.sharding for name, leaf in zip(names, leaves, strict=True)}
        self.params = {**self.params, **self._repadded(params, self._shardings)}
        padded = self._repadded(state, shardings)
        self.optimizer_state = jax.tree.unflatten(tree, [padded[name] for name in names])
        self.step_count = step

    def _padded_path(self, name: str, shape: tuple[int, ...], *, stored: bool = False) -> str | None:
        """The parameter whose padding an array has: a parameter, or a moment of its shape."""
        for path in self.held.paddings_by_path:
            table = self.held.stored if stored else self._table
            if (name == path or name.endswith(f".{path}")) and table[path].shape == shape:
                return path
        return None

    def _stored_shape(self, name: str, array: jax.Array) -> jax.ShapeDtypeStruct:
        path = self._padded_path(name, array.shape)
        if path is None:
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        sharding = self.held.stored_sharding(path, array.sharding)
        return jax.ShapeDtypeStruct(self.held.stored[path].shape, array.dtype, sharding=sharding)

    def _stored(self, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        def stored(name: str, array: jax.Array) -> jax.Array:
            path = self._padded_path(name, array.shape)
            if path is None:
                return array
            sharding = self._stored_shape(name, array).sharding
            return jax.jit(partial(self.held.unpadded, path), out_shardings=sharding)(array)

        return {name: stored(name, array) for name, array in arrays.items()}

    def _repadded(self, arrays: Mapping[str, jax.Array], shardings: Mapping[str, Any]) -> dict[str, jax.Array]:
        def padded(name: str, array: jax.Array) -> jax.Array:
            path = self._padded_path(name, array.shape, stored=True)
            if path is None:
                return array
            return jax.jit(partial(self.held.repadded, path), out_shardings=shardings[name])(array)

        return {name: padded(name, array) for name, array in arrays.items()}

    # -- programs --

    def _add_adapters(self, adapters: Adapters) -> None:
        """Make the arrays of adapters: new ones, or those of the adapter to begin with."""
        own = adapters.table(self._zero.weights)
        self._table |= own
        self._shardings |= {name: self._zero.state(name, parameter) for name, parameter in own.items()}
        shardings = {name: self._shardings[name] for name in own}
        start = adapters.settings.start
        if start is None:
            first = partial(adapters.first, seed=self.settings.seed, placement=self._zero.weights)
            self.params |= jax.jit(first, out_shardings=shardings)(self.params)
        else:
            read = read_adapter(start, adapters, self._model.architecture, self.held.padded, self._model.paddings)
            self.params |= {
                path: jax.make_array_from_callback(value.shape, self._shardings[path], value.__getitem__)
                for path, value in read.items()
            }
        self.trained_count += sum(parameter.size for parameter in own.values())
        self.parameter_count += sum(parameter.size for parameter in own.values())
        self._kept |= frozenset(own)

    def _take_back(self) -> None:
        """Free the weights that `model` gave."""
        for array in jax.tree.leaves(self._model.params):
            array.delete()
        self._model.params.clear()

    def _placed(self, batch: Batch, parts: int = 1) -> TokenBatch:
        """The batch on devices, each process giving its own rows."""
        rows = batch.tokens.shape[0] * self.layout.process_count
        together = self._step.rows_per_example
        least = self.layout.shards * parts * together
        if rows % least or not rows:
            raise RequestError(
                f"a batch of {rows} rows was given, but {self.layout.shards} devices take equal shares of it"
                f"{f' in {parts} parts' if parts > 1 else ''}{f', {together} rows together' if together > 1 else ''}: "
                f"give a multiple of {least} rows."
            )
        placement = self._zero.weights

        def put(array: np.ndarray, dtype: Any) -> jax.Array:
            array = np.ascontiguousarray(array, dtype)
            shape = (rows, *array.shape[1:])
            sharding = placement.sharding((axes.BATCH, *(None for _ in shape[1:])), shape, "the rows")
            if self.layout.process_count == 1:
                return jax.device_put(array, sharding)
            return jax.make_array_from_process_local_data(sharding, array, shape)

        return TokenBatch(
            put(batch.tokens, np.int32),
            put(batch.weights, np.float32),
            put(batch.positions, np.int32),
            None if batch.segments is None else put(batch.segments, np.int32),
            {name: put(array, np.float32) for name, array in batch.extra.items()},
        )

    def _run(
        self, name: str, function: Any, batch: TokenBatch, sharding: Any = None, weights: Any = None
    ) -> jax.Array:
        """Compute something of a batch with the weights as they are, or with others."""
        key = name, _form(batch)
        if key not in self._programs:
            self._programs[key] = jax.jit(function, out_shardings=sharding or self._whole)
        result: jax.Array = self._programs[key](self.params if weights is None else weights, batch)
        return result

    def _compiled_update(self, batch: TokenBatch, number: np.int32) -> Any:
        if self._remat is not None:
            program = self._compile(self._remat, batch, number)
            self._compiled_bytes = _peak_bytes(program)
            return program
        limit = _device_bytes(self._zero.weights.devices[0])
        for remat in REMATS if limit else REMATS[-1:]:
            try:
                program = self._compile(remat, batch, number)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error) or remat == REMATS[-1]:
                    raise
                continue
            self._compiled_bytes = _peak_bytes(program)
            if remat == REMATS[-1] or (self._compiled_bytes or 0) <= (limit or 0):
                break
        self._remat = remat
        return program

    def _compile(self, remat: Remat, batch: TokenBatch, number: np.int32) -> Any:
        step = replace(self._step, model=replace(self._step.model, remat=remat))

        def update(
            params: dict[str, Any], state: Any, batch: TokenBatch, number: jax.Array
        ) -> tuple[dict[str, Any], Any, jax.Array]:
            params, state, figures = step(params, state, batch, number)
            self._metrics = tuple(figures.sums.metrics)
            return params, state, _as_array(figures)

        shardings = self._shardings, self._state_shardings, self._whole
        jitted = jax.jit(update, donate_argnums=(0, 1), out_shardings=shardings)
        return jitted.lower(self.params, self.optimizer_state, batch, number).compile()


def _refuse(model: JaxCausalLM, settings: StepSettings) -> None:
    if model.programs.spec.kernel_formats and settings.adapters is None:
        raise UnsupportedError(
            "a quantized model was to be trained, but updates are smaller than the steps between its numbers: train "
            "adapters beside it with peft_config={'target_modules': 'all-linear'}, or load it without quantization."
        )
    if model.engine is not None:
        raise UnsupportedError(
            "a model with a serving engine was to be trained, but the engine holds the weights: load it without "
            "enable_paged_attention."
        )
    if not model.params:
        raise RequestError(
            "a model without weights was to be trained, but another trainer has taken them over: load it again."
        )
    if settings.remat not in (*REMATS, "auto"):
        raise RequestError(
            f"remat={settings.remat!r} was asked for, but what is computed again is one of {', '.join(REMATS)} and "
            "auto: use one of these."
        )
    if settings.accumulation < 1:
        raise RequestError(
            f"an accumulation of {settings.accumulation} parts was asked for, but a batch has at least 1: raise it."
        )


def _as_array(figures: Figures) -> jax.Array:
    """The figures in the order of `Updated`, in one array that one transfer brings to the host."""
    sums = figures.sums
    return jnp.stack(
        [
            figures.loss,
            mean_of(sums, sums.cross_entropy),
            sums.weight,
            figures.grad_norm,
            figures.learning_rate,
            figures.skipped.astype(jnp.float32),
            *(total / jnp.where(count > 0, count, 1.0) for total, count in sums.metrics.values()),
        ]
    )


def _updated(
    names: tuple[str, ...],
    loss: float,
    cross_entropy: float,
    tokens: float,
    grad_norm: float,
    learning_rate: float,
    skipped: float,
    *metrics: float,
) -> Updated:
    named = dict(zip(names, metrics, strict=True))
    return Updated(loss, cross_entropy, tokens, grad_norm, learning_rate, bool(skipped), named)


def _evaluated(
    names: tuple[str, ...],
    cross_entropy: float,
    tokens: float,
    correct: float,
    total: float,
    divisor: float,
    *metrics: float,
) -> Evaluated:
    pairs = zip(metrics[::2], metrics[1::2], strict=True)
    return Evaluated(cross_entropy, tokens, correct, total, divisor, dict(zip(names, pairs, strict=True)))


def _form(batch: TokenBatch) -> Any:
    """What a program is compiled for."""
    shapes = tuple((name, array.shape) for name, array in sorted(batch.extra.items()))
    return batch.tokens.shape, batch.segments is None, shapes


def _named(tree: Any) -> dict[str, jax.Array]:
    """The arrays of a tree by the names of their places."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _own_rows(array: jax.Array) -> np.ndarray:
    """The rows [rows, ...] that this process's devices hold."""
    if array.is_fully_addressable:
        return np.asarray(array)
    rows = {shard.index[0].start or 0: np.asarray(shard.data) for shard in array.addressable_shards}
    return np.concatenate([rows[start] for start in sorted(rows)])


def _peak_bytes(program: Any) -> int | None:
    analysis = program.memory_analysis()
    if analysis is None:
        return None
    return int(
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        + analysis.temp_size_in_bytes
        - analysis.alias_size_in_bytes
    )


def _device_bytes(device: jax.Device) -> int | None:
    """The memory that programs may use; None where the device does not say, as a CPU."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return None if not stats else stats.get("bytes_limit")
