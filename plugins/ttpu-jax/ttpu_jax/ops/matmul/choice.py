"""Which implementation multiplies by the quantized kernels of a model, and why, for `ttpu info` and `ttpu plan`."""

from __future__ import annotations

from math import prod

from ttpu_core.quantization.quantize import EMBEDDING, without_layer
from ttpu_core.quantization.report import format_words
from ttpu_core.sharding.parallelism import Parallelism
from ttpu_core.spec import ArchitectureSpec, axes
from ttpu_core.spec.kernel_format import KernelFormat
from ttpu_jax.ops.matmul.pallas import why_not_on_device

ROWS = (8, 2048)
"""Rows of activations for which the answer is given where no program is known: a decode step's and a prompt's."""
ABSORBED = ("key_up.kernel", "value_up.kernel")
EXPERTS = {
    "tpu": "Pallas: the values of the experts that have rows are converted where they are multiplied",
    "cpu": "XLA: the expert at hand is dequantized a block at a time",
    "gpu": "XLA: the experts are dequantized, because the kernels are for TPUs",
}


def product_choices(
    spec: ArchitectureSpec,
    platform: str,
    *,
    parallelism: Parallelism | None = None,
    rows: tuple[int, ...] = ROWS,
) -> dict[str, str]:
    """Operation → implementation and why, for each format of kernels; {} for a model without quantized ones.

    Args:
        spec: the architecture; with `parallelism`, padded for its mesh and with groups that fit it.
        platform: cpu, tpu or gpu.
        parallelism: the mesh and what its axes shard; None for one device.
        rows: tokens of the programs, on all devices together.
    """
    table: dict[str, dict[str, dict[str, None]]] = {}
    for path, form in spec.kernel_formats:
        if path == EMBEDDING and not spec.head.tied:
            continue  # rows are looked up, which is no product
        kind = f"products ({format_words(form)})"
        words = _words(spec, path, form, platform, parallelism, rows)
        table.setdefault(kind, {}).setdefault(words, {})[without_layer(path)] = None
    return {
        kind: next(iter(found)) if len(found) == 1 else "; ".join(f"{', '.join(found[one])}: {one}" for one in found)
        for kind, found in table.items()
    }


def _words(
    spec: ArchitectureSpec,
    path: str,
    form: KernelFormat,
    platform: str,
    parallelism: Parallelism | None,
    rows: tuple[int, ...],
) -> str:
    parameter = spec.parameters[path]
    if axes.EXPERT in parameter.axes:
        return EXPERTS.get(platform, EXPERTS["gpu"])
    if ".mixer." in path and path.endswith(ABSORBED):
        return "XLA: dequantized where keys are cached, because attention multiplies by both of its sides"
    if platform != "tpu":
        return "XLA: the Pallas kernels are for TPUs"
    *outputs, inputs = parameter.shape
    ways, row_ways = [1] * len(parameter.shape), 1
    if parallelism is not None:
        mesh, strategy = dict(parallelism.mesh), parallelism.strategy
        of_rows = {axis for name in (axes.BATCH, axes.SEQUENCE) for axis in dict(strategy.rules).get(name, ())}
        row_ways = prod(mesh.get(axis, 1) for axis in of_rows)
        by_dimension = strategy.mesh_axes(parameter.axes, parameter.shape, mesh, path)
        ways = [prod(mesh[axis] for axis in each if axis not in of_rows) for each in by_dimension]
    channels = prod(size // count for size, count in zip(outputs, ways[:-1], strict=True))
    reasons = {
        count: why_not_on_device(form, channels, inputs // ways[-1], -(-count // row_ways), platform) for count in rows
    }
    if len(set(reasons.values())) == 1:
        return _implementation(next(iter(reasons.values())))
    return ", ".join(f"{_implementation(reason)} ({count:,} rows)" for count, reason in reasons.items())


def _implementation(reason: str | None) -> str:
    return "Pallas" if reason is None else f"XLA: {reason}"
