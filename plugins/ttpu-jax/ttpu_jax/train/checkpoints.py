"""The arrays of a run's checkpoints, written by orbax: master weights and optimizer state, without padding and with
layers stacked, so that every mesh and every stage of ZeRO reads them. `ttpu_train.checkpoints` commits them."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orbax.checkpoint as ocp

from ttpu_core.errors import CheckpointError
from ttpu_core.spec import Parameter
from ttpu_jax.params.export import copy_small_files

if TYPE_CHECKING:
    from ttpu_jax.train.runner import JaxTrainRunner

PARAMS, OPTIMIZER = "params", "optimizer"
"""The folders of a checkpoint that hold arrays."""
ADAPTERS = "adapters"
"""What the identity says of adapters: see `ttpu_jax.train.adapter_files.identity_of_adapters`."""
HEAD = "head"
"""Where the identity says that a score head takes the place of a language model head."""


def identity_of(
    model_type: str, table: Mapping[str, Parameter], adapters: Mapping[str, Any] | None = None, head: str | None = None
) -> dict[str, Any]:
    """What says whose checkpoint it is: the model's parameters without padding, the adapters if these are trained, and
    the head if that is not a language model's."""
    shapes = {path: list(parameter.shape) for path, parameter in table.items()}
    digest = hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest()
    found: dict[str, Any] = {"model_type": model_type, "parameters": digest}
    found |= {} if adapters is None else {ADAPTERS: dict(adapters)}
    return found if head is None else {**found, HEAD: head}


LOGGERS = ("absl", "asyncio")
"""The loggers that tell of a failed save."""


def _is_shown(record: logging.LogRecord) -> bool:
    """False for the tracebacks of a failed save, whose error is raised too."""
    message = record.getMessage()
    left = "exception was never retrieved" in message and ("orbax" in message or "OCDBT" in message)  # other writes
    return not (left or "background save thread" in message or "_SignalingThread.run() raised" in message)


@cache
def pass_over_closed_loops() -> None:
    """Show no traceback, from now on, of writes that end after the event loop of a failed save."""
    before = sys.unraisablehook

    def tell(found: Any) -> None:
        if found.object is not None or str(found.exc_value) != "Event loop is closed":
            before(found)

    sys.unraisablehook = tell


class OrbaxFiles:
    """See `ttpu_train.runner.CheckpointFiles`.

    Args:
        runner: whose state is written and read.
    """

    backend = "jax"

    def __init__(self, runner: JaxTrainRunner) -> None:
        self._runner = runner
        self._opened: ocp.AsyncCheckpointer | None = None

    def identity(self) -> dict[str, Any]:
        """What says whose checkpoint it is."""
        runner = self._runner
        return identity_of(runner.source.spec.model_type, runner.held.stored, runner.adapter_identity(), runner.head)

    def check(self, found: Mapping[str, Any], place: Path) -> None:
        """Compare the identity that a checkpoint has with the runner's.

        Raises:
            CheckpointError: the checkpoint is another model's or other adapters'.
        """
        check_identity(found, self.identity(), place)

    def state_names(self) -> Iterable[str]:
        """The names of the optimizer's arrays."""
        return self._runner.stored_shapes()[1]

    def write(self, place: Path) -> Callable[[], None]:
        """Copy the arrays to the host, and write them into a new folder in the background; return what waits for all
        processes."""
        params, state = self._runner.stored_arrays()
        items = {PARAMS: ocp.args.PyTreeSave(params), OPTIMIZER: ocp.args.PyTreeSave(state)}
        orbax = self._orbax()
        orbax.save(place, args=ocp.args.Composite(**items))
        return orbax.wait_until_finished

    def read(self, place: Path, step: int) -> None:
        """Put the arrays of a checkpoint after update number `step` into the runner."""
        shapes = dict(zip((PARAMS, OPTIMIZER), self._runner.stored_shapes(), strict=True))
        items = {
            name: ocp.args.PyTreeRestore(tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree))
            for name, tree in shapes.items()
        }
        self._runner.release()
        restored = self._orbax().restore(place, args=ocp.args.Composite(**items))
        self._runner.put(restored[PARAMS], restored[OPTIMIZER], step)

    def write_model(self, folder: Path) -> None:
        """Write config.json and the tokenizer's files."""
        model = self._runner.source
        (folder / "config.json").write_text(json.dumps(model.saved_config(model.dtype), indent=2, sort_keys=True))
        copy_small_files(model.files, folder)

    def close(self) -> None:
        """Release orbax's threads."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None
            for name in LOGGERS:
                logging.getLogger(name).removeFilter(_is_shown)

    def _orbax(self) -> ocp.AsyncCheckpointer:
        if self._opened is None:
            for name in LOGGERS:
                logging.getLogger(name).addFilter(_is_shown)
            pass_over_closed_loops()
            handlers = {PARAMS: ocp.PyTreeCheckpointHandler(), OPTIMIZER: ocp.PyTreeCheckpointHandler()}
            self._opened = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(**handlers))
        return self._opened


def check_identity(found: Mapping[str, Any], wanted: Mapping[str, Any], place: Path) -> None:
    """Compare what checkpoints say of their model.

    Raises:
        CheckpointError: they are of another model or of other adapters.
    """
    if found.get(HEAD) != wanted.get(HEAD):
        kinds = ["a reward model" if HEAD in one else "a language model" for one in (found, wanted)]
        raise CheckpointError(
            f"the checkpoint {place} was to be restored, but it is of {kinds[0]}, and this run trains {kinds[1]}: use "
            "that run's method, or another folder."
        )
    ours, theirs = (_adapters_of(one) for one in (wanted, found))
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


def _adapters_of(identity: Mapping[str, Any]) -> dict[str, Any]:
    """What has to be equal of adapters. Which modules they are of is in `modules`, however peft finds them."""
    adapters = identity.get(ADAPTERS, {})
    config = {**adapters.get("peft_config", {}), "target_modules": None}
    return {**adapters, "base_path": None, "files": None, "peft_config": config}
