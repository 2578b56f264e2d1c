"""Handles checkpoints whose config ties the head to the embedding although the weights hold a different head: the
weights decide."""

from __future__ import annotations

from ttpu_core.checkpoint.checkpoint import Checkpoint
from ttpu_core.checkpoint.header import TensorInfo, read_tensor_into
from ttpu_core.mapping import FlaxMapping, Tensor

CHUNK = 64 * 2**20


def has_own_head(checkpoint: Checkpoint, mapping: FlaxMapping) -> bool:
    """Whether a tensor that the mapping treats as a copy of the embedding differs from it.

    Raises:
        CheckpointError: a file is missing, truncated or malformed.
    """
    embedding = mapping["embed.embedding"]
    if not mapping.tied or not isinstance(embedding, Tensor):
        return False
    held = mapping.canonical(checkpoint.tensors)
    table = held.get(embedding.name)
    copies = [held[name] for name in mapping.tied if name in held and held[name] != table]
    return table is not None and any(not _equal(checkpoint.tensors[table], checkpoint.tensors[copy]) for copy in copies)


def _equal(one: TensorInfo, other: TensorInfo) -> bool:
    """Whether two tensors are equal bit for bit. Only a chunk of each is in memory at a time."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    mine, its = bytearray(min(CHUNK, one.nbytes)), bytearray(min(CHUNK, one.nbytes))
    for start in range(0, one.nbytes, CHUNK):
        size = min(CHUNK, one.nbytes - start)
        read_tensor_into(one, memoryview(mine), start, size)
        read_tensor_into(other, memoryview(its), start, size)
        if mine[:size] != its[:size]:
            return False
    return True
