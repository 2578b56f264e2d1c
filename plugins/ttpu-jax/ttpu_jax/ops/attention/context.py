"""What an attention implementation is told beside the arrays, and what it is: a function with the signature of the
reference, with a pure function that says what it cannot serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
from jax.sharding import AbstractMesh, Mesh

from ttpu_core.spec import AttentionSpec

Options = tuple[tuple[str, object], ...]
AttentionFunction = Callable[..., jax.Array]


@dataclass(frozen=True)
class AttentionContext:
    """Where attention runs and what its keys are. Hashable: static while a program is traced.

    Args:
        mesh: the devices (also those of a compile-only topology, or a description of devices that another runtime
            drives); None for one device.
        batch_axes: mesh axes that shard the batch; empty where it is whole.
        head_axes: mesh axes that shard the KV heads; empty where they are whole.
        sequence_axes: mesh axes that shard the sequence; empty where it is whole.
        platform: cpu, tpu or gpu.
        own_keys: the keys are those of the query tokens themselves (training, or prefill into an empty cache); else
            they are a cache.
        options: `attention_config`, as `canonical_options` returns it.
    """

    mesh: Mesh | AbstractMesh | None = None
    batch_axes: tuple[str, ...] = ()
    head_axes: tuple[str, ...] = ()
    sequence_axes: tuple[str, ...] = ()
    platform: str = "cpu"
    own_keys: bool = True
    options: Options = ()


Serves = Callable[[AttentionSpec, AttentionContext, int, int], str | None]
"""(spec, context, number of queries, number of keys) → why that cannot be served, or None."""


def serves_all(spec: AttentionSpec, context: AttentionContext, queries: int, keys: int) -> str | None:
    """For an implementation that knows no limits."""
    return None


def takes_any(options: Options) -> None:
    """For an implementation that checks its options itself."""


@dataclass(frozen=True)
class Implementation:
    """An attention function by name, with what it serves and a check of its options (raises RequestError)."""

    name: str
    function: AttentionFunction
    serves: Serves = serves_all
    check_options: Callable[[Options], None] = takes_any
