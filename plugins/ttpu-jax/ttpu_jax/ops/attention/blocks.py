"""Block sizes of the attention kernels, from the caller's options or the device kind's defaults (blocks.json),
fitted to a padded sequence length."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from ttpu_core.errors import RequestError
from ttpu_jax.ops.attention.context import AttentionContext, Options

LANES = 128  # a block is whole TPU vector registers
SUBLANES = 16
"""Rows of a tile of bfloat16."""
TWO_CORES = ("TPU v4", "TPU v5")
"""Kinds of devices whose two cores share the steps of a grid."""
SMALLEST_WINDOW_BLOCK = SMALLEST_CAUSAL_BLOCK = 512
CAUSAL_BLOCKS = 4
"""Least blocks of queries of a causal sequence, if they are not too small."""

COMPUTE_OF = {"sa_block_kv_compute": "sa_block_kv", "sa_block_kv_dkv_compute": "sa_block_kv_dkv"}
"""Block of keys that is multiplied at once → block of keys that is fetched."""
QUERY_BLOCKS = ("sa_block_q", "sa_block_q_dkv", "sa_block_q_dq")
BLOCKS = (*QUERY_BLOCKS, "sa_block_kv", "sa_block_kv_dkv", "sa_block_kv_dq", *COMPUTE_OF)
LAYOUT_KEYS = ("sa_q_layout", "sa_k_layout", "sa_v_layout")
LAYOUTS = ("HEAD_DIM_MINOR", "SEQ_MINOR")
FUSED = "sa_use_fused_bwd_kernel"


@dataclass(frozen=True)
class SplashBlocks:
    """Block sizes by the keys of attention_config. Each divides `length`, the padded sequence length."""

    length: int
    sizes: tuple[tuple[str, int], ...]
    fused_backward: bool = False
    layouts: tuple[str, str, str] = (LAYOUTS[0],) * 3


def splash_blocks(
    context: AttentionContext,
    length: int,
    head_bytes: int,
    reach: int | None = None,
    *,
    causal: bool = False,
    whole: bool = False,
) -> SplashBlocks:
    """The block sizes for a sequence of `length` tokens. Sizes from `attention_config` are used unchanged unless the
    sequence is shorter or not a multiple of them.

    Args:
        context: the device kind and options.
        length: tokens of the sequence.
        head_bytes: bytes of one head's query or value, whichever is wider, padded to whole registers.
        reach: maximum number of tokens that a query attends to under a window or chunk, else None. A wider block
            would mostly compute masked scores.
        causal: queries attend to no later token. With a quarter of the sequence in a block of queries, the kernel
            skips three eighths of the square; with all of it in one block, nothing.
        whole: the sequence, a multiple of 128, is not padded, for which blocks are smaller where they have to be.
    """
    table = _table("splash_attention", device_kind(context))
    asked = dict(context.options)
    largest_query_block = table["query_block_bytes"] // head_bytes // LANES * LANES
    wanted: dict[str, int] = {}
    for name in BLOCKS:
        size = table["blocks"][name]
        if name in QUERY_BLOCKS:
            size = min(size, max(LANES, largest_query_block))
            if causal:
                size = min(size, max(SMALLEST_CAUSAL_BLOCK, _tiles(length // CAUSAL_BLOCKS) * LANES))
        if reach is not None:
            size = min(size, max(SMALLEST_WINDOW_BLOCK, _tiles(reach) * LANES))
        given = asked.get(name, size)
        assert isinstance(given, int)
        wanted[name] = given
    for compute, fetched in COMPUTE_OF.items():
        if compute in asked and fetched not in asked:
            wanted[fetched] = wanted[compute] * max(1, wanted[fetched] // wanted[compute])
    padded, sizes = fit(length, wanted, pads=not whole)
    q, k, v = (str(asked.get(name, LAYOUTS[0])) for name in LAYOUT_KEYS)
    return SplashBlocks(padded, tuple(sizes.items()), bool(asked.get(FUSED, False)), (q, k, v))


def flash_block(context: AttentionContext) -> int:
    """Side length of the flash kernel's blocks."""
    size: int = _table("xla_flash_attention", device_kind(context))["blocks"]["block"]
    return size


def fit(length: int, wanted: Mapping[str, int], *, pads: bool = True) -> tuple[int, dict[str, int]]:
    """The smallest padded length at which each block size divides it and is at least half the wanted size, and these
    block sizes. Without padding, a multiple of 128 and the largest sizes up to the wanted ones that divide it."""
    goal = {name: size // LANES for name, size in wanted.items()}
    for compute, fetched in COMPUTE_OF.items():
        if compute in goal:
            goal[compute] = _divisor(goal[fetched], goal[compute])
    tiles = _tiles(length)
    while True:
        fitted = {name: _divisor(tiles, size) for name, size in goal.items()}
        for compute, fetched in COMPUTE_OF.items():
            if compute in goal:
                fitted[compute] = _divisor(fitted[fetched], goal[compute])
        if not pads or all(2 * fitted[name] >= min(size, tiles) for name, size in goal.items()):
            return tiles * LANES, {name: size * LANES for name, size in fitted.items()}
        tiles += 1


def check_splash_options(options: Options) -> None:
    """Check options of the splash kernel.

    Raises:
        RequestError: an unknown key, a block size that is not a multiple of 128, or an unknown layout.
    """
    given = dict(options)
    for name, value in given.items():
        if name in BLOCKS:
            if not isinstance(value, int) or isinstance(value, bool) or value < LANES or value % LANES:
                raise RequestError(
                    f"attention_config has {name}={value!r}, but a block of the splash kernel is a positive multiple "
                    f"of {LANES}: write for example 512, 1024 or 2048, or leave it out."
                )
        elif name in LAYOUT_KEYS:
            if value not in LAYOUTS:
                raise RequestError(
                    f"attention_config has {name}={value!r}, but a layout is {' or '.join(LAYOUTS)}: write one of them."
                )
        elif name == FUSED:
            if not isinstance(value, bool):
                raise RequestError(f"attention_config has {name}={value!r}, but it is a switch: write True or False.")
        else:
            raise RequestError(
                f"attention_config has the key {name!r}, but the splash kernel takes "
                f"{', '.join((*BLOCKS, FUSED, *LAYOUT_KEYS))}: correct it or leave it out."
            )
    for compute, fetched in COMPUTE_OF.items():
        inner, outer = given.get(compute), given.get(fetched)
        if isinstance(inner, int) and isinstance(outer, int) and outer % inner:
            raise RequestError(
                f"attention_config has {fetched}={outer} and {compute}={inner}, but the first must be a multiple of "
                "the second, because it is computed in pieces of that size: change one of them."
            )


def device_kind(context: AttentionContext) -> str:
    """`jax.Device.device_kind` of the program's devices."""
    mesh = jax.sharding.get_abstract_mesh() if context.mesh is None else context.mesh
    # An abstract mesh describes devices that this process does not have.
    device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else mesh.abstract_device or jax.devices()[0]
    kind: str = device.device_kind
    return kind


def _tiles(tokens: int) -> int:
    return max(1, -(-tokens // LANES))


def _divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`."""
    return next(size for size in range(min(number, limit), 0, -1) if number % size == 0)


def _table(kernel: str, kind: str) -> Mapping[str, Any]:
    by_kind = _data()[kernel]
    table: Mapping[str, Any] = by_kind.get(kind, by_kind["default"])
    return table


@cache
def _data() -> Mapping[str, Any]:
    data: Mapping[str, Any] = json.loads(Path(__file__).with_name("blocks.json").read_text())
    return data
