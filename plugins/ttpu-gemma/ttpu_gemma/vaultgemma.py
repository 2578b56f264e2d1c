"""VaultGemma: gemma 2 without the norms after the sub-layers, trained with differential privacy."""

from __future__ import annotations

from ttpu_core import hookimpl
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import CheckpointNames, standard_mapping
from ttpu_core.spec import ArchitectureSpec
from ttpu_gemma.gemma2 import ttpu_attention, ttpu_config, ttpu_embedding, ttpu_head, ttpu_mlp, ttpu_norm

__all__ = ["ttpu_attention", "ttpu_config", "ttpu_embedding", "ttpu_flax_mapping", "ttpu_head", "ttpu_mlp", "ttpu_norm"]


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """The usual names, except that the norm before the MLP has gemma 2's name."""
    return standard_mapping(spec, CheckpointNames(mlp_norm="pre_feedforward_layernorm"))
