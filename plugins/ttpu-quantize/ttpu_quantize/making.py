"""Makes a quantized checkpoint, a layer at a time: weights come from the checkpoint's files, go through a method, and
leave as compressed-tensors files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ttpu_core.architecture import Architecture
from ttpu_core.checkpoint import Checkpoint
from ttpu_core.errors import RequestError
from ttpu_core.mapping import FlaxMapping
from ttpu_core.quantization.config import QuantizationConfig
from ttpu_core.quantization.rounding import round_kernel
from ttpu_core.spec.parameters import LAYERS
from ttpu_quantize import compressed_tensors as layout
from ttpu_quantize.calibrated import Calibration, LayerErrors
from ttpu_quantize.experts import with_single_experts
from ttpu_quantize.linears import Linear, Selection, select
from ttpu_quantize.output import Output, small_files
from ttpu_quantize.tensors import read_tensor, read_weights

if TYPE_CHECKING:
    Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Made:
    """What was made.

    Attributes:
        folder: the checkpoint.
        before: bytes of the original tensors.
        after: bytes of the tensors now.
        linears: number of quantized matrices.
        notes: what was not quantized, or otherwise than asked for.
        errors: the errors of each layer's products, of a calibrated method; those of a resumed run's new layers only.
    """

    folder: Path
    before: int
    after: int
    linears: int
    notes: tuple[str, ...]
    errors: tuple[LayerErrors, ...]


def make_checkpoint(
    checkpoint: Checkpoint,
    architecture: Architecture,
    config: QuantizationConfig,
    folder: Path,
    *,
    calibration: Calibration | None = None,
    progress: Progress | None = None,
) -> Made:
    """Quantize a checkpoint.

    Args:
        checkpoint: the original, not quantized.
        architecture: of the checkpoint.
        config: the format, and what stays as it is.
        folder: where the new checkpoint goes; one that an interrupted run began is finished.
        calibration: a method that needs the inputs of the products; None rounds to nearest.
        progress: called with (what, units done, units in all).

    Raises:
        RequestError: the checkpoint is quantized already, nothing in it can be, or the folder holds something else.
        UnsupportedError: the format has no layout in files.
        CheckpointError: weights cannot be read, or are not finite.
    """
    check_original(checkpoint)
    layout.check_scheme(config)
    checkpoint = with_single_experts(checkpoint, architecture)
    selection = select(architecture, checkpoint, config)
    if calibration is not None:
        selection = calibration.formatted(selection)
    mapping = architecture.mapping.suited_to(checkpoint.tensors)
    units = _units(checkpoint, mapping, architecture)
    request = {
        "source": str(checkpoint.path.resolve()),
        "tensors": {name: info.nbytes for name, info in checkpoint.tensors.items()},
        "config": config.to_dict(),
        "method": "rtn" if calibration is None else calibration.described(),
    }
    output = Output(folder, request, len(units))
    linears = {linear.stored: linear for linear in selection}
    errors: list[LayerErrors] = []
    if calibration is not None and not all(map(output.has, range(1, len(units)))):
        calibration.begin(checkpoint, architecture, mapping, selection)
    for number, names in enumerate(units):
        if progress is not None:
            progress("rest" if number == 0 else f"layer {number - 1}", number, len(units))
        layer = number - 1
        if calibration is None or number == 0:
            if not output.has(number):
                output.write(number, _rounded(checkpoint, names, linears))
        elif output.has(number):
            calibration.skip(layer, output.read(number))
        else:
            tensors, layer_errors = calibration.quantize(layer, names)
            output.write(number, tensors)
            errors.append(layer_errors)
    if progress is not None:
        progress("done", len(units), len(units))
    after = output.finish(_config(checkpoint, selection), small_files(checkpoint.path))
    return Made(folder, checkpoint.total_bytes, after, len(linears), selection.notes, tuple(errors))


def check_original(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that is quantized already.

    Raises:
        RequestError: it is.
    """
    if checkpoint.config.get("quantization_config"):
        raise RequestError(
            f"{checkpoint.source} was to be quantized, but its config.json says that it is already: start from the "
            "original checkpoint."
        )


def _rounded(checkpoint: Checkpoint, names: list[str], linears: Mapping[str, Linear]) -> dict[str, np.ndarray]:
    """The tensors of a unit, matrices rounded to nearest one at a time, the others as they are."""
    tensors: dict[str, np.ndarray] = {}
    for name in names:
        info = checkpoint.tensors[name]
        linear = linears.get(name)
        if linear is None:
            tensors[name] = read_tensor(info)
        else:
            tensors |= layout.stored_tensors(linear, round_kernel(read_weights(info), linear.form))
    return tensors


def _units(checkpoint: Checkpoint, mapping: FlaxMapping, architecture: Architecture) -> list[list[str]]:
    """Names of tensors in the files: those of no layer, then those of each layer."""
    layers: dict[str, int] = {}
    for path, rule in mapping.rules:
        if path.startswith(LAYERS):
            layers |= {leaf.name: int(path.split(".", 2)[1]) for leaf in rule.leaves()}
    stored = {actual: name for name, actual in mapping.canonical(checkpoint.tensors).items()}
    units: list[list[str]] = [[] for _ in range(1 + len(architecture.spec.layers))]
    for actual in checkpoint.tensors:
        units[1 + layers.get(stored.get(actual, ""), -1)].append(actual)
    return units


def _config(checkpoint: Checkpoint, selection: Selection) -> dict[str, Any]:
    """The content of the new config.json."""
    quantized = {linear.stored for linear in selection}
    ignored = ["lm_head"] if not any(linear.module == "lm_head" for linear in selection) else []
    ignored += [
        name.removesuffix(".weight")
        for name, info in checkpoint.tensors.items()
        if name.endswith(".weight") and len(info.shape) > 1 and name not in quantized and "embed" not in name
    ]
    config: dict[str, Any] = json.loads((checkpoint.path / "config.json").read_text())
    config["quantization_config"] = layout.quantization_config(selection, ignored)
    return config
