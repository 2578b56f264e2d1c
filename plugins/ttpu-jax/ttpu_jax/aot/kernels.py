"""What Pallas kernels take: the rate of their FLOPs, and the cost of those of JAX that state none themselves, from the
shapes of their operands."""

from __future__ import annotations

import re
from math import prod

from ttpu_core.sharding.hardware import Chip
from ttpu_jax.ops.attention.blocks import TWO_CORES

from .hlo import Instruction, array_bytes

_OPERANDS = re.compile(r"operand_layout_constraints=\{((?:[^{}]|\{[^{}]*\})*)\}")
_SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,]*)\]")
_NARROW = re.compile(r"\b([su]8|[su]4|f8\w*|f4\w*)\[")
_PRODUCTS = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4}
"""Matrix products of a pair of a query and a key in splash attention: scores and values; in the backward pass the
scores again, and the gradients of probabilities and of queries, or of keys and values."""
_FLASH = {"flash_mha_bwd_dq": 3, "flash_mha_bwd_dkv": 4}
"""The same of the flash kernel, whose forward pass states its cost, of all pairs."""
_FLASH_BLOCK = re.compile(r"block_q_major_(\d+)")
_RAGGED = "ragged_paged_attention"
VECTOR = 8 * 128
"""Numbers of a register, which the vector unit takes in a cycle."""


def flops_rate(kernel: Instruction, chip: Chip) -> float:
    """The chip's FLOPs per second for a kernel's products: of bfloat16, or where a kernel that states its cost reads
    numbers of 8 bits or fewer, which it may multiply as they are, the highest of its rates. Kernels that are
    known by name read masks of 8 bits, which they do not multiply."""
    operands = _OPERANDS.search(kernel.attributes)
    if kernel.stated_cost is None or operands is None or _NARROW.search(operands.group(1)) is None:
        return chip.bf16_flops
    return max(chip.bf16_flops, chip.int8_ops or 0.0, chip.fp8_flops or 0.0)


def vector_rate(chip: Chip) -> float:
    """Numbers per second that go through the vector unit once: a register of 8 x 128 each cycle."""
    return VECTOR * (2 if chip.device_kind in TWO_CORES else 1) * chip.clock_hz


def known_cost(kernel: Instruction) -> tuple[int, int] | None:
    """FLOPs and bytes of one execution of a kernel that is known by its name; None for others.

    Splash attention and the flash kernel are counted as causal: of n blocks of queries, each attends to the blocks of
    keys up to its own, so that they multiply (n + 1) / 2n of the square. With windows splash attention takes less.

    Ragged paged attention is counted as if all sequences were equally long, and had as many tokens as their rows of the
    block table, or all pages, have room for. Lengths are not known while a program is compiled.
    """
    operands = _OPERANDS.search(kernel.attributes)
    if operands is None:
        return None
    shapes = [
        (dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in _SHAPE.findall(operands.group(1))
    ]
    if kernel.name.startswith(_RAGGED):
        return _ragged_cost(kernel, shapes)
    known = (_PRODUCTS | _FLASH).items()
    products = next((count for name, count in known if kernel.name.startswith(name)), None)
    if products is None:
        return None
    blocks = [sizes for dtype, sizes in shapes if dtype == "s8" and len(sizes) >= 3]
    heads = [sizes for dtype, sizes in shapes if dtype in ("bf16", "f32") and len(sizes) >= 3]
    if len(heads) < 2:
        return None
    (*rows_and_heads, queries, features), (*_, keys, _) = heads[:2]
    of_queries = blocks[0][-2] if blocks else 1
    if block := _FLASH_BLOCK.search(kernel.name):
        of_queries = max(1, queries // int(block.group(1)))
    pairs = prod(rows_and_heads) * queries * keys * (of_queries + 1) / (2 * of_queries)
    moved = sum(array_bytes(operands.group(1))) + sum(kernel.arrays)
    return int(2 * products * pairs * features), moved


def _ragged_cost(kernel: Instruction, shapes: list[tuple[str, tuple[int, ...]]]) -> tuple[int, int] | None:
    """Of queries [tokens, heads, features], a block table [sequences, columns] and pages [pages, page_size, rows,
    features]."""
    table = next((sizes for dtype, sizes in shapes if dtype == "s32" and len(sizes) == 2), None)
    queries = next((sizes for dtype, sizes in shapes if dtype != "s32" and len(sizes) == 3), None)
    kept = next(((dtype, sizes) for dtype, sizes in shapes if len(sizes) == 4), None)
    if table is None or queries is None or kept is None:
        return None
    (sequences, columns), (tokens, heads, features), (dtype, (all_pages, *page)) = table, queries, kept
    pages = min(sequences * columns, all_pages)
    pairs = tokens * pages * page[0] // sequences  # a token attends to its own sequence alone
    page_bytes = sum(array_bytes(f"{dtype}[{','.join(map(str, page))}]"))
    return 4 * heads * features * pairs, pages * page_bytes + 2 * sum(kernel.arrays)
