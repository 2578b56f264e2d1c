"""Which slice of a TPU generation a program needs. In: an architecture and a generation; out: slices and meshes, from
the smallest on which weights, cache and optimizer fit by their sizes; the compiler has the last word."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, prod
from typing import Any

from ttpu_core.architecture import Architecture
from ttpu_core.errors import UnsupportedError
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, MixerSpec, MoESpec
from ttpu_jax.aot.report import ProgramReport, compile_report
from ttpu_jax.aot.steps import Task
from ttpu_jax.aot.topology import Chip, chip_named
from ttpu_jax.params.dtypes import model_dtype

MOST_CHIPS = 256
MARGIN = 0.9  # of a device's memory for what is known; the rest is for what the compiler adds
TRAINING_BYTES = 16  # per parameter: float32 weight, gradient and two moments


def fitting_report(architecture: Architecture, generation: str, *, task: Task, **options: Any) -> ProgramReport:
    """`compile_report` on the smallest slice of a generation on which the program fits; `options` are its own.

    Raises:
        UnsupportedError: no slice of up to 256 chips holds it, or the program cannot be compiled at all.
    """
    refused = None
    for topology, mesh in candidates(architecture.spec, generation, task=task, **_sizes(options)):
        rows = options | ({"batch": prod(mesh.values())} if task == "train" and "batch" not in options else {})
        try:
            return compile_report(architecture, topology, task=task, mesh=mesh, **rows)
        except UnsupportedError as error:
            if "GiB of HBM" not in str(error):
                raise
            refused = error
    raise UnsupportedError(
        f"{task} of this {architecture.spec.model_type} model fits on no slice of up to {MOST_CHIPS} {generation} "
        f"chips{'' if refused is None else f' ({refused})'}: use a smaller batch or context."
    )


def candidates(
    spec: ArchitectureSpec, generation: str, *, task: Task, batch: int = 32, context: int = 2048, bytes_each: int = 2
) -> Iterator[tuple[str, dict[str, int]]]:
    """(slice, mesh) from the smallest whose devices have room for what is known to lie there.

    Training shards everything over `fsdp`. Serving cuts heads and MLPs over `tensor` as far as the KV heads allow,
    experts over `expert` with what is left, and the batch over `data` with the rest.
    """
    chip = chip_named(generation)
    for shape in _shapes(chip):
        devices = prod(shape) * chip.devices_per_chip
        name = f"{chip.name}:{'x'.join(map(str, shape))}"
        mesh = {"fsdp": devices} if task == "train" else _serving_mesh(spec, devices)
        if mesh is None:
            continue
        if task == "train":
            needed = TRAINING_BYTES * spec.num_parameters / devices
        else:
            cache = spec.kv_bytes_per_token(bytes_each) * (batch if task == "decode" else 1) * context
            cut = mesh.get("tensor", 1)
            experts = _expert_parameters(spec)
            weights = (spec.num_parameters - experts) / cut + experts / (cut * mesh.get("expert", 1))
            needed = weights * bytes_each + cache / devices
        if needed <= MARGIN * chip.hbm_bytes:
            yield name, mesh


def _serving_mesh(spec: ArchitectureSpec, devices: int) -> dict[str, int] | None:
    tensor = gcd(devices, *_heads(spec))
    rest = devices // tensor
    experts = {layer.mlp.num_experts for layer in spec.layers if isinstance(layer.mlp, MoESpec)}
    if not experts:
        return {"data": rest, "tensor": tensor}
    expert = gcd(rest, *experts)
    return {"data": rest // expert, "expert": expert, "tensor": tensor}


def _heads(spec: ArchitectureSpec) -> Iterator[int]:
    """What `tensor` has to divide in every layer."""
    for layer in spec.layers:
        if isinstance(layer.mixer, AttentionSpec):
            yield layer.mixer.num_kv_heads
    heads = ("kv_heads", "q_heads")
    for layer in spec.layers:
        if isinstance(layer.mixer, MixerSpec):
            for _, parameter in layer.mixer.parameters:
                yield from (n for n, axis in zip(parameter.shape, parameter.axes, strict=True) if axis in heads)


def _expert_parameters(spec: ArchitectureSpec) -> int:
    return sum(parameter.size for path, parameter in spec.parameters.items() if ".moe.experts." in path)


def _shapes(chip: Chip) -> Iterator[tuple[int, ...]]:
    """Slices that exist, by size: the shortest side doubles."""
    shape = [1, 1] if chip.dimensions == 2 else [2, 2, 1]
    while prod(shape) <= min(MOST_CHIPS, chip.pod_chips):
        yield tuple(shape)
        shape[shape.index(min(shape))] *= 2
        shape.sort()


def _sizes(options: dict[str, Any]) -> dict[str, int]:
    sizes = {name: options[name] for name in ("batch", "context") if name in options}
    return sizes | {"bytes_each": model_dtype(options.get("dtype", "bfloat16")).itemsize}


