"""Writes the checkpoint of a training run as a Hugging Face checkpoint, on the host, without the devices of the run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp

from ttpu_core.config import ModelConfig
from ttpu_core.errors import CheckpointError, RequestError
from ttpu_core.mapping import FlaxMapping, Tensor, stack_layers
from ttpu_core.registry import default_registry
from ttpu_core.spec.parameters import stacked_parameters
from ttpu_jax.params.dtypes import model_dtype
from ttpu_jax.params.export import Deferred, save_checkpoint
from ttpu_jax.train.adapter_files import merged_tensors, write_adapter
from ttpu_jax.train.checkpoints import ADAPTERS, HEAD, PARAMS, check_identity, identity_of
from ttpu_jax.train.objectives.reward import SCORE
from ttpu_jax.train.score_head import with_score, without_head

MODEL = "model"
"""The folder of a checkpoint with config and tokenizer."""


def export_checkpoint(
    place: Path, out: Path, *, identity: Mapping[str, Any], dtype: str, merge: bool = False
) -> None:
    """Write the weights of a run's checkpoint, or its adapters in peft's format. Accelerators are left to others: a
    process that has not used JAX yet has the CPU only from now on.

    Args:
        place: the checkpoint's folder, in which `model` holds config and tokenizer.
        out: the folder of the Hugging Face checkpoint.
        identity: whose checkpoint it is.
        dtype: of the written weights.
        merge: write the base model with the adapters merged.

    Raises:
        CheckpointError: its files are damaged, or its config is another model's.
        RequestError: `merge` for a run that trained the weights.
    """
    model = place / MODEL
    config = json.loads((model / "config.json").read_text())
    architecture, head = default_registry().architecture(ModelConfig.from_dict(config)), identity.get(HEAD)
    if head is not None:
        architecture = without_head(architecture)
    table, kind = stacked_parameters(architecture.spec), model_dtype(dtype)
    jax.config.update("jax_platforms", "cpu")  # does nothing in a process that has used JAX already
    with jax.default_device(jax.local_devices(backend="cpu")[0]), Parameters(place) as stored:
        adapters = identity.get(ADAPTERS)
        check_identity(identity, identity_of(architecture.spec.model_type, table, adapters, head), place)
        if adapters is not None:
            arrays = {path: stored.read(path) for path in (*adapters["modules"], *adapters["whole"])}
            if not merge:
                beside = [file for pattern in ("*token*", "chat_template*") for file in model.glob(pattern)]
                write_adapter(out, adapters, arrays, architecture, kind, beside)
                return
            merged = merged_tensors(adapters, arrays, architecture, kind)
            rules = tuple((name, Tensor(name, value.shape)) for name, value in merged.items())
            save_checkpoint(out, FlaxMapping(rules), merged, {**config, "dtype": kind.name}, model)
            return
        if merge:
            raise RequestError(
                f"{place} was to be exported with merge, but that run trained the weights and no adapters: leave "
                "--merge out."
            )
        params = {
            path: Deferred(parameter.shape, kind, partial(stored.read, path)) for path, parameter in table.items()
        }
        mapping = stack_layers(architecture.mapping, architecture.spec)
        if head is not None:
            params[SCORE] = Deferred((1, architecture.spec.embedding.features), kind, partial(stored.read, SCORE))
            mapping = with_score(mapping, architecture.spec)
        config["dtype"] = kind.name
        save_checkpoint(out, mapping, params, config, model)


class Parameters:
    """The parameters of one checkpoint, read one at a time.

    Args:
        place: the checkpoint's folder.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self._reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def read(self, path: str) -> np.ndarray:
        """The parameter [...] at a stacked path, or an adapter's array by its name; float32.

        Raises:
            CheckpointError: its files are damaged.
        """
        arguments = ocp.args.PyTreeRestore(
            {path: np.empty(0, np.float32)},
            restore_args={path: ocp.RestoreArgs(restore_type=np.ndarray)},
            partial_restore=True,
        )
        with self._whole():
            return np.asarray(self._reader.restore(self._place / PARAMS, args=arguments)[path], np.float32)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # orbax and tensorstore raise many kinds for damaged files
            raise CheckpointError(
                f"the checkpoint {self._place} was to be exported, but its files are damaged ({type(error).__name__}): "
                "export another step."
            ) from error
