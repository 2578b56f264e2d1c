"""Which linear layers stay as they are because the core leaves their kernels so, on every backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ttpu_core.mapping import FlaxMapping
from ttpu_core.quantization import QuantizationConfig, choices
from ttpu_core.quantization.quantize import EMBEDDING, HEAD
from ttpu_core.spec import ArchitectureSpec
from ttpu_torch_xla.sharding.axes import memory_names


def kept_layers(model: Any, spec: ArchitectureSpec, mapping: FlaxMapping, names: Mapping[str, str]) -> dict[str, str]:
    """Linear layer → why its weights are not quantized, whatever the format. The head is left to the configuration.

    Args:
        model: the stock model.
        spec: its architecture.
        mapping: the rules that suit its checkpoint.
        names: the rules' names of tensors → the checkpoint's (`FlaxMapping.resolve`).
    """
    reasons = {
        names[leaf.name]: one.reason
        for one in choices(spec, QuantizationConfig(), mapping)
        if one.format is None and one.path not in (EMBEDDING, HEAD)
        for leaf in mapping[one.path].leaves()
    }
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    held, _ = memory_names(model, reasons, parameters)
    return {held_as.removesuffix(".weight"): reasons[name] for name, (held_as, _) in held.items()}
