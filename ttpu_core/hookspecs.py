"""The hooks that the core calls on a family plugin. Each hook takes the config and returns a frozen value. It runs
once per config, or once per layer if it takes `layer`. `ttpu_core.defaults` answers a hook that a family leaves
out or answers with None. An implementation may leave out arguments that it does not need."""

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
    """Fill in the config class's defaults, rename keys to the usual ones, and pick the text part of a multimodal
    parent."""


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
    """The norm before the head if it differs from `ttpu_norm`; kind "none" for no norm."""


@hookspec(firstresult=True)
def ttpu_block(config: ModelConfig, layer: int) -> BlockSpec | None:
    """Norm placement and residual scaling of one layer, or a custom block."""


@hookspec(firstresult=True)
def ttpu_attention(config: ModelConfig, layer: int) -> AttentionSpec | None:
    """Softmax attention of one layer. `ttpu_rope` answers a `rope` that is left None."""


@hookspec(firstresult=True)
def ttpu_rope(config: ModelConfig, layer: int, attention: AttentionSpec) -> RopeSpec | None:
    """Rotary embedding of one layer; `NO_ROPE` for a layer without positions."""


@hookspec(firstresult=True)
def ttpu_mixer(config: ModelConfig, layer: int) -> MixerSpec | None:
    """A mixer that replaces attention in this layer, `NO_MIXER` for a layer that is an MLP alone, or None if the layer
    has attention."""


@hookspec(firstresult=True)
def ttpu_mlp(config: ModelConfig, layer: int) -> MLPSpec | MoESpec | None:
    """Feed-forward part of one layer: dense or mixture of experts; `NO_MLP` for a layer without one."""


@hookspec(firstresult=True)
def ttpu_flax_mapping(config: ModelConfig, spec: ArchitectureSpec) -> FlaxMapping | None:
    """The rules that make parameters from checkpoint tensors."""


@hookspec
def ttpu_sharding_rules(config: ModelConfig) -> Iterable[tuple[str, tuple[str | None, ...]]] | None:
    """Logical axes for parameters (by a regular expression over Flax paths) that replace the usual axes."""


@hookspec
def ttpu_torch_patches(config: ModelConfig) -> Iterable[TorchPatch] | None:
    """Replacements in the stock PyTorch model. A later plugin's patch of the same target wins."""


@hookspec
def ttpu_kernels(config: ModelConfig) -> Iterable[KernelChoice] | None:
    """Implementations of operations by backend. A later plugin's choice for the same operation wins."""
