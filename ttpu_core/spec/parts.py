"""The parts of an architecture, as frozen values: what family hooks return.

The fields are the knobs by which decoder-only models differ; a default is the commonest value. A layer that these
knobs cannot describe names its own mixer or block by import string, per backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ttpu_core.errors import ConfigError
from ttpu_core.spec.rope import RopeSpec

NormKind = Literal["rms", "layer", "none"]
Placement = Literal["pre", "post", "sandwich", "parallel", "parallel_two_norms", "none"]
Scalar = bool | int | float | str | None


@dataclass(frozen=True)
class NormSpec:
    """A normalisation. `offset` is added to the scale (1 for gemma's `1 + w`); `scale_in_fp32` multiplies by the scale
    before the cast back to the activations' dtype (olmo2, gemma) instead of after it (llama). Kind "none" leaves its
    input as it is."""

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
    """Softmax attention of one layer, with every head count per layer.

    `scale` None means head_dim ** -0.5. Without `causal` a window reaches as far ahead as back. `clip_qkv` bounds
    queries, keys and values after their norms and before rope; `output_norm` runs over all heads' features at once.
    `window` counts the tokens a query sees, itself included; `chunk` bounds
    attention to blocks of that many positions. `qk_norm_scope` "head" normalises each head with one shared scale,
    "full" all heads at once before they are split, "per_head" each head with its own scale. `kv_from_layer` reads
    the keys and values of an earlier layer; `value_is_key` takes the unrotated key projection as value. `norm_features`
    are the features of queries and of keys that a norm over all heads counts where some heads are padding
    (`ttpu_core.sharding.padding`)."""

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
        """Refuse query heads that the KV heads cannot share evenly, which `q_per_kv` would drop."""
        if self.num_kv_heads < 1 or self.num_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"attention was described with {self.num_heads} query heads for {self.num_kv_heads} key/value heads, "
                "but the first must be a positive multiple of the second: correct the config or `ttpu_attention`."
            )

    @property
    def q_per_kv(self) -> int:
        """Query heads that read one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def value_dim(self) -> int:
        """Features per head of the values."""
        return self.v_head_dim or self.head_dim

    @property
    def softmax_scale(self) -> float:
        """What query-key products are multiplied by."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def kind(self) -> str:
        """One word for tables: full, sliding, chunked."""
        return "sliding" if self.window else "chunked" if self.chunk else "full"


@dataclass(frozen=True)
class StateSpec:
    """One cached tensor that a custom mixer carries from token to token, per sequence (no batch axis in `shape`). A
    dimension whose axis is `sequence` has one entry per cached token, whatever number stands in `shape` (write 0)."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: str | None = None


@dataclass(frozen=True)
class CustomSpec:
    """A part that the shared decoder does not know.

    `implementations` maps a backend's name to the import string (`package.module:object`) that only that backend
    imports; a name without one is looked up among the backend's own. `options` are the values that it needs,
    `parameters` what it stores."""

    name: str
    implementations: tuple[tuple[str, str], ...] = ()
    parameters: tuple[tuple[str, Parameter], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def kind(self) -> str:
        """One word for tables."""
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

    `state` is what it carries from token to token; `rope` is rotated by as attention's is."""

    state: tuple[StateSpec, ...] = ()
    rope: RopeSpec | None = None


@dataclass(frozen=True)
class MLPSpec:
    """A dense feed-forward layer: gated (down(act(gate(x)) * up(x))) or plain (down(act(up(x)))).

    With `sparsity`, the activation is given only what exceeds that quantile of a token's features, taken for normally
    distributed (gemma3n)."""

    intermediate_size: int
    activation: ActivationSpec = ActivationSpec()
    gated: bool = True
    bias: bool = False
    inner_norm: NormSpec | None = None
    sparsity: float = 0.0


@dataclass(frozen=True)
class RouterSpec:
    """How tokens choose experts.

    `score` is applied to all logits before the choice, except "topk_softmax", which normalises the chosen ones only.
    `correction_bias` is added for the choice but not for the weights. `renormalize` divides the chosen weights by their
    sum plus `renormalize_eps`. With `groups`, experts are first cut to the
    `top_groups` best groups by `group_score`. `weight_on` "input" multiplies the expert's input (llama4)."""

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
    """A mixture of experts, with an optional shared expert and an optional dense MLP beside it."""

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
        """Refuse a choice that cannot be made."""
        router, experts = self.router, self.num_experts
        if not 1 <= self.experts_per_token <= experts:
            raise ConfigError(
                f"a mixture was described that gives each token {self.experts_per_token} of {experts} experts, but it "
                "must be at least one and at most all: correct the config or `ttpu_mlp`."
            )
        if router.groups < 1 or experts % router.groups or not 1 <= router.top_groups <= router.groups:
            raise ConfigError(
                f"a mixture was described that chooses from {router.top_groups} of {router.groups} groups of {experts} "
                "experts, but the groups must share the experts evenly and be as many: correct the config or "
                "`ttpu_mlp`."
            )
        if router.top_groups * (experts // router.groups) < self.experts_per_token:
            raise ConfigError(
                f"a mixture was described whose {router.top_groups} best groups hold "
                f"{router.top_groups * (experts // router.groups)} experts, fewer than the {self.experts_per_token} of "
                "each token: correct the config or `ttpu_mlp`."
            )


@dataclass(frozen=True)
class BlockSpec:
    """How mixer and MLP sit on the residual stream.

    `residual_multiplier` scales what a sub-layer adds; `layer_scalar` is one learned factor on the layer's output. A
    block with another topology names its own implementation as `custom`; it has the parameters of the layer's mixer,
    MLP and norms (placement "none" for no norms), and its own."""

    placement: Placement = "pre"
    residual_multiplier: float = 1.0
    layer_scalar: bool = False
    custom: CustomSpec | None = None


@dataclass(frozen=True)
class EmbeddingSpec:
    """Token embedding. `scale` multiplies it in the weights' dtype; `positions` rows of learned positions start at
    `position_offset`. A `custom` embedding has parameters of its own beside the table, and may give each layer an
    input beside the residual stream, or make the stream of several. `table_rows` counts the rows of table and head
    where they are padded (`ttpu_core.sharding.padding`): those from `vocab_size` on belong to no token."""

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
        """Rows of the token table and of the head, with those that belong to no token."""
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
    """One decoder layer. `norm` is the normalisation of the residual stream wherever the placement puts one."""

    mixer: AttentionSpec | MixerSpec
    mlp: MLPSpec | MoESpec | None
    norm: NormSpec
    block: BlockSpec = BlockSpec()


@dataclass(frozen=True)
class Parameter:
    """A parameter's shape, the logical axis of each dimension (None: never sharded), how a fresh one is filled, and the
    dtype that it keeps whatever the model's is (router biases, decay rates)."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Literal["normal", "ones", "zeros"] = "normal"
    dtype: str | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        total = 1
        for dim in self.shape:
            total *= dim
        return total


@dataclass(frozen=True)
class TorchPatch:
    """One replacement in the stock PyTorch model: what (`target` import path), by what, why, and when."""

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
