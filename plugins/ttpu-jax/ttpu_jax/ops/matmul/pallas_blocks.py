"""Block sizes of the Pallas products with quantized kernels, from `pallas_blocks.json` by device kind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

SUBLANES, LANES = 8, 128


@dataclass(frozen=True)
class Blocks:
    """The blocks of a product.

    Args:
        rows: rows of a block of activations.
        out: output channels of a block of the kernel.
        inputs: inputs of a block of the kernel: whole groups, or a part of the only one.
        span: inputs of one product: whole groups, or a part of one.
        group: inputs that share a scale.
        digits: whether activations are multiplied as int8 digits.
    """

    rows: int
    out: int
    inputs: int
    span: int
    group: int
    digits: bool = False

    @property
    def groups(self) -> int:
        """Groups of a block."""
        return max(1, self.inputs // self.group)

    @property
    def masks(self) -> int:
        """Groups of a span."""
        return max(1, self.span // self.group)


def blocks_for(
    kind: str,
    rows: int,
    out: int,
    inputs: int,
    group: int | None,
    dtype: np.dtype[Any] | type,
    activations: np.dtype[Any] | type = jnp.bfloat16,
) -> Blocks:
    """The blocks for activations [rows, inputs] and a kernel [out, inputs] on one device.

    Args:
        kind: `jax.Device.device_kind`.
        rows: of the activations.
        out: output channels of the kernel.
        inputs: of the kernel.
        group: inputs that share a scale; None for all of them.
        dtype: of the values.
        activations: their dtype.

    Raises:
        NotImplementedError: no block of inputs consists of whole groups and whole registers, or the chip's kernels
            cannot read the dtype.
    """
    table = block_table(kind)
    if jnp.dtype(dtype) == jnp.float4_e2m1fn and not table["float4"]:
        raise NotImplementedError(f"the kernel cannot read float4 on a {kind}")
    group = inputs if group is None else group
    span = _span(table["span"], inputs, group)
    if span > LANES and rows * (span // group) > table["span_rows"]:
        span = _span(LANES, inputs, group)  # masks cost more than a narrow product
    masks = max(1, span // group)
    most = max(SUBLANES, table["partial_rows"] // masks // SUBLANES * SUBLANES)
    block_rows = min(-(-rows // SUBLANES) * SUBLANES, most)
    block_in = _block_of_inputs(table["inputs"], inputs, group, span)
    fit = int(table["values_bytes"] * 8 / bits_of(dtype)) // block_in // LANES * LANES
    share = -(-out // table["least_steps"] // LANES) * LANES
    whole = jnp.issubdtype(dtype, jnp.integer) and jnp.dtype(activations) == jnp.bfloat16
    digits = whole and block_rows * masks <= table["digit_rows"]
    return Blocks(block_rows, min(out, max(LANES, min(fit, share, table["out"]))), block_in, span, group, digits)


def bits_of(dtype: np.dtype[Any] | type) -> int:
    """Bits of one value."""
    kept = jnp.dtype(dtype)
    if kept.kind == "b":
        return 8
    return int(jnp.iinfo(kept).bits if jnp.issubdtype(kept, jnp.integer) else jnp.finfo(kept).bits)


def block_table(kind: str) -> Mapping[str, Any]:
    """The sizes for a `jax.Device.device_kind`."""
    return {**_data()["default"], **_data().get(kind, {})}


def _span(largest: int, inputs: int, group: int) -> int:
    if inputs <= largest and (group == inputs or inputs % group == 0):
        return inputs
    for span in range(largest, 0, -LANES):
        if inputs % span == 0 and (span % group == 0 or group % span == 0):
            return span
    raise NotImplementedError(f"{inputs} inputs in groups of {group} are not whole registers of {LANES}")


def _block_of_inputs(largest: int, inputs: int, group: int, span: int) -> int:
    """The largest part of the inputs that is at most `largest`, whole spans, and whose scales are whole tiles."""
    if inputs <= largest:
        return inputs
    for block in range(largest // span * span, 0, -span):
        whole = block % group == 0 and block // group % SUBLANES == 0
        if inputs % block == 0 and (whole or group == inputs):
            return block
    return inputs


@cache
def _data() -> Mapping[str, Any]:
    data: Mapping[str, Any] = json.loads(Path(__file__).with_name("pallas_blocks.json").read_text())
    return data
