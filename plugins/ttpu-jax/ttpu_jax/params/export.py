"""Writes parameters as a Hugging Face checkpoint. The mapping through which they were read gives the checkpoint's
own names, shapes and values, so that `transformers` loads the safetensors files."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from safetensors.numpy import save_file

from ttpu_core.checkpoint import INDEX, WEIGHTS
from ttpu_core.errors import RequestError
from ttpu_core.files import writing_model
from ttpu_core.mapping import FlaxMapping, Tensor, scatter

MAX_SHARD_BYTES = 5 * 10**9
PROBE = ".probe"
"""The name of an empty file whose permissions follow from the umask."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf")


@dataclass(frozen=True)
class Deferred:
    """An array that is read when it is written.

    Args:
        shape: of the array.
        dtype: what it is written in.
        read: returns the array [*shape], in any dtype.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes of what is written."""
        return math.prod(self.shape) * self.dtype.itemsize


def export_tensors(
    mapping: FlaxMapping, parameters: Mapping[str, jax.Array | np.ndarray | Deferred]
) -> dict[str, np.ndarray]:
    """Every checkpoint tensor by name, on the host. All processes must call this, and each gets all tensors.

    Padded parameters need the mapping of `ttpu_core.mapping.pad_mapping`, which removes the padding."""
    tensors: dict[str, np.ndarray] = {}
    for path, rule in mapping.rules:
        value = on_host(parameters[path])

        def buffer(leaf: Tensor, dtype: np.dtype[Any] = value.dtype) -> np.ndarray:
            if leaf.name not in tensors:
                tensors[leaf.name] = np.empty(leaf.shape, dtype)
            return tensors[leaf.name]

        scatter(rule, value, buffer)
        del value  # before the next one is read
    return tensors


def save_checkpoint(
    directory: str | Path,
    mapping: FlaxMapping,
    parameters: Mapping[str, jax.Array | np.ndarray | Deferred],
    config: dict[str, Any],
    source: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write config, weights, and the other small files of `source` (tokenizer, generation config).

    All files are written to a temporary folder and then renamed into place, the index last, so that an interrupted
    save leaves an earlier checkpoint readable. Only one file's tensors are on the host at a time. All processes must
    call this: the first one writes, and the others return when it has finished.

    Args:
        directory: the checkpoint's folder.
        mapping: the mapping through which the parameters were read.
        parameters: Flax path → array, or what reads it.
        config: the content of config.json.
        source: the checkpoint whose small files are copied, or None.
        max_shard_bytes: the largest size of one safetensors file.

    Raises:
        RequestError: `directory` is a file, or cannot be made.
        CheckpointError: a file cannot be written, as on a full disk.
    """
    if not isinstance(directory, str | PathLike):
        raise RequestError(f"a checkpoint was to be saved in {directory!r}, but a directory is needed: pass one.")
    target = Path(directory)
    if target.exists() and not target.is_dir():
        raise RequestError(f"a checkpoint was to be saved in {target}, but that is a file: pass a directory.")
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(
            f"a checkpoint was to be saved in {target}, but that directory cannot be made ({error.strerror}): pass "
            "another one."
        ) from error
    shards = _shards(mapping, parameters, max_shard_bytes)
    parts = [FlaxMapping(tuple((path, mapping[path]) for path in paths)) for paths in shards]
    if jax.process_index() > 0:
        for part in parts:  # the first process gathers these shards
            for path, _ in part.rules:
                on_host(parameters[path])
        wait_for_all()
        return target
    names = (
        [WEIGHTS]
        if len(shards) == 1
        else [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    )
    with writing_model(target), staging_folder(target) as staging:
        placed: dict[str, str] = {}
        total = 0
        for file, part in zip(names, parts, strict=True):
            tensors = export_tensors(part, parameters)
            save_file(tensors, staging / file, metadata={"format": "pt"})
            placed |= dict.fromkeys(tensors, file)
            total += sum(tensor.nbytes for tensor in tensors.values())
        (staging / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        if len(names) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
            (staging / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        copy_small_files(source, staging)
    with writing_model(target):
        _remove_stale_weights(target, {*names, INDEX} if len(names) > 1 else set(names))
    wait_for_all()
    return target


@contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """A temporary folder in `target`, whose files are renamed into `target` one by one, in the order of their names,
    when all are written. An error before that deletes them and leaves `target` as it was. An interruption of the
    renaming leaves files of both there."""
    with tempfile.TemporaryDirectory(dir=target, prefix=".saving-") as name:
        staging = Path(name)
        (staging / PROBE).touch()
        mode = (staging / PROBE).stat().st_mode
        (staging / PROBE).unlink()
        yield staging
        for file in sorted(staging.iterdir()):
            file.chmod(mode)  # safetensors creates files that only their owner can read: apply the umask
            file.replace(target / file.name)


def on_host(array: jax.Array | np.ndarray | Deferred) -> np.ndarray:
    """The whole array [...], including parts that other processes hold."""
    if isinstance(array, Deferred):
        return array.read().astype(array.dtype, copy=False)
    if isinstance(array, np.ndarray):
        return array
    if array.is_fully_addressable:
        return np.asarray(jax.device_get(array))
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def wait_for_all() -> None:
    """Wait until all processes have come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("a checkpoint is saved")


def _shards(
    mapping: FlaxMapping, parameters: Mapping[str, jax.Array | np.ndarray | Deferred], limit: int
) -> list[list[str]]:
    """Parameter paths per file. Parameters that share a checkpoint tensor stay together, and files stay below the
    limit."""
    together: dict[str, list[str]] = defaultdict(list)
    first_owner: dict[str, str] = {}
    for path, rule in mapping.rules:
        owners = {first_owner[leaf.name] for leaf in rule.leaves() if leaf.name in first_owner}
        owner = min(owners) if owners else path
        for leaf in rule.leaves():
            first_owner.setdefault(leaf.name, owner)
        together[owner].append(path)
    shards: list[list[str]] = [[]]
    used = 0
    for paths in together.values():
        nbytes = sum(parameters[path].nbytes for path in paths)
        if shards[-1] and used + nbytes > limit:
            shards.append([])
            used = 0
        shards[-1].extend(paths)
        used += nbytes
    return shards


def copy_small_files(source: Path | None, staging: Path) -> None:
    """Copy the files of a checkpoint that hold no weights, and are not in `staging` yet: tokenizer, generation config.
    """
    if source is None:
        return
    for file in sorted(source.iterdir()):
        is_weights = file.suffix in WEIGHT_SUFFIXES or file.name.endswith(".index.json")
        if file.is_file() and not is_weights and not file.name.startswith(".") and not (staging / file.name).exists():
            shutil.copyfile(file, staging / file.name)


def _remove_stale_weights(target: Path, current: set[str]) -> None:
    """Remove weight files of an earlier save that the new one does not name. A reader would mix them up."""
    for file in target.glob("model*.safetensors*"):
        if file.name not in current:
            file.unlink()
