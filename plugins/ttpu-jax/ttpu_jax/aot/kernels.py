"""What Pallas kernels of JAX take that state no cost themselves, from the shapes of their operands."""

from __future__ import annotations

import re
from math import prod

from .hlo import Instruction, array_bytes

_OPERANDS = re.compile(r"operand_layout_constraints=\{((?:[^{}]|\{[^{}]*\})*)\}")
_SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,]*)\]")
_PRODUCTS = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4}
"""Matrix products of a pair of a query and a key in splash attention: scores and values; in the backward pass the
scores again, and the gradients of probabilities and of queries, or of keys and values."""


def known_cost(kernel: Instruction) -> tuple[int, int] | None:
    """FLOPs and bytes of one execution of a kernel that is known by its name; None for others.

    Splash attention is counted as causal: of its n blocks of queries, each attends to the blocks of keys up to its own,
    so that it multiplies (n + 1) / 2n of the square. With windows it takes less.
    """
    products = next((count for name, count in _PRODUCTS.items() if kernel.name.startswith(name)), None)
    operands = _OPERANDS.search(kernel.attributes)
    if products is None or operands is None:
        return None
    shapes = [
        (dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in _SHAPE.findall(operands.group(1))
    ]
    blocks = [sizes for dtype, sizes in shapes if dtype == "s8" and len(sizes) >= 3]
    heads = [sizes for dtype, sizes in shapes if dtype in ("bf16", "f32") and len(sizes) >= 3]
    if len(heads) < 2:
        return None
    (*rows_and_heads, queries, features), (*_, keys, _) = heads[:2]
    of_queries = blocks[0][-2] if blocks else 1
    pairs = prod(rows_and_heads) * queries * keys * (of_queries + 1) / (2 * of_queries)
    moved = sum(array_bytes(operands.group(1))) + sum(kernel.arrays)
    return int(2 * products * pairs * features), moved
