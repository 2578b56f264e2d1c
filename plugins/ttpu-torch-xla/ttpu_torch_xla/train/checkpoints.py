"""The arrays of a run's checkpoints on torch_xla, as safetensors: weights and optimizer state. `ttpu_train.checkpoints`
commits them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from ttpu_core.errors import CheckpointError

if TYPE_CHECKING:
    from ttpu_torch_xla.train.runner import TorchXlaTrainRunner

WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.safetensors"


def identity_of(model_type: str, shapes: Mapping[str, Any]) -> dict[str, Any]:
    """What says whose checkpoint it is: the model and its parameters."""
    table = {name: list(shape) for name, shape in shapes.items()}
    digest = hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
    return {"model_type": model_type, "parameters": digest}


def check_identity(found: Mapping[str, Any], wanted: Mapping[str, Any], place: Path) -> None:
    """Compare what checkpoints say of their model.

    Raises:
        CheckpointError: they are of another model.
    """
    if found != wanted:
        raise CheckpointError(
            f"the checkpoint {place} was to be read, but it is of another {found.get('model_type')} model, whose "
            f"parameters are not those of this {wanted['model_type']} model: use the folder of this model's run."
        )


class SafetensorsFiles:
    """See `ttpu_train.runner.CheckpointFiles`.

    Args:
        runner: whose state is written and read.
    """

    backend = "torch_xla"

    def __init__(self, runner: TorchXlaTrainRunner) -> None:
        self._runner = runner

    def identity(self) -> dict[str, Any]:
        """What says whose checkpoint it is."""
        weights, _ = self._runner.stored_tensors()
        shapes = {name: tuple(one.shape) for name, one in weights.items()}
        return identity_of(str(self._runner.source.config.model_type), shapes)

    def check(self, found: Mapping[str, Any], place: Path) -> None:
        """Compare the identity that a checkpoint has with the runner's.

        Raises:
            CheckpointError: the checkpoint is another model's.
        """
        check_identity(found, self.identity(), place)

    def state_names(self) -> Iterable[str]:
        """The names of the optimizer's tensors."""
        return self._runner.stored_tensors()[1].keys()

    def write(self, place: Path) -> Callable[[], None]:
        """Copy weights and optimizer state to the host, and return what writes them into a new folder."""
        weights, state = self._runner.stored_tensors()
        whole = self._runner.source.ttpu.runtime.fetch([*weights.values(), *state.values()])
        files: dict[str, dict[str, torch.Tensor]] = {
            WEIGHTS: dict(zip(weights, whole, strict=False)),
            OPTIMIZER: dict(zip(state, whole[len(weights) :], strict=True)),
        }

        def finish() -> None:
            place.mkdir()
            for name, tensors in files.items():
                save_file(tensors, place / name)

        return finish

    def read(self, place: Path, step: int) -> None:
        """Put the tensors of a checkpoint after update number `step` into the runner."""
        self._runner.put(load_file(place / WEIGHTS), load_file(place / OPTIMIZER), step)

    def write_model(self, folder: Path) -> None:
        """Write config and tokenizer."""
        model = self._runner.source
        model.config.save_pretrained(folder)
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(written | {"architectures": [type(model).__name__]}, indent=2))
        model.generation_config.save_pretrained(folder)
        if model.ttpu.tokenizer is not None:
            model.ttpu.tokenizer.save_pretrained(str(folder))

    def close(self) -> None:
        """Nothing is held."""
