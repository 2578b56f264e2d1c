"""AdamW's direction with moments of 8 bits (Dettmers et al., arXiv 2110.02861): blocks of 256 numbers along the last
axis, each with its largest magnitude, and a dynamic code, which is fine near that magnitude and reaches seven decades
below it. Codes are computed and not looked up, because accelerators gather single numbers slowly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ttpu_core.spec import Parameter

BLOCK = 256
SMALLEST = 4096
"""Numbers of a parameter below which its moments stay float32, as in bitsandbytes."""
DECADES = 7
TOP_SIGNED, TOP = -128, 255
"""The codes of 1, the largest magnitude of a block."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocks:
    """An array of 8 bits a number.

    Attributes:
        codes: int8 (signed) or uint8 (not below 0) [*shape].
        scales: float32 [*shape[:-1], blocks of the last axis], the largest magnitude of each block.
    """

    codes: jax.Array
    scales: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adam8BitState:
    """The state of `scale_by_adam_8bit`: moments by path, as `Blocks`, or as float32 arrays for small parameters.

    Attributes:
        count: int32, updates so far.
        mu: first moments.
        nu: second moments.
    """

    count: jax.Array
    mu: dict[str, Any]
    nu: dict[str, Any]


def encode(values: jax.Array, *, signed: bool) -> Blocks:
    """The nearest codes of `values`: float32 [*shape]. Without a sign, what is above 0 is never rounded to 0, because a
    second moment divides."""
    size = values.shape[-1]
    blocks = _in_blocks(values)
    scales = jnp.max(jnp.abs(blocks), axis=-1)
    share = jnp.abs(blocks) / jnp.where(scales > 0, scales, 1.0)[..., None]
    first = 1 if signed else 2
    decade = jnp.zeros(share.shape, jnp.int32)
    for one in range(DECADES - 1):
        decade += (share >= 10.0 ** (one - DECADES + 1)).astype(jnp.int32)
    cells = jnp.left_shift(first, decade)
    cell = jnp.floor((share * _power(decade) - 0.1) / 0.9 * cells).astype(jnp.int32)
    code = cells + jnp.clip(cell, 0, cells - 1) - (first - 1)
    # Cells of the decade below are wider, so that its last number may be nearer.
    code -= (share - _share(code - 1, first) < _share(code, first) - share).astype(jnp.int32)
    last = 127 if signed else 254
    is_top = share - _share(jnp.full_like(code, last), first) > 1 - share
    if signed:
        code = jnp.where(blocks < 0, -code, jnp.where(is_top, TOP_SIGNED, code))
    else:
        code = jnp.where(is_top, TOP, jnp.where(share > 0, jnp.maximum(code, 1), 0))
    codes = code.reshape(*values.shape[:-1], -1)[..., :size]
    return Blocks(codes.astype(jnp.int8 if signed else jnp.uint8), scales)


def decode(held: Blocks) -> jax.Array:
    """The numbers float32 [*shape] that codes stand for: the middle of each code's cell, as in the paper."""
    signed = held.codes.dtype == jnp.int8
    codes = _in_blocks(held.codes).astype(jnp.int32)
    top = codes == (TOP_SIGNED if signed else TOP)
    share = jnp.where(top, 1.0, _share(jnp.abs(codes), 1 if signed else 2))
    values = jnp.where(jnp.logical_and(codes < 0, ~top), -share, share) * held.scales[..., None]
    return values.reshape(*held.codes.shape[:-1], -1)[..., : held.codes.shape[-1]]


def scale_by_adam_8bit(
    beta1: float, beta2: float, epsilon: float, table: Mapping[str, Parameter]
) -> optax.GradientTransformation:
    """Adam's direction, as `optax.scale_by_adam`, with the moments of large parameters in 8 bits between updates.

    Args:
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        epsilon: added to the square root of the second moment.
        table: path → shape of each trained parameter.
    """
    small = {path for path, parameter in table.items() if prod(parameter.shape) < SMALLEST}

    def held(path: str, moment: jax.Array, *, signed: bool) -> Any:
        return moment if path in small else encode(moment, signed=signed)

    def read(moment: Any) -> jax.Array:
        return decode(moment) if isinstance(moment, Blocks) else moment

    def init(params: Any) -> Adam8BitState:
        zeros = {path: jnp.zeros(value.shape, jnp.float32) for path, value in params.items()}
        return Adam8BitState(
            jnp.zeros((), jnp.int32),
            {path: held(path, zero, signed=True) for path, zero in zeros.items()},
            {path: held(path, zero, signed=False) for path, zero in zeros.items()},
        )

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Adam8BitState]:
        count = optax.safe_increment(state.count)
        directions, mu, nu = {}, {}, {}
        for path, gradient in gradients.items():
            first = beta1 * read(state.mu[path]) + (1 - beta1) * gradient
            second = beta2 * read(state.nu[path]) + (1 - beta2) * jnp.square(gradient)
            root = jnp.sqrt(second / (1 - beta2**count))
            directions[path] = first / (1 - beta1**count) / (root + epsilon)
            mu[path], nu[path] = held(path, first, signed=True), held(path, second, signed=False)
        return directions, Adam8BitState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def _in_blocks(values: jax.Array) -> jax.Array:
    """values [*shape] as [*shape[:-1], blocks, block]; an axis shorter than a block is one block."""
    size = values.shape[-1]
    block = min(BLOCK, size)
    missing = -size % block
    if missing:
        values = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)])
    return values.reshape(*values.shape[:-1], -1, block)


def _share(codes: jax.Array, first: int) -> jax.Array:
    """What a code from 0 to the last but the top stands for, as a share of its block's largest magnitude. The lowest
    decade has `first` cells from 0.1 to 1, and each other one twice as many as that below it."""
    place = jnp.maximum(codes, 1) + (first - 1)
    bits = 31 - jax.lax.clz(place)
    cells = jnp.left_shift(1, bits)
    share = (0.1 + 0.9 * (place - cells + 0.5) / cells) / _power(bits - (first - 1))
    return jnp.where(codes > 0, share, 0.0)


def _power(decade: jax.Array) -> jax.Array:
    """10 to the power of 6 - `decade`: what numbers of a decade from 0 to 6 are multiplied by to lie between 0.1 and 1.
    Exact on every device, which pow is not."""
    power = jnp.ones(decade.shape, jnp.float32)
    for one in range(DECADES - 1):
        power = jnp.where(decade == one, 10.0 ** (DECADES - 1 - one), power)
    return power
