"""The parts of an architecture as frozen values: a layer and what it consists of beside attention, feed-forward and
norms, embedding, head, and parameters. Family hooks return them.

Each field is one of the ways in which decoder-only models differ; its default is the commonest value. A layer that
these fields cannot describe names its own mixer or block by import string, per backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ttpu_core.spec.attention import AttentionSpec
from ttpu_core.spec.feed_forward import MLPSpec, MoESpec
from ttpu_core.spec.kernel_format import KernelFormat
from ttpu_core.spec.norm import NormSpec
from ttpu_core.spec.rope import RopeSpec

Placement = Literal["pre", "post", "post_residual", "sandwich", "parallel", "parallel_two_norms", "none"]


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


NO_MIXER = MixerSpec("none")
"""What `ttpu_mixer` answers for a layer that is an MLP alone."""


@dataclass(frozen=True)
class SharedSpec:
    """A block of parameters that several layers use: norms, mixer and MLP, which these layers describe alike. Mixers
    beside attention and parameters of custom blocks are each layer's own.

    Args:
        block: the number of the block.
        qkv_rank: rank of the layer's own update of the shared projections of queries, keys and values, as of a LoRA
            adapter that is a part of the model (arXiv 2411.15242); None for none.
        mlp_rank: the same of the projections into the MLP.
    """

    block: int
    qkv_rank: int | None = None
    mlp_rank: int | None = None


@dataclass(frozen=True)
class BlockSpec:
    """How mixer and MLP connect to the residual stream.

    `placement` "post" norms what a sub-layer adds to the stream; "post_residual" norms the sum (the original
    transformer, arXiv 1706.03762).

    `residual_multiplier` scales the output of each sub-layer, and `mlp_residual_multiplier` that of the MLP where it
    has a factor of its own (no parallel placement has that). `skip_multipliers` scale the residual stream itself where
    the mixer's and the MLP's outputs are added to it. `normed_residual` adds them to the output of the norm before the
    sub-layer instead of its input. `layer_scalar` is one learned factor on the layer's output. `beside` is a mixer with
    a state that reads what attention reads, and whose output is added to attention's. With `reads_embedding` the norm
    before the mixer and the mixer read twice the features: the stream, then the embedding of the tokens. `shared` names
    parameters that other layers use too. A block with another topology names its own implementation as `custom`; it has
    the parameters of the layer's mixer, MLP and norms (placement "none" for no norms), and its own parameters."""

    placement: Placement = "pre"
    residual_multiplier: float = 1.0
    mlp_residual_multiplier: float | None = None
    skip_multipliers: tuple[float, float] = (1.0, 1.0)
    normed_residual: bool = False
    layer_scalar: bool = False
    beside: MixerSpec | None = None
    reads_embedding: bool = False
    shared: SharedSpec | None = None
    custom: CustomSpec | None = None


@dataclass(frozen=True)
class EmbeddingSpec:
    """Token embedding.

    `scale` multiplies the embedding in the weights' dtype. `positions` counts learned positions, which start at row
    `position_offset`. A `custom` embedding has parameters besides the table; it may give each layer an additional
    input, or split the residual stream into several. `table_rows` counts the rows of table and head if they are
    padded (`ttpu_core.sharding.padding`): rows from `vocab_size` on belong to no token. `table_features` counts the
    features of a row of table and head if they are not `hidden_size`: one projection leads from the looked-up rows into
    the residual stream, and one from the final norm to the head."""

    vocab_size: int
    hidden_size: int
    scale: float | None = None
    norm: NormSpec | None = None
    positions: int | None = None
    position_offset: int = 0
    custom: CustomSpec | None = None
    table_rows: int | None = None
    table_features: int | None = None

    @property
    def features(self) -> int:
        """Features of a row of the token table and of the head."""
        return self.hidden_size if self.table_features is None else self.table_features

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

    @property
    def mixers(self) -> tuple[MixerSpec, ...]:
        """The mixers of the layer that are not attention: its own, or one beside its attention."""
        found = (self.mixer, self.block.beside)
        return tuple(mixer for mixer in found if isinstance(mixer, MixerSpec))

    def mixer_inputs(self, hidden_size: int) -> int:
        """The features that the mixer reads, of a residual stream of `hidden_size` features."""
        return hidden_size * (2 if self.block.reads_embedding else 1)


@dataclass(frozen=True)
class Parameter:
    """Shape, logical axes, initialisation and dtype of a parameter.

    An axis of None is never sharded. `dtype` is set for parameters that keep their dtype whatever the model's dtype
    is (router biases, decay rates). `format` is set for quantized kernels, which are stored as several arrays (see
    `ttpu_core.spec.kernel_format.parts_of`). `trained` is False where transformers holds a buffer: training leaves it
    as it is."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Literal["normal", "ones", "zeros"] = "normal"
    dtype: str | None = None
    format: KernelFormat | None = None
    trained: bool = True

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
