"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) as a `LatentAttentionSpec`, a mixer that backends
implement themselves. `ttpu_core.mapping.layout` has the rules for its checkpoint tensors.

The keys and values of all heads are linear functions of one short latent vector per token. Only this vector and one
rotated key, which all heads share, are cached."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ttpu_core.errors import ConfigError
from ttpu_core.spec import AttentionSpec, MixerSpec, NormSpec, Parameter, QueryTemperature, StateSpec, axes
from ttpu_core.spec.rope import NO_ROPE, RopeSpec

LATENT_NORM = NormSpec(eps=1e-6)
"""DeepSeek's code normalises latents with this epsilon, whatever `rms_norm_eps` a config has."""


@dataclass(frozen=True)
class LatentAttentionSpec(MixerSpec):
    """Latent attention of one layer, created by `latent_attention`. Its sizes are its options."""

    @property
    def num_heads(self) -> int:
        """Number of heads. Each head has its own key."""
        value: int = self.option("num_heads")
        return value

    @property
    def q_lora_rank(self) -> int | None:
        """Features of the latent from which queries are computed; None computes them from the residual stream."""
        value: int | None = self.option("q_lora_rank")
        return value

    @property
    def kv_lora_rank(self) -> int:
        """Features of the latent from which keys and values are computed."""
        value: int = self.option("kv_lora_rank")
        return value

    @property
    def qk_nope_head_dim(self) -> int:
        """Features per head of queries and keys without positions."""
        value: int = self.option("qk_nope_head_dim")
        return value

    @property
    def qk_rope_head_dim(self) -> int:
        """Rotated features per head. All heads share the rotated key."""
        value: int = self.option("qk_rope_head_dim")
        return value

    @property
    def v_head_dim(self) -> int:
        """Features per head of values."""
        value: int = self.option("v_head_dim")
        return value

    @property
    def scale(self) -> float:
        """Scale of the scores."""
        value: float = self.option("scale")
        return value

    @property
    def norm(self) -> NormSpec:
        """Norm of the latents."""
        value: NormSpec = self.option("norm")
        return value

    @property
    def latent_scale(self) -> float:
        """Factor on the normed latents of keys and values."""
        value: float = self.option("latent_scale")
        return value

    @property
    def query_temperature(self) -> QueryTemperature | None:
        """Scales queries by position."""
        value: QueryTemperature | None = self.option("query_temperature")
        return value

    def with_heads(self, num_heads: int) -> LatentAttentionSpec:
        """Return the same layer with heads appended up to `num_heads`. The output kernel merges heads into its columns;
        heads are the first dimension of the other kernels."""
        before = self.num_heads

        def grown(name: str, parameter: Parameter) -> Parameter:
            first, *rest = parameter.shape
            if name == "output.kernel":
                return replace(parameter, shape=(first, rest[0] // before * num_heads))
            return replace(parameter, shape=(num_heads, *rest)) if parameter.axes[0] == axes.Q_HEADS else parameter

        return replace(
            self,
            parameters=tuple((name, grown(name, parameter)) for name, parameter in self.parameters),
            options=tuple((name, num_heads if name == "num_heads" else value) for name, value in self.options),
        )


def latent_attention(
    *,
    hidden_size: int,
    num_heads: int,
    kv_lora_rank: int,
    qk_nope_head_dim: int,
    qk_rope_head_dim: int,
    v_head_dim: int,
    rope: RopeSpec,
    q_lora_rank: int | None = None,
    scale: float | None = None,
    bias: bool = False,
    norm: NormSpec = LATENT_NORM,
    latent_scale: float = 1.0,
    query_temperature: QueryTemperature | None = None,
) -> LatentAttentionSpec:
    """Latent attention of one layer.

    Args:
        hidden_size: features of the residual stream.
        num_heads: number of heads; each has its own key.
        kv_lora_rank: features of the latent from which keys and values are computed.
        qk_nope_head_dim: features per head of queries and keys without positions.
        qk_rope_head_dim: rotated features per head; all heads share the rotated key.
        v_head_dim: features per head of values.
        rope: a rope with `rotary_dim` equal to `qk_rope_head_dim`, or `NO_ROPE` to leave these features unrotated.
        q_lora_rank: features of the latent from which queries are computed; None computes them from the residual
            stream.
        scale: scale of the scores; None means (qk_nope_head_dim + qk_rope_head_dim) ** -0.5.
        bias: whether the projections to the latents and the output projection have a bias.
        norm: norm of the latents.
        latent_scale: factor on the normed latents of keys and values (LongCat-Flash). A factor on queries is one of
            the scores: see `scale`.
        query_temperature: scales queries by position.

    Raises:
        ConfigError: the rope rotates another number of features.
    """
    if rope != NO_ROPE and rope.rotary_dim != qk_rope_head_dim:
        raise ConfigError(
            f"latent attention was described with {qk_rope_head_dim} rotated features per head, but its rope rotates "
            f"{rope.rotary_dim}: correct the config's 'qk_rope_head_dim' or 'partial_rotary_factor', or `ttpu_mixer`."
        )
    dim = qk_nope_head_dim + qk_rope_head_dim
    options: dict[str, Any] = {
        "num_heads": num_heads,
        "q_lora_rank": q_lora_rank,
        "kv_lora_rank": kv_lora_rank,
        "qk_nope_head_dim": qk_nope_head_dim,
        "qk_rope_head_dim": qk_rope_head_dim,
        "v_head_dim": v_head_dim,
        "scale": dim**-0.5 if scale is None else scale,
        "norm": norm,
        "latent_scale": latent_scale,
        "query_temperature": query_temperature,
    }
    state = (
        StateSpec("latent", (0, kv_lora_rank), (axes.SEQUENCE, None)),
        StateSpec("rope_key", (0, qk_rope_head_dim), (axes.SEQUENCE, None)),
    )
    return LatentAttentionSpec(
        "latent_attention",
        parameters=tuple(_parameters(options, hidden_size, bias=bias)),
        options=tuple(options.items()),
        state=state,
        rope=rope,
    )


def yarn_softmax_scale(rope: RopeSpec, head_dim: int) -> float:
    """The scale of the scores if yarn's `mscale_all_dim` sharpens them (DeepSeek-V2; `yarn_apply_mscale` in
    transformers): head_dim ** -0.5 * (1 + 0.1 * mscale_all_dim * log(factor)) ** 2."""
    factor, mscale = rope.factor or 1.0, rope.mscale_all_dim or 0.0
    sharpened = 1.0 if factor <= 1 or rope.type == "default" else 1.0 + 0.1 * mscale * math.log(factor)
    return float(head_dim**-0.5 * sharpened**2)


def _parameters(options: Mapping[str, Any], hidden: int, *, bias: bool) -> Iterator[tuple[str, Parameter]]:
    heads, q_rank, rank = (options[name] for name in ("num_heads", "q_lora_rank", "kv_lora_rank"))
    nope, rotated, value = (options[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
    norm: NormSpec = options["norm"]
    per_head = axes.Q_HEADS, axes.HEAD_DIM

    def down(name: str, size: int) -> Iterator[tuple[str, Parameter]]:
        # Sharded along the residual stream only: the norm needs the whole latent, and the latent is short.
        yield f"{name}_down.kernel", Parameter((size, hidden), (None, axes.EMBED))
        if bias:
            yield f"{name}_down.bias", Parameter((size,), (None,), "zeros")

    def normed(name: str, size: int) -> Iterator[tuple[str, Parameter]]:
        init = "zeros" if norm.offset else "ones"
        if norm.scale:
            yield f"{name}_norm.scale", Parameter((size,), (None,), init)  # type: ignore[arg-type]
        if norm.bias:
            yield f"{name}_norm.bias", Parameter((size,), (None,), "zeros")

    if q_rank is None:
        yield "query.kernel", Parameter((heads, nope + rotated, hidden), (*per_head, axes.EMBED))
    else:
        yield from down("query", q_rank)
        yield from normed("query", q_rank)
        yield "query_up.kernel", Parameter((heads, nope + rotated, q_rank), (*per_head, axes.LATENT))
    yield from down("kv", rank + rotated)
    yield from normed("kv", rank)
    # Separate kernels, because attention reads the cached latents without expanding them to keys and values.
    yield "key_up.kernel", Parameter((heads, nope, rank), (*per_head, axes.LATENT))
    yield "value_up.kernel", Parameter((heads, value, rank), (*per_head, axes.LATENT))
    yield "output.kernel", Parameter((hidden, heads * value), (axes.EMBED, axes.Q_HEADS))
    if bias:
        yield "output.bias", Parameter((hidden,), (axes.NORM,), "zeros")


def latent_pages(spec: LatentAttentionSpec) -> AttentionSpec:
    """Describe the absorbed form of latent attention as an `AttentionSpec`: all heads share one key of kv_lora_rank +
    qk_rope_head_dim features, of which the first kv_lora_rank are the value."""
    rank = spec.kv_lora_rank
    return AttentionSpec(
        num_heads=spec.num_heads,
        num_kv_heads=1,
        head_dim=rank + spec.qk_rope_head_dim,
        v_head_dim=rank,
        scale=spec.scale,
    )
