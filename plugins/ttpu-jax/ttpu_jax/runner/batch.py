"""Transfers one step's inputs to the device as a single vector of integers, so that a step costs one transfer.
`BatchLayout.pack` makes the vector of host arrays; `BatchLayout.unpack` runs in the compiled step, computes positions
and slots, and returns a `RaggedBatch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_jax.ops.paged_attention import RaggedBatch
from ttpu_jax.runner.buckets import StepShape

IN_FLIGHT = -1
"""A token that the host does not know yet: the one that was sampled last in the slot of its sequence."""


@dataclass(frozen=True)
class BatchLayout:
    """The offset of each field of a step in its vector.

    Attributes:
        shape: sizes of the compiled step.
        groups: number of page groups.
        pages: pages per sequence in each group's table.
        page_size: tokens per page.
        max_num_seqs: number of request slots; the slot of this number belongs to no request.
        adapters: sequences may use LoRA adapters.
    """

    shape: StepShape
    groups: int
    pages: int
    page_size: int
    max_num_seqs: int
    adapters: bool = False

    @cached_property
    def fields(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Name → offset and shape."""
        sizes = self.shape
        shapes: dict[str, tuple[int, ...]] = {
            "tokens": (sizes.tokens,),
            "counts": (sizes.sequences,),
            "starts": (sizes.sequences,),
            "prompts": (sizes.sequences,),
            "slots": (sizes.sequences,),
            "adapters": (sizes.sequences if self.adapters else 0,),
            "rows": (sizes.rows,),
            "tables": (self.groups, sizes.sequences, self.pages),
        }
        table, offset = {}, 0
        for name, shape in shapes.items():
            table[name] = (offset, shape)
            offset += int(np.prod(shape))
        table["end"] = (offset, ())
        return table

    @property
    def size(self) -> int:
        """Length of the vector."""
        return self.fields["end"][0]

    def pack(
        self,
        tokens: np.ndarray,
        counts: np.ndarray,
        starts: np.ndarray,
        prompts: np.ndarray,
        slots: np.ndarray,
        rows: np.ndarray,
        tables: Sequence[np.ndarray],
        adapters: np.ndarray | None = None,
    ) -> np.ndarray:
        """Make the vector of a step of n sequences, int32 [size].

        Args:
            tokens: [step tokens], the tokens of all sequences one after another; `IN_FLIGHT` for those unknown to the
                host.
            counts: [n], the number of tokens of each sequence in this step.
            starts: [n], the position of each sequence's first token.
            prompts: [n], the length of each sequence's prompt.
            slots: [n], the request slot of each sequence.
            rows: [logit rows], the indices into `tokens` of the tokens whose logits are needed.
            tables: per group [n, pages], the pages of each sequence.
            adapters: [n], the adapter of each sequence; None where no adapters are served.
        """
        vector = np.zeros(self.size, np.int32)

        def put(name: str, values: np.ndarray) -> None:
            offset, _ = self.fields[name]
            vector[offset : offset + len(values)] = values

        put("tokens", tokens)
        put("counts", counts)
        put("starts", starts)
        put("prompts", prompts)
        put("rows", rows)
        offset, (sequences,) = self.fields["slots"]
        vector[offset : offset + sequences] = self.max_num_seqs
        put("slots", slots)
        if self.adapters and adapters is not None:
            put("adapters", adapters)
        offset, shape = self.fields["tables"]
        view = vector[offset : offset + int(np.prod(shape))].reshape(shape)
        for group, table in enumerate(tables):
            view[group, : len(slots)] = table
        return vector

    def unpack(self, vector: jax.Array, last_tokens: jax.Array) -> StepInputs:
        """Read the fields on the device.

        Args:
            vector: int32 [size], made by `pack`.
            last_tokens: int32 [max_num_seqs + 1], the last sampled token of each slot.
        """

        def get(name: str) -> jax.Array:
            offset, shape = self.fields[name]
            return vector[offset : offset + int(np.prod(shape))].reshape(shape)

        counts, starts, slots, tables = get("counts"), get("starts"), get("slots"), get("tables")
        sizes = self.shape
        ends = jnp.cumsum(counts)
        query_starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends.astype(jnp.int32)])
        token = jnp.arange(sizes.tokens, dtype=jnp.int32)
        if sizes.max_queries == 1:
            rows, offsets, real = token, jnp.zeros_like(token), counts > 0
        else:
            rows = jnp.minimum((token[:, None] >= ends[None]).sum(-1, dtype=jnp.int32), sizes.sequences - 1)
            offsets, real = token - query_starts[rows], token < ends[-1]
        positions = jnp.where(real, starts[rows] + offsets, -1)
        at = jnp.maximum(positions, 0)
        page, offset = at // self.page_size, at % self.page_size
        written = tuple(
            jnp.where(real, table[rows, page] * self.page_size + offset, 0) for table in tables
        )
        tokens = get("tokens")
        tokens = jnp.where(tokens == IN_FLIGHT, last_tokens[slots[rows]], tokens)
        batch = RaggedBatch(
            query_starts=query_starts,
            kv_lens=jnp.where(counts > 0, starts + counts, 0),
            num_sequences=(counts > 0).sum(dtype=jnp.int32)[None],
            positions=positions,
            lengths=jnp.maximum(get("prompts")[rows], positions + 1),
            rows=rows,
            tables=tuple(tables),
            slots=written,
            states=(slots + 1) % (self.max_num_seqs + 1),
            adapters=get("adapters")[rows] if self.adapters else None,
            max_queries=sizes.max_queries,
            max_prefills=sizes.max_prefills,
            page_size=self.page_size,
        )
        return StepInputs(tokens, batch, get("rows"))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInputs:
    """tokens [tokens], the batch, and the tokens whose logits are wanted [rows]."""

    tokens: jax.Array
    batch: RaggedBatch
    rows: jax.Array


def put_whole(vector: np.ndarray, sharding: Any) -> jax.Array:
    """Copy a host array to the devices, replicated. vector is [size], and the result has the same shape."""
    return jax.device_put(vector, sharding)
