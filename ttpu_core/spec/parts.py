"""The parts of an architecture as frozen values. Family hooks return them.

Each field is one of the ways in which decoder-only models differ; its default is the commonest value. A layer that
these fields cannot describe names its own mixer or block by import string, per backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ttpu_core.errors import ConfigError
from ttpu_core.spec.kernel_format import KernelFormat
from ttpu_core.spec.rope import RopeSpec

NormKind = Literal["rms", "layer", "none"]
Placement = Literal["pre", "post", "sandwich", "parallel", "parallel_two_norms", "none"]
Scalar = bool | int | float | str | None


@dataclass(frozen=True)
class NormSpec:
    """A normalisation. Kind "none" leaves its input unchanged.

    `offset` is added to the scale (1 for gemma's `1 + w`). `scale_in_fp32` multiplies by the scale before the cast
    back to the activations' dtype (olmo2, gemma) instead of after it (llama)."""

    kind: NormKind = "rms"
    eps: float = 1e-6
    scale: bool = True
    bias: bool = False
    offset: float = 0.0
    scale_in_fp32: bool = False


@dataclass(frozen=True)
class ActivationSpec:
    """An elementwise function by name, with the constants that some models add.

    Names: silu, gelu (erf), gelu_tanh, relu, relu2, xielu (learned), clamped_swiglu (alpha, limit), identity."""

    name: str = "silu"
    alpha: float | None = None
    limit: float | None = None


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

    Slopes run from 2 ** (-max_bias / heads) down to 2 ** -max_bias. `scaled` adds the bias before the softmax scale
    multiplies (falcon) instead of after it (bloom, mpt); `bfloat16` rounds the bias, as falcon does."""

    max_bias: float = 8.0
    scaled: bool = False
    bfloat16: bool = False


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
        kv_from_layer: index of the earlier layer whose keys and values this layer reads.
        norm_features: numbers of query features and of key features that a norm over all heads counts if some heads
            are padding (`ttpu_core.sharding.padding`).

    Raises:
        ConfigError: the number of query heads is not a positive multiple of the number of KV heads.
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

    def __post_init__(self) -> None:
        """Check that the KV heads share the query heads evenly."""
        if self.num_kv_heads < 1 or self.num_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"attention was described with {self.num_heads} query heads for {self.num_kv_heads} key/value heads, "
                "but the first must be a positive multiple of the second: correct the config or `ttpu_attention`."
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
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def kind(self) -> str:
        """The kind of mask in one word: full, sliding or chunked."""
        return "sliding" if self.window else "chunked" if self.chunk else "full"


@dataclass(frozen=True)
class StateSpec:
    """One tensor that a custom mixer caches per sequence; `shape` has no batch axis. A dimension whose axis is
    `sequence` has one entry per cached token, and its number in `shape` is not read (write 0)."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: str | None = None


@dataclass(frozen=True)
class CustomSpec:
    """A part that the shared decoder does not know.

    Args:
        name: the part's name.
        implementations: pairs of a backend's name and the import string (`package.module:object`) that only this
            backend imports. Without an entry, the backend looks the name up among its own implementations.
        parameters: the parameters that the part stores, by name.
        options: the values that the part needs, by name.
    """

    name: str
    implementations: tuple[tuple[str, str], ...] = ()
    parameters: tuple[tuple[str, Parameter], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def kind(self) -> str:
        """The part's name, for tables."""
        return self.name

    def implementation(self, backend: str) -> str | None:
        """The import string for a backend, or None."""
        return dict(self.implementations).get(backend)

    def option(self, name: str) -> Any:
        """The value of an option."""
        return dict(self.options)[name]


@dataclass(frozen=True)
class MixerSpec(CustomSpec):
    """A token mixer that replaces attention (linear attention, MLA, a state-space model).

    `state` lists the tensors that it caches from token to token. `rope` is its rotary embedding, if it has one."""

    state: tuple[StateSpec, ...] = ()
    rope: RopeSpec | None = None


@dataclass(frozen=True)
class MLPSpec:
    """A dense feed-forward layer: gated (down(act(gate(x)) * up(x))) or plain (down(act(up(x)))).

    With `sparsity`, the activation gets only the amount by which a feature exceeds that quantile of the token's
    features, which are assumed to be normally distributed (gemma3n)."""

    intermediate_size: int
    activation: ActivationSpec = ActivationSpec()
    gated: bool = True
    bias: bool = False
    inner_norm: NormSpec | None = None
    sparsity: float = 0.0


@dataclass(frozen=True)
class RouterSpec:
    """How tokens choose experts.

    `score` is applied to all logits before the choice; "topk_softmax" normalises only the chosen logits.
    `correction_bias` affects the choice but not the weights. `renormalize` divides the chosen weights by their sum
    plus `renormalize_eps`. With `groups`, experts are first limited to the `top_groups` best groups by
    `group_score`. `weight_on` "input" multiplies the expert's input (llama4)."""

    score: Literal["softmax", "sigmoid", "topk_softmax", "sparsemixer"] = "softmax"
    renormalize: bool = False
    renormalize_eps: float = 0.0
    correction_bias: bool = False
    bias: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    scaling_factor: float = 1.0
    weight_on: Literal["output", "input"] = "output"
    logit_softcap: float | None = None
    norm: NormSpec | None = None
    input_scale: float | None = None
    expert_scale: bool = False


@dataclass(frozen=True)
class MoESpec:
    """A mixture of experts, with an optional shared expert and an optional dense MLP beside it.

    Raises:
        ConfigError: the number of experts per token or of groups does not fit the number of experts.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    activation: ActivationSpec = ActivationSpec()
    gated: bool = True
    router: RouterSpec = RouterSpec()
    expert_bias: bool = False
    shared: MLPSpec | None = None
    shared_gate: bool = False
    dense: MLPSpec | None = None

    def __post_init__(self) -> None:
        """Check that the router can choose the requested experts."""
        router, experts = self.router, self.num_experts
        if not 1 <= self.experts_per_token <= experts:
            raise ConfigError(
                f"a mixture was described that gives each token {self.experts_per_token} of {experts} experts, but the "
                f"number must be from 1 to {experts}: correct the config or `ttpu_mlp`."
            )
        if router.groups < 1 or experts % router.groups or not 1 <= router.top_groups <= router.groups:
            raise ConfigError(
                f"a mixture was described that chooses from {router.top_groups} of {router.groups} groups of {experts} "
                "experts, but the groups must divide the experts evenly, and no more groups can be chosen than there "
                "are: correct the config or `ttpu_mlp`."
            )
        if router.top_groups * (experts // router.groups) < self.experts_per_token:
            raise ConfigError(
                f"a mixture was described whose {router.top_groups} best groups hold "
                f"{router.top_groups * (experts // router.groups)} experts, fewer than the {self.experts_per_token} of "
                "each token: correct the config or `ttpu_mlp`."
            )


@dataclass(frozen=True)
class BlockSpec:
    """How mixer and MLP connect to the residual stream.

    `residual_multiplier` scales the output of each sub-layer. `layer_scalar` is one learned factor on the layer's
    output. A block with another topology names its own implementation as `custom`; it has the parameters of the
    layer's mixer, MLP and norms (placement "none" for no norms), and its own parameters."""

    placement: Placement = "pre"
    residual_multiplier: float = 1.0
    layer_scalar: bool = False
    custom: CustomSpec | None = None


@dataclass(frozen=True)
class EmbeddingSpec:
    """Token embedding.

    `scale` multiplies the embedding in the weights' dtype. `positions` counts learned positions, which start at row
    `position_offset`. A `custom` embedding has parameters besides the table; it may give each layer an additional
    input, or split the residual stream into several. `table_rows` counts the rows of table and head if they are
    padded (`ttpu_core.sharding.padding`): rows from `vocab_size` on belong to no token."""

    vocab_size: int
    hidden_size: int
    scale: float | None = None
    norm: NormSpec | None = None
    positions: int | None = None
    position_offset: int = 0
    custom: CustomSpec | None = None
    table_rows: int | None = None

    @property
    def rows(self) -> int:
        """Rows of the token table and of the head, padding included."""
        return self.vocab_size if self.table_rows is None else self.table_rows


@dataclass(frozen=True)
class HeadSpec:
    """Output head: logits = softcap(multiplier * (x @ W.T + b)). `tied` shares the embedding table."""

    tied: bool = False
    bias: bool = False
    softcap: float | None = None
    multiplier: float = 1.0


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer. `norm` is used at every place where `block.placement` puts a norm."""

    mixer: AttentionSpec | MixerSpec
    mlp: MLPSpec | MoESpec | None
    norm: NormSpec
    block: BlockSpec = BlockSpec()


@dataclass(frozen=True)
class Parameter:
    """Shape, logical axes, initialisation and dtype of a parameter.

    An axis of None is never sharded. `dtype` is set for parameters that keep their dtype whatever the model's dtype
    is (router biases, decay rates). `format` is set for quantized kernels, which are stored as several arrays (see
    `ttpu_core.spec.kernel_format.parts_of`)."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Literal["normal", "ones", "zeros"] = "normal"
    dtype: str | None = None
    format: KernelFormat | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        total = 1
        for dim in self.shape:
            total *= dim
        return total


@dataclass(frozen=True)
class TorchPatch:
    """One replacement in the stock PyTorch model: the import path to replace, the replacement, the reason, and the
    condition."""

    target: str
    replacement: str
    reason: str
    when: str = "always"


@dataclass(frozen=True)
class KernelChoice:
    """An operation's implementation by name or import string, chosen by a family or a patch pack for one backend."""

    operation: str
    implementation: str
    backend: str
    source: str = ""
    reason: str = ""
