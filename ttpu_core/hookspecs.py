"""The questions that the core asks a family plugin. Each hook takes the config, answers with a frozen value, and runs
once per config (once per layer where it takes `layer`); a hook that a family leaves out, or answers with None, falls
to `ttpu_core.defaults`. An implementation may leave out arguments that it does not need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from ttpu_core.config import ModelConfig
    from ttpu_core.mapping import FlaxMapping
    from ttpu_core.spec import (
        ArchitectureSpec,
        AttentionSpec,
        BlockSpec,
        EmbeddingSpec,
        HeadSpec,
        KernelChoice,
        MixerSpec,
        MLPSpec,
        MoESpec,
        NormSpec,
        TorchPatch,
    )
    from ttpu_core.spec.rope import RopeSpec

PROJECT = "ttpu"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec(firstresult=True)
def ttpu_config(config: ModelConfig) -> ModelConfig | None:
    """Fill in the config class's defaults, rename keys to the usual ones, pick the text part of a multimodal parent."""


@hookspec(firstresult=True)
def ttpu_embedding(config: ModelConfig) -> EmbeddingSpec | None:
    """Token embedding: sizes, scale, norm, learned positions."""


@hookspec(firstresult=True)
def ttpu_head(config: ModelConfig) -> HeadSpec | None:
    """Output head: tied or not, bias, softcap, multiplier."""


@hookspec(firstresult=True)
def ttpu_norm(config: ModelConfig) -> NormSpec | None:
    """The normalisation of the residual stream."""


@hookspec(firstresult=True)
def ttpu_final_norm(config: ModelConfig) -> NormSpec | None:
    """The norm before the head, where it is another than `ttpu_norm`'s; kind "none" for no norm at all."""


@hookspec(firstresult=True)
def ttpu_block(config: ModelConfig, layer: int) -> BlockSpec | None:
    """Where norms sit, what scales residuals, or a block of its own."""


@hookspec(firstresult=True)
def ttpu_attention(config: ModelConfig, layer: int) -> AttentionSpec | None:
    """Softmax attention of one layer; a `rope` left None is answered by `ttpu_rope`."""


@hookspec(firstresult=True)
def ttpu_rope(config: ModelConfig, layer: int, attention: AttentionSpec) -> RopeSpec | None:
    """Rotary embedding of one layer; `NO_ROPE` for a layer without positions."""


@hookspec(firstresult=True)
def ttpu_mixer(config: ModelConfig, layer: int) -> MixerSpec | None:
    """A mixer that replaces attention in this layer; None where the layer has attention."""


@hookspec(firstresult=True)
def ttpu_mlp(config: ModelConfig, layer: int) -> MLPSpec | MoESpec | None:
    """Feed-forward part of one layer, dense or mixture of experts."""


@hookspec(firstresult=True)
def ttpu_flax_mapping(config: ModelConfig, spec: ArchitectureSpec) -> FlaxMapping | None:
    """How checkpoint tensors make up the parameters."""


@hookspec
def ttpu_sharding_rules(config: ModelConfig) -> Iterable[tuple[str, tuple[str | None, ...]]] | None:
    """Logical axes for parameters (a regular expression over Flax paths) where the usual ones do not serve."""


@hookspec
def ttpu_torch_patches(config: ModelConfig) -> Iterable[TorchPatch] | None:
    """Replacements in the stock PyTorch model; a later plugin's patch of the same target wins."""


@hookspec
def ttpu_kernels(config: ModelConfig) -> Iterable[KernelChoice] | None:
    """Implementations of operations, by backend; a later plugin's choice for the same operation wins."""
