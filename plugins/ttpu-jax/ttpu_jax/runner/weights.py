"""Replaces the weights of a running engine in place, as reinforcement learning does between rollouts. New weights come
from a directory of safetensors files, or as arrays by transformers' tensor names. All of them are checked before the
first is replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ttpu_core.checkpoint import open_checkpoint
from ttpu_core.checkpoint.header import TensorInfo, TensorReader, read_header
from ttpu_core.errors import CheckpointError, MappingError, RequestError
from ttpu_core.mapping import FlaxMapping, gather
from ttpu_jax.params.dtypes import stored_dtype
from ttpu_jax.params.load import aligned_empty

Shape = tuple[int, ...]
Read = Callable[[str], np.ndarray]


class Weights(Protocol):
    """The parameters to replace."""

    def weight(self, path: str) -> tuple[Shape, np.dtype[Any]]:
        """Shape and dtype of a parameter."""
        ...

    def replace_weight(self, path: str, value: np.ndarray) -> None:
        """Replace a parameter. value: a host array of the same shape and dtype as the parameter."""
        ...


@dataclass(frozen=True)
class ServedWeights:
    """The tensor names of a served model's weights, and the other holders of its arrays.

    mapping: the checkpoint's tensors → parameters, padded as the model's are.
    shared: the loaded model's own dictionary of arrays, in which replaced arrays are replaced too.
    """

    mapping: FlaxMapping
    shared: dict[str, Any]


@contextmanager
def opened_update(
    held: Weights, mapping: FlaxMapping, weights: str | Path | Mapping[str, Any]
) -> Iterator[Callable[[], None]]:
    """Open new weights, all or some, as a context manager, and check them. It yields a function that replaces the old
    weights, one parameter at a time.

    Args:
        held: the parameters, awake or asleep.
        mapping: see `ServedWeights`.
        weights: a directory (of a checkpoint, or of safetensors files alone), or tensor name → numpy, jax or torch
            array. Names and shapes are those of the model's checkpoint; dtypes are converted to the model's. Tensors
            that the engine keeps in one array (queries, keys and values; gate and up; experts) come together.

    Raises:
        RequestError: no directory, or nothing to update.
        MappingError: tensors that the model does not have, or has in other shapes, or that miss others.
        CheckpointError: a file is damaged, or a tensor is not floating point.
    """
    with _opened(weights) as (source, shapes, read):
        names, asked = _asked(mapping, shapes, source)

        def replace() -> None:
            for done, path in enumerate(asked):
                shape, dtype = held.weight(path)
                value = aligned_empty(shape, dtype)
                try:
                    gather(mapping[path], lambda name: read(names[name]), value)
                except CheckpointError as error:
                    raise CheckpointError(
                        f"{error} {done} of {len(asked)} parameters had been replaced by then: update them again."
                    ) from error
                held.replace_weight(path, value)

        yield replace


def _asked(mapping: FlaxMapping, shapes: Mapping[str, Shape], source: str) -> tuple[dict[str, str], list[str]]:
    """The mapping's tensor names → the source's, and the parameters that they make.

    Raises:
        RequestError, MappingError: as `opened_update`.
    """
    found = mapping.canonical(shapes)
    touched = [(path, rule) for path, rule in mapping.rules if any(leaf.name in found for leaf in rule.leaves())]
    if not touched:
        raise RequestError(
            f"weights were to be updated from {source}, but it holds no tensor of this model: give names as "
            "transformers saves them."
        )
    for path, rule in touched:
        missing = sorted({leaf.name for leaf in rule.leaves() if leaf.name not in found})
        if missing:
            given = next(leaf.name for leaf in rule.leaves() if leaf.name in found)
            more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
            raise MappingError(
                f"{source} holds {given!r} without {', '.join(map(repr, missing[:4]))}{more}, but the engine keeps "
                f"them in one array ({path}): give all of them."
            )
    part = FlaxMapping(tuple(touched), mapping.tied, mapping.ignored, mapping.prefixes)
    return part.resolve(shapes, source), [path for path, _ in touched]


@contextmanager
def _opened(weights: str | Path | Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Shape], Read]]:
    """What to call it, tensor name → shape, and what reads one."""
    if isinstance(weights, Mapping):
        _check_arrays(weights)
        yield "the update", {name: tuple(array.shape) for name, array in weights.items()}, lambda n: _array(weights[n])
        return
    if not isinstance(weights, str | Path):
        raise RequestError(
            f"weights were to be updated from {weights!r}, but a directory, or a mapping from names of tensors to "
            "arrays, is needed: pass one of them."
        )
    path = Path(weights)
    tensors = _stored(path)
    dtypes = {name: stored_dtype(info.dtype, name) for name, info in tensors.items()}
    with TensorReader() as reader:

        def read(name: str) -> np.ndarray:
            value = np.empty(tensors[name].shape, dtypes[name])
            if value.size:
                reader.read_into(tensors[name], value.reshape(-1).view(np.uint8).data)
            return value

        yield str(path), {name: info.shape for name, info in tensors.items()}, read


def _stored(path: Path) -> dict[str, TensorInfo]:
    if (path / "config.json").is_file():
        return dict(open_checkpoint(path).tensors)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise RequestError(
            f"weights were to be updated from {str(path)!r}, but no safetensors files are there: pass a directory that "
            "has some."
        )
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in read_header(file).tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"{path} holds the tensor {name!r} in {tensors[name].file.name} and in {file.name}: remove one."
                )
            tensors[name] = info
    return tensors


def _check_arrays(weights: Mapping[str, Any]) -> None:
    for name, array in weights.items():
        dtype = str(getattr(array, "dtype", type(array).__name__))
        if "float" not in dtype or not hasattr(array, "shape"):
            raise CheckpointError(
                f"the update gives {name!r} as {dtype}, but arrays of floating point are needed: convert it."
            )


def _array(value: Any) -> np.ndarray:
    if hasattr(value, "detach"):  # torch, whose bfloat16 numpy does not know
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
    return np.asarray(value)
