"""Writes weights as a Hugging Face checkpoint: of a runner, or of a run's checkpoint without devices."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ttpu_core.errors import CheckpointError, RequestError
from ttpu_torch_xla.load import TORCH_DTYPES
from ttpu_torch_xla.train.checkpoints import WEIGHTS, check_identity, identity_of

MODEL = "model"
"""The folder of a checkpoint with config and tokenizer."""


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


def export_checkpoint(
    place: Path, out: Path, *, identity: Mapping[str, Any], dtype: str, merge: bool = False
) -> None:
    """Write the weights of a run's checkpoint.

    Args:
        place: the checkpoint's folder, in which `model` holds config and tokenizer.
        out: the folder of the Hugging Face checkpoint.
        identity: whose checkpoint it is.
        dtype: of the written weights.
        merge: of a run of adapters, which this backend has none of.

    Raises:
        CheckpointError: its files are damaged, or its config is another model's.
        RequestError: `merge`.
    """
    import transformers

    if merge:
        raise RequestError(
            f"{place} was to be exported with merge, but a run on the torch_xla backend trains the weights and no "
            "adapters: leave --merge out."
        )
    try:
        state = load_file(place / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the checkpoint {place} was to be exported, but its files are damaged ({type(error).__name__}): export "
            "another step."
        ) from error
    kept = place / MODEL
    config = transformers.AutoConfig.from_pretrained(kept)
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    shapes = {name: one.shape for name, one in model.state_dict().items()}
    check_identity(identity, identity_of(config.model_type, {name: shapes.get(name, ()) for name in state}), place)
    write(model, out, state, dtype)
    for file in kept.iterdir():
        if file.name != "config.json":
            shutil.copy2(file, out / file.name)
