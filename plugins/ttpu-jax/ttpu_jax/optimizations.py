"""The optimizations of programs that can be left out one by one, to compare them with the plain form. Others have
options of their own: attention, experts, the residual stream, recomputation, quantization, sharding rules."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import StrEnum
from types import MappingProxyType

from ttpu_core.errors import RequestError


class Optimization(StrEnum):
    """Each is said in `EFFECTS`."""

    CACHE_WRITE = "cache_write"
    WINDOW_CACHE = "window_cache"
    ROPE_PRODUCT = "rope_product"
    BFLOAT16_CACHE = "bfloat16_cache"
    MESH_ORDER = "mesh_order"
    TRAINED_PRODUCTS = "trained_products"
    GRADIENT_RINGS = "gradient_rings"
    VOCABULARY_LOSS = "vocabulary_loss"
    UNSET_GRADIENTS = "unset_gradients"


Without = Collection[Optimization]
"""The optimizations that are left out."""

EFFECTS = MappingProxyType({
    Optimization.CACHE_WRITE: "on a TPU the decode kernel writes the step's keys and values while it reads the cache",
    Optimization.WINDOW_CACHE: "a layer whose queries see a window keeps only the window in a contiguous cache",
    Optimization.ROPE_PRODUCT: "on a TPU one product rotates the queries, keys and values of a decode step",
    Optimization.BFLOAT16_CACHE: "a CPU with instructions for bfloat16 keeps a bfloat16 model's keys and values in it",
    Optimization.MESH_ORDER: "neighbours along a mesh axis are neighbours on the interconnect",
    Optimization.TRAINED_PRODUCTS: "on a TPU products of a training step round their gradients where they are made",
    Optimization.GRADIENT_RINGS: "devices sum a kernel's gradient in a ring while they multiply",
    Optimization.VOCABULARY_LOSS: "devices that share the head divide the vocabulary of the loss",
    Optimization.UNSET_GRADIENTS: "gradients of layers begin with unset memory, and lie over used activations",
})


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
