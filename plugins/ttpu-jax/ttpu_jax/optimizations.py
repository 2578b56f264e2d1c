"""The optimizations of programs that can be left out one by one, to compare them with the plain form. Others have
options of their own: attention, experts, the residual stream, recomputation, quantization, sharding rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType

from ttpu_core.errors import RequestError


class Optimization(StrEnum):
    """What can be left out."""

    CACHE_WRITE = "cache_write"
    """On a TPU the decode kernel writes the step's keys and values while it reads the cache."""
    WINDOW_CACHE = "window_cache"
    """A layer whose queries see a window keeps only the window in a contiguous cache."""
    ROPE_PRODUCT = "rope_product"
    """On a TPU a product rotates queries and keys, in a decode step both and the values at once."""
    FUSED_NORMS = "fused_norms"
    """On a TPU the root of a norm is computed within the operation that reads the norm, except in training."""
    LAYER_LOOP = "layer_loop"
    """Layers of a prompt run in a loop that fetches their kernels, where v5e or v6e devices exchange rows in a ring."""
    BFLOAT16_CACHE = "bfloat16_cache"
    """A CPU with instructions for bfloat16 keeps keys and values of a bfloat16 model in bfloat16."""
    MESH_ORDER = "mesh_order"
    """Neighbours along a mesh axis are neighbours on the interconnect."""
    TRAINED_PRODUCTS = "trained_products"
    """On a TPU products of a training step round their gradients where they are made. Rings need that."""
    GRADIENT_RINGS = "gradient_rings"
    """Devices sum a kernel's gradient in a ring while they multiply."""
    SUMS_IN_HBM = "sums_in_hbm"
    """On a TPU such sums stay in HBM on their way, where a device has few rows: products share their code."""
    VOCABULARY_LOSS = "vocabulary_loss"
    """Devices that share the head divide the vocabulary of the loss."""
    UNSET_GRADIENTS = "unset_gradients"
    """Gradients of layers begin with unset memory, or with that of activations that are no longer needed."""


OF_PROGRAMS: Mapping[str, frozenset[Optimization]] = MappingProxyType({
    "decode": frozenset({
        Optimization.CACHE_WRITE, Optimization.WINDOW_CACHE, Optimization.ROPE_PRODUCT, Optimization.FUSED_NORMS,
        Optimization.MESH_ORDER,
    }),
    "prefill": frozenset({
        Optimization.WINDOW_CACHE, Optimization.ROPE_PRODUCT, Optimization.FUSED_NORMS, Optimization.LAYER_LOOP,
        Optimization.MESH_ORDER,
    }),
    "train": frozenset({
        Optimization.TRAINED_PRODUCTS, Optimization.GRADIENT_RINGS, Optimization.SUMS_IN_HBM,
        Optimization.VOCABULARY_LOSS, Optimization.UNSET_GRADIENTS, Optimization.ROPE_PRODUCT, Optimization.MESH_ORDER,
    }),
})  # fmt: skip
"""What a program for TPUs can have, by its task."""


def left_out_by(tasks: Sequence[str], names: str | Iterable[str]) -> dict[str, frozenset[Optimization]]:
    """The optimizations that the program of each task is compiled without, for TPUs: those of `names` that it has.

    Args:
        tasks: each is decode, prefill or train.
        names: as for `read_without`.

    Raises:
        RequestError: an unknown task or name, or a name that changes no program of these tasks.
    """
    if unknown := [task for task in tasks if task not in OF_PROGRAMS]:
        raise RequestError(
            f"task={unknown[0]!r} was asked for, but programs for TPUs are {', '.join(OF_PROGRAMS)}: write one of them."
        )
    left_out, has = read_without(names), frozenset[Optimization]().union(*(OF_PROGRAMS[task] for task in tasks))
    if others := sorted(left_out - has):
        raise RequestError(
            f"without={','.join(others)} was asked for, but {' and '.join(tasks)} programs for TPUs do not have it: "
            f"write some of {', '.join(sorted(has))}."
        )
    return {task: left_out & OF_PROGRAMS[task] for task in tasks}


def read_without(names: str | Iterable[str]) -> frozenset[Optimization]:
    """The optimizations of these names.

    Args:
        names: each is the value of an `Optimization`; a string holds several with commas between them.

    Raises:
        RequestError: an unknown name, or something else than names.
    """
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",") if name.strip()]
    known = {one.value: one for one in Optimization}
    try:
        given = [str(name) for name in names]
    except TypeError as error:
        raise RequestError(
            f"without={names!r} was asked for, but it takes names of optimizations: write some of {', '.join(known)}."
        ) from error
    for name in given:
        if name not in known:
            raise RequestError(
                f"without={name!r} was asked for, but the optimizations that can be left out are {', '.join(known)}: "
                "write some of them."
            )
    return frozenset(known[name] for name in given)
