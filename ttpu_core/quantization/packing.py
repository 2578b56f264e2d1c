"""Numbers of a few bits in the words of checkpoint files, unpacked with numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The numbers of float4_e2m1fn by code."""

def _e4m3() -> Array:
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, (codes & 7) / 8
    magnitude = np.where(exponent == 0, fraction * 2.0**-6, (1 + fraction) * 2.0 ** (exponent - 7))
    magnitude[codes & 127 == 127] = np.nan
    return np.where(codes < 128, magnitude, -magnitude).astype(np.float32)


E4M3 = _e4m3()
"""The numbers of float8_e4m3fn by code."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AWQ's gemm layout: the i-th 4 bits of a word, from the lowest, hold this one of the word's 8 columns."""


def unpack(words: Array, bits: int) -> Array:
    """The unsigned numbers of 4 or 8 bits in words [..., n], lowest bits first: uint8 [..., numbers]."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    return octets if bits == 8 else nibbles(octets)


def nibbles(octets: Array) -> Array:
    """The two numbers of 4 bits in each of octets [..., n], the lower first: uint8 [..., 2 * n]."""
    result = np.empty((*octets.shape[:-1], 2 * octets.shape[-1]), np.uint8)
    result[..., 0::2] = octets & 15
    result[..., 1::2] = octets >> 4
    return result


def unpack_awq(words: Array) -> Array:
    """The unsigned 4-bit numbers in words int32 [..., n] of AWQ's gemm layout: uint8 [..., 8 * n]."""
    found = unpack(words, 4).reshape(*words.shape, 8)
    result = np.empty_like(found)
    result[..., list(AWQ_ORDER)] = found
    return result.reshape(*words.shape[:-1], -1)


def signed(numbers: Array, bits: int) -> Array:
    """Unsigned numbers shifted by half of their range: int8 of the same shape."""
    return (numbers ^ (1 << (bits - 1))).astype(np.uint8).view(np.int8) if bits == 8 else (
        numbers.astype(np.int8) - np.int8(8)
    )


def floats(raw: Array, stored: str) -> Array:
    """float32 of the raw numbers of a tensor (`ttpu_core.checkpoint.decoded.RAW`) that is stored in this dtype."""
    if stored == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    if stored in ("F8_E8M0", "U8"):  # exponents; 255 means NaN
        with np.errstate(over="ignore"):
            result = np.ldexp(np.float32(1), raw.astype(np.int32) - 127)
        return np.where(raw == 255, np.float32(np.nan), result)
    return raw.astype(np.float32)
