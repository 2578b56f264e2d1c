"""What our kernels for pages (`decode_kernel`, `prompt_kernel`) serve; asked without importing Pallas, which takes a
tenth of a second."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from ttpu_core.spec import AttentionSpec
from ttpu_jax.ops.paged_attention.batch import PagedKV, RaggedBatch
from ttpu_jax.ops.paged_attention.layout import LANES, SPLIT, TILE_TOKENS

MOST_QUERIES = 16
"""Of one sequence, in steps that the decode kernel takes."""


def unserved(spec: AttentionSpec, dtype: Any, value_in_key: bool = False) -> str | None:
    """Why the kernels do not serve a layer whose pages have this `dtype`, or None."""
    if spec.alibi is not None:
        return "they have no ALiBi"
    width = -(-max(spec.head_dim, spec.value_dim) // LANES) * LANES
    if width > LANES and width not in SPLIT and not value_in_key and np.dtype(dtype).itemsize > 1:
        return _unsplit(width)
    if np.dtype(dtype) not in map(np.dtype, (jnp.bfloat16, np.float32, jnp.float8_e4m3fn, np.int8)):
        return f"they do not read {np.dtype(dtype).name}"
    return None


def unserved_pages(kv: PagedKV) -> str | None:
    """Why the kernels do not read these pages, even if they serve the layer, or None."""
    if kv.combined and (kv.scales is not None or (kv.value_in_key and kv.pages.dtype.itemsize == 1)):
        return f"pages of latents in 8 bits, and all in int8, must have a multiple of {TILE_TOKENS} tokens"
    if kv.combined and not kv.value_in_key and kv.pages.shape[3] > LANES:
        return _unsplit(kv.pages.shape[3])
    return None


def _unsplit(width: int) -> str:
    return f"pages of heads of {width} features are not split into parts of {LANES}"


def unserved_step(spec: AttentionSpec, batch: RaggedBatch, tokens: int) -> str | None:
    """Why the decode kernel does not serve a step of a layer that it serves, or None: the other one then does."""
    if batch.max_queries > MOST_QUERIES or tokens != len(batch.kv_lens) * batch.max_queries:
        return f"it takes at most {MOST_QUERIES} queries of each sequence, and steps with room for as many of each"
    if batch.max_queries > 1 and spec.chunk is not None:
        return "the queries of a sequence may lie in several chunks"
    return None
