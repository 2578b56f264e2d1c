"""`JaxTrainRunner`: the weights and the optimizer state of a run on devices, and the compiled programs that update,
evaluate and read them. It implements `ttpu_train.runner.TrainRunner`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from ttpu_core.errors import RequestError
from ttpu_core.mapping import pad_mapping, stack_layers
from ttpu_core.sharding.training_state import ADAMW, Recomputation
from ttpu_core.spec import Parameter, axes
from ttpu_core.spec.parameters import stacked_parameters
from ttpu_jax.compiler_flags import training_options
from ttpu_jax.compiling import compiled_with, lower
from ttpu_jax.model.loss import TokenBatch
from ttpu_jax.params.dtypes import model_dtype
from ttpu_jax.params.export import Deferred, on_host
from ttpu_jax.params.quantized import shardings_of
from ttpu_jax.train.adapter_files import identity_of_adapters, read_adapter, write_adapter
from ttpu_jax.train.adapters import AdaptedModel, Adapters, find_adapters
from ttpu_jax.train.checks import check_settings, warn_of_dropout
from ttpu_jax.train.figures import (
    Evaluated,
    Pending,
    Updated,
    evaluated,
    names_of,
    of_evaluation,
    of_update,
    updated,
)
from ttpu_jax.train.from_settings import step_from_settings, trained_paths
from ttpu_jax.train.held import HeldParameters
from ttpu_jax.train.objectives.distill import TEACHER, distill_sums
from ttpu_jax.train.objectives.preference import completion_logprobs
from ttpu_jax.train.objectives.reward import SCORE
from ttpu_jax.train.objectives.token_logprobs import token_logprobs
from ttpu_jax.train.offload import first_state
from ttpu_jax.train.predictions import sums_and_logits
from ttpu_jax.train.remat import compiled_that_fits, different, peak_bytes
from ttpu_jax.train.rollouts import HandedWeights, Handover, RolloutModel
from ttpu_jax.train.rows import form, own_rows, placed_batch, row_layout, row_shardings
from ttpu_jax.train.score_head import HasScore, with_score
from ttpu_jax.train.stored import StoredArrays, named
from ttpu_jax.train.teacher import Teacher, open_teacher

if TYPE_CHECKING:
    from ttpu_jax.causal_lm import JaxCausalLM
    from ttpu_jax.model.causal_model import DecoderModel
    from ttpu_jax.train.checkpoints import OrbaxFiles
    from ttpu_train.runner import Batch, StepSettings



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
        check_settings(model, settings)
        warn_of_dropout(model.architecture.config)
        self.settings, self._model = settings, model
        self.step_count = 0
        programs = model.programs
        self.layout = row_layout(programs.runtime.placement)
        self.held = HeldParameters(model.spec, programs.spec, model.paddings)
        self._stored = StoredArrays(self.held)
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
        self._remat = cast("Recomputation | None", None if settings.remat == "auto" else settings.remat)
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
        if isinstance(model, HasScore):
            self._add_score(model)
        shapes = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding), self.params
        )
        state = self._step.abstract_state(shapes)
        self._state_shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        if self._step.offload is None:
            self.optimizer_state = jax.jit(self._step.init, out_shardings=self._state_shardings)(self.params)
        else:
            self.optimizer_state = first_state(state)
        chip = programs.runtime.placement.chip
        self.peak_flops = chip.bf16_flops if chip is not None and dtype.name == "bfloat16" else None
        self._programs: dict[Any, Any] = {}
        self._compiled_bytes: int | None = None
        self._released = False
        self._metrics: tuple[str, ...] = ()
        """The names of the objective's figures, in the order of every program's results; known when one was traced."""
        self._teacher: Teacher | None = None
        self._initial: dict[str, jax.Array] | None = None
        """Of the trained parameters, the values that the reference has where they differ from the present ones."""
        objective: Any = settings.objective
        if objective is not None and objective.method == "grpo" and objective.beta:
            changed = [path for path in self.params if self._step.trainable(path)]
            if self.adapters is not None and self.adapters.settings.start is None:
                changed = [path for path in changed if path not in self.adapters.names]
            trained_now = {path: self.params[path] for path in changed}
            self._initial = jax.jit(lambda params: jax.tree.map(jnp.copy, self._step.computed(params)))(trained_now)

    def step(self, batch: Batch) -> Pending[Updated]:
        """Update the weights. The first batch of a shape compiles its program.

        Raises:
            RequestError: rows that the layout's shards and the accumulation do not divide.
        """
        self._check_held()
        self._take_back()
        placed = self._placed(batch, self.settings.accumulation, on_host=True)
        number = np.int32(self.step_count)
        key = "update", form(placed)
        if key not in self._programs:
            compiled = partial(self._compile, batch=placed, number=number)
            if self._remat is None:
                device, remats = self._zero.weights.devices[0], different(self._step.model.spec)
                self._remat, program = compiled_that_fits(compiled, device, remats)
            else:
                program = compiled(self._remat)
            self._programs[key], self._compiled_bytes = program, peak_bytes(program)
        self.params, self.optimizer_state, figures = self._programs[key](
            self.params, self.optimizer_state, placed, number
        )
        self.step_count += 1
        figures.copy_to_host_async()
        return Pending(figures, partial(updated, self._metrics))

    def evaluate(self, batch: Batch) -> Pending[Evaluated]:
        """The loss of a batch with the weights as they are.

        Raises:
            RequestError: rows that the layout's shards do not divide.
        """

        def sums(params: Mapping[str, Any], batch: TokenBatch) -> jax.Array:
            found = self._step.sums(self._step.computed(params), batch)
            self._metrics = names_of(found)
            return of_evaluation(found)

        array = self._run("evaluate", sums, self._placed(batch))
        return Pending(array, partial(evaluated, self._metrics))

    def predict(self, batch: Batch) -> tuple[Pending[Evaluated], np.ndarray]:
        """What `evaluate` gives, and the logits, float32 [rows, seq, vocab], of this process's rows.

        Raises:
            RequestError: rows that the layout's shards do not divide.
        """

        def both(params: Mapping[str, Any], batch: TokenBatch) -> tuple[jax.Array, jax.Array]:
            found, logits = sums_and_logits(self._step, params, batch)
            self._metrics = names_of(found)
            return of_evaluation(found), logits

        placed = self._placed(batch)
        array, logits = self._run("predict", both, placed, (self._whole, placed.tokens.sharding))
        return Pending(array, partial(evaluated, self._metrics)), own_rows(logits)

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

    def gathered_rows(self, rows: np.ndarray) -> np.ndarray:
        """The rows [rows, ...] of each share of a batch, one after another: [all rows, ...]; each process must call it
        at the same place."""
        if self.layout.process_count == 1:
            return rows
        narrow = rows.astype(jax.dtypes.canonicalize_dtype(rows.dtype))
        every = np.asarray(multihost_utils.process_allgather(narrow)).astype(rows.dtype)
        return np.concatenate([every[process] for process in self.layout.readers])

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

    def checkpoint_files(self) -> OrbaxFiles:
        """What writes and reads the arrays of this run's checkpoints."""
        from ttpu_jax.train.checkpoints import OrbaxFiles

        return OrbaxFiles(self)

    def save_pretrained(self, folder: Path, dtype: str) -> Path:
        """Write the weights as a Hugging Face checkpoint, in `dtype`; where adapters are trained, the adapter in peft's
        format."""
        kind = model_dtype(dtype)
        if self.adapters is not None:
            arrays = {path: on_host(value) for path, value in self.stored_arrays()[0].items()}
            return write_adapter(folder, self.adapter_identity(), arrays, self._model.architecture, kind)
        mapping = stack_layers(pad_mapping(self._model.architecture.mapping, self._model.paddings), self.held.padded)
        if self.head is not None:
            mapping = with_score(mapping, self._model.spec)

        def converted(path: str) -> np.ndarray:
            return on_host(self.params[path].astype(kind))

        one_by_one = {
            path: Deferred(value.shape, kind, partial(converted, path)) for path, value in self.params.items()
        }
        return self._model.save_parameters(folder, mapping, one_by_one, kind)

    def model(self) -> JaxCausalLM:
        """The loaded model with the weights as they are, to generate with; the next update takes them back."""
        if not self._model.params:
            table = self._model.spec.parameters
            dtypes = {path: np.dtype(one.dtype) if one.dtype else self._model.dtype for path, one in table.items()}
            placements = dict(self._model.programs.model.placements)
            params: Mapping[str, Any] = self.params
            if isinstance(self._model, HasScore):
                self._model.score = on_host(self.params[SCORE])
                params = {path: value for path, value in params.items() if path != SCORE}
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
        return Handover(self._model, self._step.dtype, self._zero.weights, self.adapters)

    def rollout_model(self) -> RolloutModel:
        """The model in training, for a serving engine on the same devices."""
        self._take_back()
        return self._handover.rollout_model(self.params)

    def rollout_weights(self) -> HandedWeights:
        """The present weights, for that engine's `update_weights`: the next update ends them."""
        self._take_back()
        return self._handover.weights(self.params)

    @property
    def _reference(self) -> DecoderModel:
        """The model that one in training is compared with: without new adapters, with one that was given."""
        model = self._step.model
        if isinstance(model, AdaptedModel) and model.adapters.settings.start is None:
            return model.reference
        return model

    def token_logprobs(self, batch: Batch, temperature: float, *, initial: bool = False) -> np.ndarray:
        """float32 [rows, seq], the log-probability of each token of this process's rows given those before it, where
        the batch has weight; 0 elsewhere.

        Args:
            batch: the rows.
            temperature: that logits are divided by.
            initial: of the weights before training, which are kept for an objective with `beta`; without the adapters
                in training, unless these began as a given one.

        Raises:
            RequestError: rows that the layout's shards do not divide, or weights that were not kept.
        """
        if initial and self._initial is None:
            raise RequestError(
                "log-probabilities of the weights before training were asked for, but they are kept only for an "
                "objective that compares with them: set its beta."
            )
        at_once = self.settings.loss.tokens_at_once
        model = self._reference if initial else self._step.model

        def logprobs(params: Mapping[str, Any], batch: TokenBatch) -> jax.Array:
            found, _ = token_logprobs(model, self._step.computed(params), batch, temperature, at_once)
            return jnp.where(batch.weights != 0, found, 0.0)

        placed = self._placed(batch)
        weights = {**self.params, **(self._initial or {})} if initial else None
        name = f"{'initial ' if initial else ''}logprobs {temperature}"
        return own_rows(self._run(name, logprobs, placed, placed.tokens.sharding, weights))

    # -- for preferences --

    def row_logprobs(self, batch: Batch) -> np.ndarray:
        """float32 [rows of all shares], one share after another: the log-probability of each row's tokens that have
        weight, by the weights as they are. New adapters, which are trained, count nothing; one that training began with
        does.

        Raises:
            RequestError: rows that the layout's shards do not divide.
        """
        at_once = self.settings.loss.tokens_at_once

        def logprobs(params: Mapping[str, Any], batch: TokenBatch) -> jax.Array:
            return completion_logprobs(self._reference, self._step.computed(params), batch, at_once)

        placed = self._placed(batch)
        by_rows = self._zero.weights.sharding((axes.BATCH,), placed.tokens.shape[:1], "the rows")
        return self.gathered_rows(own_rows(self._run("row logprobs", logprobs, placed, by_rows)))

    # -- for distillation --

    def teach(self, source: str | Path, load_options: Mapping[str, Any], tokenizer: Any) -> None:
        """Load a teacher onto the devices of the training.

        Args:
            source: a checkpoint's folder or Hub id.
            load_options: of the teacher, by name.
            tokenizer: the student's, or None.

        Raises:
            RequestError: its vocabulary is not the student's, or an option says where it lies.
            UnsupportedError: the mesh does not divide it.
        """
        objective: Any = self.settings.objective
        found = open_teacher(source, load_options, self._model, self._zero, self._step.dtype, tokenizer)
        at_once = self.settings.loss.tokens_at_once
        loss = partial(distill_sums, settings=objective, tokens_at_once=at_once, teacher=found.model)
        self._teacher, self._step = found, replace(self._step, loss=loss)

    # -- for checkpoints --

    @property
    def source(self) -> JaxCausalLM:
        """The loaded model, whose weights this runner may hold."""
        return self._model

    @property
    def head(self) -> str | None:
        """What a checkpoint says of a head that is not a language model's; None for that."""
        return SCORE if isinstance(self._model, HasScore) else None

    @property
    def stored_names(self) -> frozenset[str]:
        """The parameters that checkpoints hold: all, or where adapters are trained, what is trained."""
        return self._kept

    def stored_arrays(self) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Master weights by stacked path and the optimizer's state by name, both without padding."""
        stored = self._stored.without_padding
        return stored(self._of_checkpoints()), stored(named(self.optimizer_state))

    def adapter_identity(self) -> dict[str, Any] | None:
        """What says which adapters a checkpoint holds; None where weights are trained."""
        return None if self.adapters is None else identity_of_adapters(self.adapters, self._model)

    def stored_shapes(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Shapes, dtypes and shardings of `stored_arrays`."""
        return self._stored.shapes(self._of_checkpoints()), self._stored.shapes(named(self.optimizer_state))

    def _of_checkpoints(self) -> dict[str, jax.Array]:
        return {path: value for path, value in self.params.items() if path in self._kept}

    def release(self) -> None:
        """Free the arrays of `stored_arrays`, so that those of a checkpoint need no memory beside them; their shapes
        stay. Only `put` may follow."""
        self._take_back()
        for array in jax.tree.leaves((self._of_checkpoints(), self.optimizer_state)):
            array.delete()
        self._released = True

    def put(self, params: Mapping[str, jax.Array], state: Mapping[str, jax.Array], step: int) -> None:
        """Take over arrays as `stored_arrays` gives them."""
        self._take_back()
        self._released = False
        leaves, tree = jax.tree.flatten(self.optimizer_state)
        names = list(named(self.optimizer_state))
        shardings = {name: leaf.sharding for name, leaf in zip(names, leaves, strict=True)}
        self.params = {**self.params, **self._stored.with_padding(params, self._shardings)}
        padded = self._stored.with_padding(state, shardings)
        self.optimizer_state = jax.tree.unflatten(tree, [padded[name] for name in names])
        self.step_count = step

    # -- programs --

    def _add_adapters(self, adapters: Adapters) -> None:
        """Make the arrays of adapters: new ones, or those of the adapter to begin with."""
        self._model.programs.forget()
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

    def _add_score(self, model: HasScore) -> None:
        """Take over a reward model's score head, or draw one as transformers does."""
        objective: Any = self.settings.objective
        model.pad_token_id = objective.pad_token_id
        parameter = self._step.model.parameters[SCORE]
        value = model.score
        if value is None:
            deviation = self._model.architecture.config.get("initializer_range", 0.02)
            drawn = np.random.default_rng(self.settings.seed).normal(0, deviation, parameter.shape)
            value = drawn.astype(np.float32)
        self._table[SCORE], self._shardings[SCORE] = parameter, self._zero.state(SCORE, parameter)
        self.params[SCORE] = jax.make_array_from_callback(value.shape, self._shardings[SCORE], value.__getitem__)
        self.trained_count += parameter.size
        self.parameter_count += parameter.size
        self._kept |= {SCORE}

    def _take_back(self) -> None:
        """Free the weights that `model` gave."""
        for array in jax.tree.leaves(self._model.params):
            array.delete()
        self._model.params.clear()

    def _placed(self, batch: Batch, parts: int = 1, *, on_host: bool = False) -> TokenBatch:
        together = self._step.rows_per_example
        placed = placed_batch(batch, self.layout, self._zero.weights, parts, together, on_host=on_host)
        return placed if self._teacher is None else replace(placed, shared={TEACHER: self._teacher.params})

    def _run(self, name: str, function: Any, batch: TokenBatch, sharding: Any = None, weights: Any = None) -> Any:
        """Compute something of a batch with the weights as they are, or with others."""
        self._check_held()
        key = name, form(batch)
        if key not in self._programs:
            self._programs[key] = jax.jit(function, out_shardings=sharding or self._whole)
        return self._programs[key](self.params if weights is None else weights, batch)

    def _check_held(self) -> None:
        if self._released:
            raise RequestError(
                "the weights of a run were to be used, but they were freed for a checkpoint that could not be read: "
                "restore another one, or make the run anew."
            )

    def _compile(self, remat: Recomputation, batch: TokenBatch, number: np.int32) -> Any:
        step = replace(self._step, model=replace(self._step.model, remat=remat))

        def update(
            params: dict[str, Any], state: Any, batch: TokenBatch, number: jax.Array
        ) -> tuple[dict[str, Any], Any, jax.Array]:
            params, state, figures = step(params, state, batch, number)
            self._metrics = names_of(figures.sums)
            return params, state, of_update(figures)

        placement = self._zero.weights
        given = None, None, row_shardings(batch, placement), self._whole
        held = self._shardings, self._state_shardings, self._whole
        jitted = jax.jit(update, donate_argnums=(0, 1), in_shardings=given, out_shardings=held)
        program = lower(jitted, self.params, self.optimizer_state, batch, number)
        tokens = batch.tokens.size // (self.layout.shards * self.settings.accumulation)
        return compiled_with(program, training_options(placement.platform, placement.chip, tokens))
