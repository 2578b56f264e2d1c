"""The description of an architecture as data: its parts, the whole decoder, its parameters, logical axes, and rotary
embeddings."""

from ttpu_core.spec.architecture_spec import ArchitectureSpec, LayerGroup
from ttpu_core.spec.attention import AlibiSpec, AttentionSpec, DifferentialSpec, OutputGate, QueryTemperature
from ttpu_core.spec.feed_forward import NO_MLP, ActivationSpec, MLPSpec, MoESpec, RouterSpec
from ttpu_core.spec.norm import NormSpec
from ttpu_core.spec.parts import (
    NO_MIXER,
    BlockSpec,
    CustomSpec,
    EmbeddingSpec,
    HeadSpec,
    KernelChoice,
    LayerSpec,
    MixerSpec,
    Parameter,
    Placement,
    SharedSpec,
    StateSpec,
    TorchPatch,
)
from ttpu_core.spec.rope import NO_ROPE, RopeSpec

__all__ = [
    "NO_MIXER",
    "NO_MLP",
    "NO_ROPE",
    "ActivationSpec",
    "AlibiSpec",
    "ArchitectureSpec",
    "AttentionSpec",
    "BlockSpec",
    "CustomSpec",
    "DifferentialSpec",
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
    "Placement",
    "QueryTemperature",
    "RopeSpec",
    "RouterSpec",
    "SharedSpec",
    "StateSpec",
    "TorchPatch",
]
