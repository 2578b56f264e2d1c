"""Compiles a run's update with the least recomputation that fits into the memory of its devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ttpu_core.sharding.training_state import GATE, REMATS, SAVED, UP, Recomputation
from ttpu_core.spec import ArchitectureSpec, MLPSpec, MoESpec


def different(spec: ArchitectureSpec) -> tuple[Recomputation, ...]:
    """Those of `REMATS` that keep different activations of a model, in their order: without a dense MLP there is none
    of which `gate` or `mlp` would keep a product."""
    mixtures = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoESpec)]
    dense = any(isinstance(layer.mlp, MLPSpec) for layer in spec.layers)
    if dense or any(mixture.shared is not None or mixture.dense is not None for mixture in mixtures):
        return REMATS
    return tuple(remat for remat in REMATS if not {GATE, UP} & set(SAVED.get(remat, ())))


def compiled_that_fits(
    compiled: Callable[[Recomputation], Any], device: jax.Device, remats: tuple[Recomputation, ...] = REMATS
) -> tuple[Recomputation, Any]:
    """The least recomputation whose program fits, and that program; "full" where the device does not say how much
    memory it has, as a CPU.

    Args:
        compiled: makes the program.
        device: one of those that it runs on.
        remats: what may be computed again, the most first.
    """
    limit = _device_bytes(device)
    most, *others = remats
    for remat in reversed(others) if limit else ():
        try:
            program = compiled(remat)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            continue
        if (peak_bytes(program) or 0) <= (limit or 0):
            return remat, program
    return most, compiled(most)


def peak_bytes(program: Any) -> int | None:
    """The peak bytes of a device, or None where the compiler does not say."""
    analysis = program.memory_analysis()
    if analysis is None:
        return None
    return int(
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        + analysis.temp_size_in_bytes
        - analysis.alias_size_in_bytes
    )


def _device_bytes(device: jax.Device) -> int | None:
    """The memory that programs may use; None where the device does not say, as a CPU."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return None if not stats else stats.get("bytes_limit")
