"""An architecture with the formats of a checkpoint that is quantized already: those of its files, or, where only its
config.json is there, those that the config announces."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ttpu_core.checkpoint import dtype_in_config
from ttpu_core.quantization.announced import announced, unannounced
from ttpu_core.quantization.config import QuantizationConfig
from ttpu_core.quantization.mapping import common_format, formats_of
from ttpu_core.quantization.quantize import HEAD, is_matrix, why_dense
from ttpu_core.quantization.schemes import open_quantized, quantization_of
from ttpu_core.spec.kernel_format import KernelFormat

if TYPE_CHECKING:
    from ttpu_core.architecture import Architecture
    from ttpu_core.checkpoint import Checkpoint
    from ttpu_core.config import ModelConfig

LINEAR = QuantizationConfig(lm_head=True)
"""What quantized checkpoints hold at most: kernels of layers, and the head."""


def stored_architecture(
    architecture: Architecture, config: ModelConfig, checkpoint: Checkpoint | None = None
) -> Architecture:
    """The architecture with the formats of a quantized checkpoint; unchanged if it is not quantized.

    Args:
        architecture: the model.
        config: the checkpoint's config.
        checkpoint: the checkpoint, whose files are read, but no weight; None if only the config is there.

    Raises:
        CheckpointError, MappingError: a file is missing or malformed, or the tensors are not those of the architecture.
        ConfigError: a key of the `quantization_config` has a value of another kind.
        UnsupportedError: the scheme, or a variant of it, is not read, or only the files would say what is quantized.
    """
    written = quantization_of(config)
    if written is None:
        return architecture
    if checkpoint is None:
        formats = _announced(architecture, config, written)
        return replace(architecture, spec=replace(architecture.spec, kernel_formats=formats))
    held = open_quantized(checkpoint)
    if held is None:
        return architecture
    mapping = architecture.mapping.suited_to(held.shapes)
    return replace(architecture, spec=formats_of(architecture.spec, mapping, held), mapping=mapping)


def _announced(
    architecture: Architecture, config: ModelConfig, written: ModelConfig
) -> tuple[tuple[str, KernelFormat], ...]:
    dtype = dtype_in_config(config) or "bfloat16"
    of_module, spec = announced(config.source, written, dtype), architecture.spec
    found = []
    for path, rule in architecture.mapping.rules:
        parameter = spec.parameters[path]
        if not is_matrix(path) or (path != HEAD and why_dense(path, parameter, spec, LINEAR)):
            continue
        shapes = {leaf.name.removesuffix(".weight"): leaf.shape for leaf in rule.leaves()}
        form = common_format([of_module(name, shape) for name, shape in shapes.items()])
        if form is not None:
            found.append((path, form))
    if not found and written.text("quant_method") == "mxfp4":
        raise unannounced(config.source, "mxfp4")
    return tuple(found)
