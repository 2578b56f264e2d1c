"""What softmax attention is, with everything in which models differ there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ttpu_core.errors import ConfigError
from ttpu_core.spec.norm import NormSpec
from ttpu_core.spec.rope import RopeSpec


@dataclass(frozen=True)
class QueryTemperature:
    """Scales queries by position p: 1 + scale * log(offset + floor((p + shift) / period)).

    llama4: offset 1, shift 1, on layers without rope. ministral3: offset 1, shift 0."""

    scale: float
    period: float
    offset: float = 1.0
    shift: float = 0.0


@dataclass(frozen=True)
class OutputGate:
    """Attention output times activation(gate): one gate per feature (qwen3-next, afmoe) or per head (laguna)."""

    activation: Literal["sigmoid", "softplus"] = "sigmoid"
    per: Literal["feature", "head"] = "feature"
    bias: bool = False


@dataclass(frozen=True)
class AlibiSpec:
    """Position biases instead of rope (arXiv 2108.12409): slope(head) * key position, added to the logits.

    `scaled` adds the bias before the softmax scale multiplies (falcon) instead of after it (bloom, mpt); `bfloat16`
    rounds slopes, positions and biases, as falcon does."""

    max_bias: float = 8.0
    scaled: bool = False
    bfloat16: bool = False

    def slopes(self, heads: int) -> tuple[float, ...]:
        """The slope of each of so many heads: from 2 ** (-max_bias / heads) down to 2 ** -max_bias for a power of two;
        else those of the next power of two, every second one first, then what is still needed of the others."""
        count = 1 << (heads - 1).bit_length()
        powers = [2.0 ** (-self.max_bias * (head + 1) / count) for head in range(count)]
        return tuple(powers if count == heads else (powers[1::2] + powers[::2])[:heads])


@dataclass(frozen=True)
class DifferentialSpec:
    """Differential attention (arXiv 2410.05258). The two halves of a head's queries and keys have a softmax map each,
    over the head's values. The head's output is what the first map gives minus lambda times what the second one gives;
    it is normed over the head's features and multiplied by 1 - `initial`.

    lambda = exp(q1 · k1) - exp(q2 · k2) + `initial`, of four learned vectors with as many features as a half.

    Args:
        initial: the part of lambda that is not learned.
        norm: of each head's output; it has no scale.
    """

    initial: float
    norm: NormSpec


@dataclass(frozen=True)
class AttentionSpec:
    """Softmax attention of one layer. Every layer has its own head counts.

    Args:
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_dim: features per head of queries and keys.
        v_head_dim: features per head of values; None means `head_dim`.
        rope: rotation of queries and keys; None lets `ttpu_rope` answer.
        scale: softmax scale; None means head_dim ** -0.5.
        causal: whether a query sees only earlier tokens. Without it a window reaches as far ahead as back.
        window: number of tokens that a query sees, itself included.
        chunk: attention stays inside blocks of this many positions.
        clip_qkv: bound on queries, keys and values, applied after their norms and before rope.
        qk_norm_scope: "head" normalises each head with one shared scale, "full" normalises all heads together, and
            "per_head" normalises each head with its own scale.
        output_norm: norm over the features of all heads together.
        value_is_key: the unrotated key projection serves as value.
        differential: each head has two softmax maps, on the halves of its features; `rope` rotates each half, and
            `scale` None means (head_dim / 2) ** -0.5. Checkpoints hold the first halves of all heads, then the second.
        kv_from_layer: index of the earlier layer whose keys and values this layer reads.
        norm_features: numbers of query features and of key features that a norm over all heads counts if some heads
            are padding (`ttpu_core.sharding.padding`).

    Raises:
        ConfigError: the number of query heads is not a positive multiple of the number of KV heads, or heads with two
            halves have an odd number of features.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    rope: RopeSpec | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    scale: float | None = None
    logit_softcap: float | None = None
    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    sinks: bool = False
    alibi: AlibiSpec | None = None
    clip_qkv: float | None = None
    q_norm: NormSpec | None = None
    k_norm: NormSpec | None = None
    v_norm: NormSpec | None = None
    qk_norm_scope: Literal["head", "full", "per_head"] = "head"
    qk_norm_after_rope: bool = False
    query_temperature: QueryTemperature | None = None
    output_gate: OutputGate | None = None
    output_norm: NormSpec | None = None
    value_scale: float = 1.0
    value_is_key: bool = False
    kv_from_layer: int | None = None
    norm_features: tuple[int, int] | None = None
    differential: DifferentialSpec | None = None

    def __post_init__(self) -> None:
        """Check that the KV heads share the query heads evenly."""
        if self.num_kv_heads < 1 or self.num_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"attention was described with {self.num_heads} query heads for {self.num_kv_heads} key/value heads, "
                "but the first must be a positive multiple of the second: correct the config or `ttpu_attention`."
            )
        if self.differential is not None and self.head_dim % 2:
            raise ConfigError(
                f"differential attention was described with heads of {self.head_dim} features, but each head has two "
                "halves: correct the config or `ttpu_attention`."
            )

    @property
    def q_per_kv(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def value_dim(self) -> int:
        """Features per head of the values."""
        return self.v_head_dim or self.head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor that scales query-key products."""
        return self.map_dim**-0.5 if self.scale is None else self.scale

    @property
    def maps(self) -> int:
        """Softmax maps of each query head."""
        return 1 if self.differential is None else 2

    @property
    def map_dim(self) -> int:
        """Features of queries and keys that each softmax map reads."""
        return self.head_dim // self.maps

    @property
    def one_map_each(self) -> AttentionSpec:
        """The same attention with a query head for each softmax map."""
        if self.differential is None:
            return self
        return replace(self, num_heads=self.maps * self.num_heads, scale=self.softmax_scale, differential=None)

    @property
    def kind(self) -> str:
        """The kind of mask in one word: full, sliding or chunked."""
        return "sliding" if self.window else "chunked" if self.chunk else "full"
