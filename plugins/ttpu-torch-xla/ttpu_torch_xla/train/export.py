"""Writes weights as a Hugging Face checkpoint: of a runner, or of a run's checkpoint without devices."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ttpu_core.errors import CheckpointError, RequestError
from ttpu_torch_xla.load import TORCH_DTYPES
from ttpu_torch_xla.train.checkpoints import DAMAGED, MODEL, WEIGHTS, read_run, steps_in


def write(model: Any, folder: Path, state: Mapping[str, torch.Tensor], dtype: str) -> None:
    """Write a checkpoint.

    Args:
        model: whose class and config are written; its weights are not looked at.
        folder: of the checkpoint.
        state: the weights on the host, by the model's names. Tensors that are one here are written once.
        dtype: of the written weights.
    """
    kind = TORCH_DTYPES[dtype]
    cast: dict[int, torch.Tensor] = {}
    for one in state.values():
        if id(one) not in cast:
            cast[id(one)] = one.to(kind) if one.is_floating_point() else one
    model.save_pretrained(folder, state_dict={name: cast[id(one)] for name, one in state.items()})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n")


def export_checkpoint(folder: Path, out: Path, *, step: int | None, dtype: str, merge: bool = False) -> int:
    """Write the weights of a run's checkpoint; return its step.

    Args:
        folder: of the run's checkpoints, beside which the run keeps its model's config and tokenizer.
        out: the folder of the Hugging Face checkpoint.
        step: which checkpoint; None takes the newest.
        dtype: of the written weights.
        merge: of a run of adapters, which this backend has none of.

    Raises:
        CheckpointError: no whole checkpoint is there.
        RequestError: `merge`.
    """
    import transformers

    if merge:
        raise RequestError(
            f"{folder} was to be exported with merge, but a run on the torch_xla backend trains the weights and no "
            "adapters: leave --merge out."
        )
    folder = folder.resolve()
    steps, kept = steps_in(folder), folder.parent / MODEL
    if not steps or (step is not None and step not in steps) or not (kept / "config.json").is_file():
        raise CheckpointError(
            f"{'the newest checkpoint' if step is None else f'the checkpoint of step {step}'} of {folder} was to be "
            f"exported, but {f'there are those of {list(steps)}' if steps else 'there is none'}: use the folder and "
            "the step of a whole one, with the folder `model` beside it."
        )
    chosen = steps[-1] if step is None else step
    place = folder / str(chosen)
    try:
        read_run(place)
        state = load_file(place / WEIGHTS)
    except DAMAGED as error:
        raise CheckpointError(
            f"the checkpoint {place} was to be exported, but its files are damaged ({type(error).__name__}): export "
            "another step."
        ) from error
    config = transformers.AutoConfig.from_pretrained(kept)
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    write(model, out, state, dtype)
    for file in kept.iterdir():
        if file.name != "config.json":
            shutil.copy2(file, out / file.name)
    return chosen
