"""What a model costs by formula: bits of each dtype, floating point operations of products and of attention, and what
a token's keys and values take. The planner, an engine's metrics and the compiler's reports count with these."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from types import MappingProxyType

from ttpu_core.spec import axes
from ttpu_core.spec.parts import AttentionSpec, MixerSpec, MLPSpec, MoESpec

BITS: Mapping[str, int] = MappingProxyType(
    {"bool": 8, "complex64": 64, "complex128": 128, "bfloat16": 16, "float16": 16, "float32": 32, "float64": 64}
    | {f"{sign}int{bits}": bits for sign in ("", "u") for bits in (2, 4, 8, 16, 32, 64)}
    | dict.fromkeys(("float8_e4m3", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e3m4"), 8)
    | dict.fromkeys(("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 8)
    | {"float6_e2m3fn": 6, "float6_e3m2fn": 6, "float4_e2m1fn": 4}
)
"""Bits of one element by dtype, as numpy and ml_dtypes name them."""

QUANTIZED_BITS: Mapping[str, float] = MappingProxyType(
    {"int8": BITS["int8"], "fp8": BITS["float8_e4m3fn"], "int4": BITS["int4"] + BITS["bfloat16"] / 128}
)
"""Bits of one quantized weight with its scales: one scale for each output channel costs nothing, int4 has a bfloat16
scale for every 128 weights."""


def product_flops(elements: float, tokens: float) -> float:
    """Operations of multiplying `tokens` vectors by kernels of so many elements: a multiplication and an addition for
    each."""
    return 2.0 * elements * tokens


def attention_flops(heads: int, mixer: AttentionSpec, pairs: float) -> float:
    """Operations of softmax attention: scores and weighted sums.

    Args:
        heads: query heads that are counted, all of the layer's or one device's.
        pairs: (query token, key token) pairs that are attended to.
    """
    return 2.0 * heads * (mixer.head_dim + mixer.value_dim) * pairs


def kv_elements(mixer: AttentionSpec) -> int:
    """Elements of one token's keys and values that attention reads in this layer."""
    return mixer.num_kv_heads * (mixer.head_dim + mixer.value_dim)


def kept_elements(mixer: AttentionSpec | MixerSpec) -> int:
    """Elements that a layer keeps of each token: none where it reads another layer's keys and values."""
    if isinstance(mixer, AttentionSpec):
        return 0 if mixer.kv_from_layer is not None else kv_elements(mixer)
    growing = (state for state in mixer.state if axes.SEQUENCE in state.axes)
    return sum(prod(d for d, axis in zip(s.shape, s.axes, strict=True) if axis != axes.SEQUENCE) for s in growing)


def attended_tokens(mixer: AttentionSpec, context: int) -> int:
    """Tokens of `context` that the last of them attends to: all of them, or those of its window or chunk."""
    return min(context, mixer.window or mixer.chunk or context)


def expert_shares(mlp: MLPSpec | MoESpec | None, tokens: int) -> tuple[float, float]:
    """The share of the experts' kernels that `tokens` tokens read at most, and the share that multiplies each token;
    both 1 where there are no experts."""
    if not isinstance(mlp, MoESpec):
        return 1.0, 1.0
    each = mlp.experts_per_token / mlp.num_experts
    return min(1.0, tokens * each), each
