"""The types that attention implementations share: `AttentionContext`, the static arguments beside the arrays, and
`Implementation`, a function with the reference's signature plus a function that says which layers it serves."""

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
    """Devices and platform of an attention call. Hashable: static while a program is traced.

    Args:
        mesh: the devices, possibly those of a compile-only topology or an abstract mesh of another runtime's
            devices; None for one device.
        batch_axes: mesh axes that shard the batch; empty if it is not sharded.
        head_axes: mesh axes that shard the KV heads; empty if they are not sharded.
        sequence_axes: mesh axes that shard the sequence; empty if it is not sharded.
        query_axes: mesh axes that shard the queries of each KV head; empty if they are not sharded.
        platform: cpu, tpu or gpu.
        own_keys: True if the keys are those of the query tokens (training, or prefill into an empty cache); False if
            they are a cache.
        of_stack: the keys are those of one layer of a stack, which XLA reads where they are, and a kernel would not.
        options: `attention_config`, as `canonical_options` returns it.
    """

    mesh: Mesh | AbstractMesh | None = None
    batch_axes: tuple[str, ...] = ()
    head_axes: tuple[str, ...] = ()
    sequence_axes: tuple[str, ...] = ()
    query_axes: tuple[str, ...] = ()
    platform: str = "cpu"
    own_keys: bool = True
    of_stack: bool = False
    options: Options = ()


Serves = Callable[[AttentionSpec, AttentionContext, int, int], str | None]
"""(spec, context, number of queries, number of keys) → the reason why the implementation cannot serve the layer, or
None."""


def serves_all(spec: AttentionSpec, context: AttentionContext, queries: int, keys: int) -> str | None:
    """`Serves` of an implementation without limits."""
    return None


def takes_any(options: Options) -> None:
    """Option check of an implementation that checks its options itself."""


@dataclass(frozen=True)
class Implementation:
    """An attention function with its name, its limits, a check of its options (which raises RequestError), and whether
    it names its own result and statistics for policies that keep them (`ttpu_jax.ops.saved`)."""

    name: str
    function: AttentionFunction
    serves: Serves = serves_all
    check_options: Callable[[Options], None] = takes_any
    names_results: bool = False
