"""Finds ropes that rotate long sequences differently from short ones, and the length up to which a sequence counts as
short."""

from __future__ import annotations

from ttpu_core.spec import ArchitectureSpec, LayerSpec
from ttpu_core.spec.rope import RopeSpec

CONTEXT_KEYS = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}
"""Rope type → the config key that says up to how many tokens it is what it is for short sequences."""


def depends_on_length(spec: ArchitectureSpec) -> bool:
    """Whether the rope of any layer does: then a token's logits are those of the tokens before it only among sequences
    of one length."""
    return any(rope is not None and rope.depends_on_length for rope in map(rope_of, spec.layers))


def rope_of(layer: LayerSpec) -> RopeSpec | None:
    """Return the rope of the layer's mixer."""
    return layer.mixer.rope


def short_context(rope: RopeSpec) -> int:
    """The most tokens of a sequence that is short for a rope that depends on length."""
    if rope.type == "longrope" and rope.original_max_position_embeddings:
        return rope.original_max_position_embeddings
    return rope.max_position_embeddings
