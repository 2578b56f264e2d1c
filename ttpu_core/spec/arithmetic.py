"""Cost formulas of a model: bits per dtype and cached element, FLOPs of products and of attention, and KV cache
elements per token. The planner, engine metrics, kernels and the compiler's reports use them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from types import MappingProxyType

from ttpu_core.spec import axes
from ttpu_core.spec.attention import AttentionSpec
from ttpu_core.spec.feed_forward import MLPSpec, MoESpec
from ttpu_core.spec.parts import MixerSpec

BITS: Mapping[str, int] = MappingProxyType(
    {"bool": 8, "complex64": 64, "complex128": 128, "bfloat16": 16, "float16": 16, "float32": 32, "float64": 64}
    | {f"{sign}int{bits}": bits for sign in ("", "u") for bits in (2, 4, 8, 16, 32, 64)}
    | dict.fromkeys(("float8_e4m3", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e3m4"), 8)
    | dict.fromkeys(("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 8)
    | {"float6_e2m3fn": 6, "float6_e3m2fn": 6, "float4_e2m1fn": 4}
)
"""Bits per element by dtype name, as numpy and ml_dtypes spell it."""


CACHE_DTYPES: Mapping[str, str] = MappingProxyType({"int8": "int8", "fp8": "float8_e4m3fn"})
"""The dtypes of quantized keys and values, by the names that users write."""


def cached_bits(dtype: str, features: int) -> float:
    """Bits per element of cached keys or values with this many features per head. int8 has a float32 scale for each
    token and head."""
    return BITS[dtype] + (BITS["float32"] / features if dtype == "int8" else 0.0)


def product_flops(elements: float, tokens: float) -> float:
    """FLOPs of multiplying `tokens` vectors by a kernel of `elements` elements: one multiplication and one addition
    per element."""
    return 2.0 * elements * tokens


def attention_flops(heads: int, mixer: AttentionSpec, pairs: float) -> float:
    """FLOPs of softmax attention: scores and weighted sums.

    Args:
        heads: query heads to count, of the whole layer or of one device.
        mixer: the attention layer.
        pairs: number of (query token, key token) pairs.
    """
    return 2.0 * heads * mixer.maps * (mixer.map_dim + mixer.value_dim) * pairs


def kv_elements(mixer: AttentionSpec) -> int:
    """Elements per token of the keys and values that attention reads in this layer."""
    return mixer.num_kv_heads * (mixer.head_dim + mixer.value_dim)


def kept_elements(mixer: AttentionSpec | MixerSpec) -> int:
    """Elements per token that a layer caches. Zero if it reads another layer's keys and values."""
    if isinstance(mixer, AttentionSpec):
        return 0 if mixer.kv_from_layer is not None else kv_elements(mixer)
    growing = (state for state in mixer.state if axes.SEQUENCE in state.axes)
    return sum(prod(d for d, axis in zip(s.shape, s.axes, strict=True) if axis != axes.SEQUENCE) for s in growing)


REWOUND = 16
"""Newest tokens that can be taken back from a contiguous cache, where nothing else is said."""
WIDE_WINDOW = 512
"""Tokens of a window from which on its slots come in whole lanes of a TPU's registers (128)."""


def kept_slots(mixer: AttentionSpec, slots: int, rewound: int = REWOUND) -> int:
    """Slots of each row that a layer has in a contiguous cache of `slots` tokens: all of them, or, where each query
    sees a window or chunk, those of the newest tokens that a query can see after `rewound` tokens were taken back."""
    reach = min((size for size in (mixer.window, mixer.chunk) if size is not None), default=None)
    if reach is None or not mixer.causal:
        return slots
    whole = 128 if reach >= WIDE_WINDOW else 16
    return min(slots, -(-(reach + rewound) // whole) * whole)


def attended_tokens(mixer: AttentionSpec, context: int) -> int:
    """Tokens that the last token of a context of `context` tokens attends to. A window or chunk limits it."""
    return min(context, mixer.window or mixer.chunk or context)


def expert_shares(mlp: MLPSpec | MoESpec | None, tokens: int) -> tuple[float, float]:
    """The share of the experts' kernels that `tokens` tokens read at most, and the share that multiplies each token.
    Both are 1 for a layer without experts."""
    if not isinstance(mlp, MoESpec):
        return 1.0, 1.0
    each = mlp.experts_per_token / mlp.choices
    return min(1.0, tokens * each), each
