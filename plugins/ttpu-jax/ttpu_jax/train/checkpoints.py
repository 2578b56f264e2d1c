"""The checkpoints of a training run, written by orbax: master weights, optimizer state and what the trainer gives are
committed together or not at all. Arrays are stored without padding and layers stacked, so that every mesh and every
stage of ZeRO reads them."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers as managers

from ttpu_core.errors import CheckpointError
from ttpu_core.spec import Parameter
from ttpu_jax.params.export import copy_small_files

if TYPE_CHECKING:
    from ttpu_jax.train.runner import JaxTrainRunner
    from ttpu_train.runner import CheckpointPolicy

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

FORMAT = 1
"""The version of what a checkpoint holds."""
PARAMS, OPTIMIZER, RUN, IDENTITY = "params", "optimizer", "run", "identity"
ADAPTERS = "adapters"
"""What the identity says of adapters: see `ttpu_jax.train.adapter_files.identity_of_adapters`."""
MODEL = "model"
"""The folder beside the checkpoints with the model's config and tokenizer."""
REMOVED = ".removed"
"""The folder among the checkpoints to which those that need not stay are moved before they are deleted, so that a
killed run leaves none with half of its files."""
ASIDE = "damaged"
"""The ending of the folder that a damaged checkpoint is renamed to."""


def identity_of(
    model_type: str, table: Mapping[str, Parameter], adapters: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What says whose checkpoint it is: the version of the format, the model's parameters without padding, and the
    adapters if these are trained."""
    shapes = {path: list(parameter.shape) for path, parameter in table.items()}
    digest = hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest()
    found = {"format": FORMAT, "model_type": model_type, "parameters": digest}
    return found if adapters is None else {**found, ADAPTERS: dict(adapters)}


class OrbaxStore:
    """The checkpoints of one run in one folder; see `ttpu_train.runner.CheckpointStore`.

    Args:
        runner: whose state is saved and restored.
        folder: of the checkpoints; config and tokenizer are written beside it at the first save.
        policy: which checkpoints stay.
    """

    def __init__(self, runner: JaxTrainRunner, folder: Path, policy: CheckpointPolicy) -> None:
        self._runner, self._folder, self._policy = runner, folder.resolve(), policy
        metric = policy.best_metric
        kept: Any = managers.LatestN(policy.keep)
        if metric is not None and policy.keep is not None:
            best = managers.BestN(get_metric_fn=self._value, reverse=False, n=1, keep_checkpoints_without_metrics=False)
            kept = managers.AnyPreservationPolicy([kept, best])
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_CountedOnly(kept, self._is_counted),
            best_fn=None if metric is None else self._value,
            cleanup_tmp_directories=True,
            todelete_subdir=REMOVED,
        )
        self._checked(lambda: self._folder.mkdir(parents=True, exist_ok=True))
        handlers = {PARAMS: ocp.PyTreeCheckpointHandler(), OPTIMIZER: ocp.PyTreeCheckpointHandler()}
        handlers |= {RUN: ocp.JsonCheckpointHandler(), IDENTITY: ocp.JsonCheckpointHandler()}
        self._manager = self._checked(
            lambda: ocp.CheckpointManager(self._folder, options=options, item_handlers=handlers)
        )
        self._foreign = {step for step in self.steps() if is_another_backends(self._folder / str(step))}
        self._damaged: set[int] = set()
        self._saved = -1
        self._delete_removed()

    def save(
        self, step: int, trainer: Mapping[str, Any], metrics: Mapping[str, float] | None = None, *, wait: bool = False
    ) -> None:
        """Write the runner's state after update number `step`, in the background unless `wait`.

        Args:
            step: updates so far.
            trainer: what JSON holds.
            metrics: of an evaluation, from which the best is chosen.
            wait: return when the checkpoint is committed.

        Raises:
            CheckpointError: an earlier save failed; earlier checkpoints are untouched.
        """
        self.wait()
        self._checked(self._keep_model)
        if step in self._damaged:
            self._checked(lambda: self._put_aside(step))
        if step in self.steps():
            return
        self._saved = step
        params, state = self._runner.stored_arrays()
        items = ocp.args.Composite(
            **{
                PARAMS: ocp.args.PyTreeSave(params),
                OPTIMIZER: ocp.args.PyTreeSave(state),
                RUN: ocp.args.JsonSave({"step": step, "trainer": dict(trainer), "metrics": dict(metrics or {})}),
                IDENTITY: ocp.args.JsonSave(self._identity()),
            }
        )
        best = None if self._policy.best_metric is None or not metrics else dict(metrics)
        if best is not None and self._policy.best_metric not in best:
            best = None
        with _silent("did not provide metrics"):  # not every checkpoint is evaluated
            self._checked(lambda: self._manager.save(step, args=items, metrics=best, force=True))
        if wait:
            self.wait()

    def steps(self) -> tuple[int, ...]:
        """The steps of all whole checkpoints, in order."""
        return tuple(sorted(self._manager.all_steps()))

    def best_step(self) -> int | None:
        """The step with the best metric, or None."""
        if self._policy.best_metric is None:
            return None
        found = {step: self._manager.metrics(step) for step in self.steps()}
        values = {step: self._value(metrics) for step, metrics in found.items() if metrics}
        return max(values, key=lambda step: values[step]) if values else None

    def restore(self, step: int | None = None) -> Mapping[str, Any]:
        """Put a checkpoint into the runner, whatever mesh and ZeRO stage wrote it, and return what the trainer gave.

        Args:
            step: None takes the newest that is whole, with a warning for each newer one that is damaged. Those are
                renamed, so that they are not counted any more and their steps can be saved again.

        Raises:
            CheckpointError: none is there, it is damaged, or it is another model's or another backend's.
        """
        self.wait()
        steps = self.steps()
        if not steps or (step is not None and step not in steps):
            raise CheckpointError(
                f"{'a checkpoint' if step is None else f'the checkpoint of step {step}'} was to be restored from "
                f"{self._folder}, but {f'it has those of {list(steps)}' if steps else 'it has none'}: use the folder "
                "and the step of a whole one."
            )
        passed_over: list[int] = []
        for candidate in (step,) if step is not None else reversed(steps):
            try:
                found = self._restore(candidate)
                for damaged in passed_over:  # only now: where nothing can be read, the files are not to blame
                    try:
                        self._put_aside(damaged)
                    except OSError as error:
                        logger.warning("%s cannot be renamed (%s)", self._folder / str(damaged), _first_line(error))
                return found
            except CheckpointError:
                raise
            except Exception as error:  # orbax and tensorstore raise many kinds for damaged files
                reason = _first_line(error)
                self._damaged.add(candidate)
                if step is not None or candidate == steps[0]:
                    raise CheckpointError(
                        f"the checkpoint {self._folder / str(candidate)} was to be restored, but its files are damaged "
                        f"({reason}): delete it and restore another."
                    ) from error
                logger.warning(
                    "the checkpoint %s is damaged (%s): the one before it is restored",
                    self._folder / str(candidate),
                    reason,
                )
                passed_over.append(candidate)
        raise AssertionError("a loop over checkpoints ended without one")

    def wait(self) -> None:
        """Wait for saves in the background.

        Raises:
            CheckpointError: one failed.
        """
        self._checked(self._manager.wait_until_finished)
        self._delete_removed()

    def close(self) -> None:
        """Wait, and release threads.

        Raises:
            CheckpointError: a save in the background failed.
        """
        try:
            self.wait()
        finally:
            self._manager.close()

    def _is_counted(self, step: int) -> bool:
        """Whether `CheckpointPolicy.keep` counts a checkpoint. Another backend's is not counted, nor one of a later
        step than the newest save: the run did not write that, or cannot read it."""
        return step <= self._saved and step not in self._foreign

    def _delete_removed(self) -> None:
        if jax.process_index() == 0:
            shutil.rmtree(self._folder / REMOVED, ignore_errors=True)

    def _put_aside(self, step: int) -> None:
        """Rename a damaged checkpoint, so that nothing is lost. All processes must call this.

        Raises:
            OSError: the folder cannot be renamed.
        """
        place = self._folder / str(step)
        try:
            if jax.process_index() == 0 and place.is_dir():
                aside, number = self._folder / f"{step}.{ASIDE}", 1
                while aside.exists():
                    number += 1
                    aside = self._folder / f"{step}.{ASIDE}-{number}"
                place.rename(aside)
        finally:
            if jax.process_count() > 1:
                multihost_utils.sync_global_devices("a damaged checkpoint is put aside")
            self._manager.reload()
        self._damaged.discard(step)

    def _restore(self, step: int) -> Mapping[str, Any]:
        if is_another_backends(self._folder / str(step)):
            raise CheckpointError(
                f"the checkpoint {self._folder / str(step)} was to be restored, but another backend wrote it: train on "
                "with that backend, or use another folder."
            )
        read = self._manager.restore
        found = read(step, args=ocp.args.Composite(**{IDENTITY: ocp.args.JsonRestore()}))[IDENTITY]
        check_identity(found, self._identity(), self._folder / str(step))
        shapes = dict(zip((PARAMS, OPTIMIZER), self._runner.stored_shapes(), strict=True))
        self._check_optimizer(step, shapes[OPTIMIZER])
        items: dict[str, Any] = {
            name: ocp.args.PyTreeRestore(tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree))
            for name, tree in shapes.items()
        }
        items[RUN] = ocp.args.JsonRestore()
        restored = read(step, args=ocp.args.Composite(**items))
        self._runner.put(restored[PARAMS], restored[OPTIMIZER], restored[RUN]["step"])
        trainer: Mapping[str, Any] = restored[RUN]["trainer"]
        return trainer

    def _check_optimizer(self, step: int, shapes: Mapping[str, Any]) -> None:
        """Refuse the state of another optimizer, or of other trained parameters."""
        stored = set(self._manager.item_metadata(step)[OPTIMIZER].tree)
        if stored != set(shapes):
            raise CheckpointError(
                f"the checkpoint {self._folder / str(step)} was to be restored, but it holds the state of another "
                "optimizer or of other trained parameters: use the run's own optimizer and trainable patterns, or "
                "another folder."
            )

    def _identity(self) -> dict[str, Any]:
        runner = self._runner
        return identity_of(runner.source.spec.model_type, runner.held.stored, runner.adapter_identity())

    def _value(self, metrics: Any) -> float:
        """What is greater for better metrics."""
        value = float(metrics[self._policy.best_metric])
        return value if self._policy.greater_is_better else -value

    def _keep_model(self) -> None:
        """Write config.json and the tokenizer's files beside the checkpoints, once."""
        folder = self._folder.parent / MODEL
        if jax.process_index() or (folder / "config.json").is_file():
            return
        model = self._runner.source
        staging = self._folder.parent / f".{MODEL}"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        (staging / "config.json").write_text(json.dumps(model.saved_config(model.dtype), indent=2, sort_keys=True))
        copy_small_files(model.files, staging)
        folder.mkdir(exist_ok=True)
        for file in sorted(staging.iterdir(), key=lambda file: file.name == "config.json"):
            file.replace(folder / file.name)
        staging.rmdir()

    def _checked(self, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except Exception as error:  # whatever stopped a save, as a full disk
            raise CheckpointError(
                f"a checkpoint was to be written to {self._folder}, but that failed ({_first_line(error)}): make room "
                "or use another folder; earlier checkpoints are whole."
            ) from error


@contextmanager
def _silent(phrase: str) -> Iterator[None]:
    """Keep warnings of orbax with this phrase from the terminal."""
    absl = logging.getLogger("absl")

    def wanted(record: logging.LogRecord) -> bool:
        return phrase not in record.getMessage()

    absl.addFilter(wanted)
    try:
        yield
    finally:
        absl.removeFilter(wanted)


class _CountedOnly(managers.PreservationPolicy):
    """A policy for the steps that count; the others stay.

    Args:
        policy: of those that count.
        counts: whether a step counts.
    """

    def __init__(self, policy: Any, counts: Callable[[int], bool]) -> None:
        self._policy, self._counts = policy, counts

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Whether each checkpoint stays."""
        counted = [one for one in checkpoints if self._counts(one.step)]
        stays = self._policy.should_preserve(counted, context=context)
        gone = {one.step for one, stay in zip(counted, stays, strict=True) if not stay}
        return [one.step not in gone for one in checkpoints]


def is_another_backends(place: Path) -> bool:
    """Whether a checkpoint's folder has JSON files where this backend's has the folder of its identity."""
    return not (place / IDENTITY).is_dir() and any(place.glob("*.json"))


def check_identity(found: Mapping[str, Any], wanted: Mapping[str, Any], place: Path) -> None:
    """Compare what checkpoints say of their model.

    Raises:
        CheckpointError: they are of another model or of another version of the format.
    """
    if found.get("format") != wanted["format"]:
        raise CheckpointError(
            f"the checkpoint {place} has format {found.get('format')!r}, but this version reads {wanted['format']}: "
            "use the version that wrote it."
        )
    ours, theirs = ({**one.get(ADAPTERS, {}), "base_path": None} for one in (wanted, found))
    if ours != theirs:
        words = {"peft_config": "another peft_config", "base": "another base model or quantization of it"}
        differ = [words.get(name, name) for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        what = f"adapters with {' and '.join(differ)}" if ADAPTERS in found else "the whole weights"
        raise CheckpointError(
            f"the checkpoint {place} was to be restored, but it holds {what}, where this run trains "
            f"{'adapters' if ADAPTERS in wanted else 'the weights'}: use that run's peft_config and base model, or "
            "another folder."
        )
    if {**found, ADAPTERS: None} != {**wanted, ADAPTERS: None}:
        raise CheckpointError(
            f"the checkpoint {place} was to be restored, but it is of another {found.get('model_type')} model, whose "
            f"parameters are not those of this {wanted['model_type']} model: use the folder of this model's run."
        )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else ''}"
