"""Checkpoints whose config ties the head to the embedding, and that hold a head of their own all the same. In: a
checkpoint; out: its architecture, in which the bytes have decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ttpu_core.architecture import Architecture
from ttpu_core.checkpoint import Checkpoint, TensorInfo, read_tensor_into
from ttpu_core.mapping import Tensor
from ttpu_core.registry import Registry

CHUNK = 64 * 2**20


def described(
    registry: Registry, checkpoint: Checkpoint, patch_packs: Sequence[str] | None = None
) -> tuple[Checkpoint, Architecture]:
    """A checkpoint with weights and its architecture, in which the head is tied only where the weights agree:
    transformers too lets them decide.

    Raises:
        CheckpointError, ConfigError, MappingError, PluginError: what cannot be described, and why.
    """
    architecture = registry.architecture(checkpoint.config, patch_packs)
    if has_own_head(checkpoint, architecture):
        checkpoint = replace(checkpoint, config=checkpoint.config.with_values({"tie_word_embeddings": False}))
        architecture = registry.architecture(checkpoint.config, patch_packs)
    return checkpoint, architecture


def has_own_head(checkpoint: Checkpoint, architecture: Architecture) -> bool:
    """Whether a tensor that the mapping takes for a copy of the embedding is none.

    Raises:
        CheckpointError: a file is missing, truncated or malformed.
    """
    mapping = architecture.mapping
    embedding = mapping["embed.embedding"]
    if not mapping.tied or not isinstance(embedding, Tensor):
        return False
    held = mapping.canonical(checkpoint.tensors)
    table = held.get(embedding.name)
    copies = [held[name] for name in mapping.tied if name in held]
    return table is not None and any(not _equal(checkpoint.tensors[table], checkpoint.tensors[copy]) for copy in copies)


def _equal(one: TensorInfo, other: TensorInfo) -> bool:
    """Whether two tensors are the same bit for bit, a part of both in memory at a time."""
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
