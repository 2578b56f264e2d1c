"""What an architecture *is*, as data. Family hooks give the parts, `ttpu_core.architecture` joins them into an
`ArchitectureSpec`: frozen, hashable (a static jit argument), printable, and the only thing a backend reads.

The fields are the knobs by which decoder-only models differ; a default is the commonest value. A layer that these
knobs cannot say names its own mixer or block by import string, per backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal

from ttpu_core.errors import ConfigError
from ttpu_core.rope import NO_ROPE, RopeSpec

NormKind = Literal["rms", "layer", "none"]
Placement = Literal["pre", "post", "sandwich", "parallel", "parallel_two_norms"]
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
    the keys and values of an earlier layer; `value_is_key` takes the unrotated key projection as value."""

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
    """One cached tensor that a custom mixer carries from token to token, per sequence (no batch axis in `shape`)."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: str | None = None


@dataclass(frozen=True)
class MixerSpec:
    """A token mixer that the shared decoder does not know (linear attention, MLA, a state-space model).

    `implementations` maps a backend's name to the import string (`package.module:object`) that only that backend
    imports; `options` are the values it needs; `parameters` and `state` say what it stores."""

    name: str
    implementations: tuple[tuple[str, str], ...]
    parameters: tuple[tuple[str, Parameter], ...] = ()
    state: tuple[StateSpec, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def kind(self) -> str:
        """One word for tables."""
        return self.name


@dataclass(frozen=True)
class MLPSpec:
    """A dense feed-forward layer: gated (down(act(gate(x)) * up(x))) or plain (down(act(up(x))))."""

    intermediate_size: int
    activation: ActivationSpec = ActivationSpec()
    gated: bool = True
    bias: bool = False
    inner_norm: NormSpec | None = None


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


@dataclass(frozen=True)
class BlockSpec:
    """How mixer and MLP sit on the residual stream.

    `residual_multiplier` scales what a sub-layer adds; `layer_scalar` is one learned factor on the layer's output. A
    block with another topology names its own implementation, as a `MixerSpec` does."""

    placement: Placement = "pre"
    residual_multiplier: float = 1.0
    layer_scalar: bool = False
    custom: MixerSpec | None = None


@dataclass(frozen=True)
class EmbeddingSpec:
    """Token embedding. `scale` multiplies it in the weights' dtype; `positions` rows of learned positions start at
    `position_offset`."""

    vocab_size: int
    hidden_size: int
    scale: float | None = None
    norm: NormSpec | None = None
    positions: int | None = None
    position_offset: int = 0


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


@dataclass(frozen=True)
class LayerGroup:
    """`repeats` copies of a run of layers, the first of them starting at `start`."""

    start: int
    unit: tuple[LayerSpec, ...]
    repeats: int


@dataclass(frozen=True)
class ArchitectureSpec:
    """A whole decoder. `parameter_axes` overrides logical axes by parameter path pattern (from
    `ttpu_sharding_rules`); `kernels` and `torch_patches` come from the family and from patch packs."""

    model_type: str
    embedding: EmbeddingSpec
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec | None
    head: HeadSpec
    max_position_embeddings: int
    parameter_axes: tuple[tuple[str, tuple[str | None, ...]], ...] = ()
    kernels: tuple[KernelChoice, ...] = ()
    torch_patches: tuple[TorchPatch, ...] = ()

    def __hash__(self) -> int:
        """A hash of the fields, computed once: jit asks for it at every call, and 126 layers take 160 µs."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(_fields(self))

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: what is cached follows from them, and hashes of strings differ between processes."""
        return {name: value for name, value in vars(self).items() if name in self.__dataclass_fields__}

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table."""
        return self.embedding.vocab_size

    @property
    def hidden_size(self) -> int:
        """Features of the residual stream."""
        return self.embedding.hidden_size

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """Every parameter by its Flax path, in model order, as shared decoders store them."""
        from ttpu_core.parameters import model_parameters

        return model_parameters(self)

    @cached_property
    def num_parameters(self) -> int:
        """Elements over all parameters; a tied head counts once."""
        return sum(parameter.size for parameter in self.parameters.values())

    def kv_bytes_per_token(self, bytes_per_element: int) -> int:
        """Bytes that one more token adds to the KV cache of one sequence, layers with windows counted like the rest."""
        return sum(
            layer.mixer.num_kv_heads * (layer.mixer.head_dim + layer.mixer.value_dim) * bytes_per_element
            for layer in self.layers
            if isinstance(layer.mixer, AttentionSpec) and layer.mixer.kv_from_layer is None
        )

    def groups(self) -> tuple[LayerGroup, ...]:
        """Runs of repeated layers: the shortest unit that repeats, then whatever is left over.

        Equal layers share one traced body, and a stacked parameter holds one group's copies of one layer."""
        return tuple(_groups(self.layers))


_fields = attrgetter(*ArchitectureSpec.__dataclass_fields__)


def _groups(layers: tuple[LayerSpec, ...]) -> Iterator[LayerGroup]:
    numbers: dict[LayerSpec, int] = {}
    kinds = [numbers.setdefault(layer, len(numbers)) for layer in layers]  # numbers compare faster than layers
    start = 0
    while start < len(kinds):
        rest = kinds[start:]
        unit, copies = 1, 1
        for period in range(1, len(rest) // 2 + 1):
            repeats = 1
            while rest[repeats * period : (repeats + 1) * period] == rest[:period]:
                repeats += 1
            if repeats > 1 and repeats * period > unit * copies:
                unit, copies = period, repeats
        yield LayerGroup(start, layers[start : start + unit], copies)
        start += unit * copies


__all__ = [
    "NO_ROPE",
    "ActivationSpec",
    "AlibiSpec",
    "ArchitectureSpec",
    "AttentionSpec",
    "BlockSpec",
    "EmbeddingSpec",
    "HeadSpec",
    "KernelChoice",
    "LayerGroup",
    "LayerSpec",
    "MLPSpec",
    "MixerSpec",
    "MoESpec",
    "NormSpec",
    "OutputGate",
    "Parameter",
    "QueryTemperature",
    "RopeSpec",
    "RouterSpec",
    "StateSpec",
    "TorchPatch",
]
