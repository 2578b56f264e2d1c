"""Writes the checkpoint of a training run as a Hugging Face checkpoint, on the host, without the devices of the run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from ttpu_core.config import ModelConfig
from ttpu_core.errors import CheckpointError, RequestError
from ttpu_core.mapping import FlaxMapping, Tensor, stack_layers
from ttpu_core.registry import default_registry
from ttpu_core.spec.parameters import stacked_parameters
from ttpu_jax.params.dtypes import model_dtype
from ttpu_jax.params.export import save_checkpoint
from ttpu_jax.train.adapter_files import merged_tensors, write_adapter
from ttpu_jax.train.checkpoints import ADAPTERS, IDENTITY, MODEL, PARAMS, check_identity, identity_of


def export_checkpoint(folder: Path, out: Path, *, step: int | None, dtype: str, merge: bool = False) -> int:
    """Write the weights of a run's checkpoint, or its adapters in peft's format; return its step.

    Args:
        folder: of the run's checkpoints, beside which the run keeps its model's config and tokenizer.
        out: the folder of the Hugging Face checkpoint.
        step: which checkpoint; None takes the newest.
        dtype: of the written weights.
        merge: write the base model with the adapters merged.

    Raises:
        CheckpointError: no whole checkpoint is there.
        RequestError: `merge` for a run that trained the weights.
    """
    folder = folder.resolve()
    steps = sorted(int(one.name) for one in folder.iterdir() if one.name.isdigit()) if folder.is_dir() else []
    model = folder.parent / MODEL
    if not steps or (step is not None and step not in steps) or not (model / "config.json").is_file():
        raise CheckpointError(
            f"{'the newest checkpoint' if step is None else f'the checkpoint of step {step}'} of {folder} was to be "
            f"exported, but {f'there are those of {steps}' if steps else 'there is none'}: use the folder and the step "
            "of a whole one, with the folder `model` beside it."
        )
    chosen = steps[-1] if step is None else step
    config = json.loads((model / "config.json").read_text())
    architecture = default_registry().architecture(ModelConfig.from_dict(config))
    table, kind = stacked_parameters(architecture.spec), model_dtype(dtype)
    place = folder / str(chosen)
    if not (place / IDENTITY).is_dir() and any(place.glob("*.json")):
        raise CheckpointError(
            f"the checkpoint {place} was to be exported, but another backend wrote it: name that with --backend."
        )
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        try:
            identity = json.loads((place / IDENTITY / "metadata").read_text())
            adapters = identity.get(ADAPTERS)
            stored = table if adapters is None else [*adapters["modules"], *adapters["whole"]]
            restore = ocp.RestoreArgs(restore_type=np.ndarray)
            shapes = {path: np.empty(0, np.float32) for path in stored}
            arguments = ocp.args.PyTreeRestore(shapes, restore_args=dict.fromkeys(stored, restore))
            check_identity(identity, identity_of(architecture.spec.model_type, table, adapters), place)
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
                params = reader.restore(place / PARAMS, args=arguments)
        except CheckpointError:
            raise
        except Exception as error:  # orbax and tensorstore raise many kinds for damaged files
            raise CheckpointError(
                f"the checkpoint {place} was to be exported, but its files are damaged ({type(error).__name__}): "
                "export another step."
            ) from error
        if adapters is not None:
            arrays = {path: np.asarray(value, np.float32) for path, value in params.items()}
            if not merge:
                write_adapter(out, adapters, arrays, architecture, kind)
                for pattern in ("*token*", "chat_template*"):
                    for file in model.glob(pattern):
                        shutil.copyfile(file, out / file.name)
                return chosen
            params = {name: one.astype(kind) for name, one in merged_tensors(adapters, arrays, architecture)}
            rules = tuple((name, Tensor(name, value.shape)) for name, value in params.items())
            save_checkpoint(out, FlaxMapping(rules), params, {**config, "dtype": kind.name}, model)
            return chosen
        if merge:
            raise RequestError(
                f"{folder} was to be exported with merge, but that run trained the weights and no adapters: leave "
                "--merge out."
            )
        for path in table:
            params[path] = np.asarray(params[path]).astype(kind)
        config["dtype"] = kind.name
        save_checkpoint(out, stack_layers(architecture.mapping, architecture.spec), params, config, model)
    return chosen
