"""The score head of reward models, which takes the place of a language model head: in an architecture and in a
mapping."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np

from ttpu_core.architecture import Architecture
from ttpu_core.mapping import FlaxMapping, Tensor
from ttpu_core.spec import ArchitectureSpec
from ttpu_core.spec.parts import HeadSpec
from ttpu_jax.train.objectives.reward import SCORE

TENSOR = "score.weight"
"""The name of the score head in checkpoints."""
HEAD = "head."


@runtime_checkable
class HasScore(Protocol):
    """A loaded reward model; see `ttpu_jax.reward_model.JaxRewardModel`.

    Attributes:
        score: float32 [1, hidden], the score head; None where the checkpoint has none.
        pad_token_id: that transformers finds the end of a text by.
    """

    score: np.ndarray | None
    pad_token_id: int | None


def without_head(architecture: Architecture) -> Architecture:
    """An architecture whose logits nobody computes: its mapping passes over the tensors of heads."""
    spec, mapping = architecture.spec, architecture.mapping
    body = tuple((path, rule) for path, rule in mapping.rules if not path.startswith(HEAD))
    unread = {leaf.name for path, rule in mapping.rules if path.startswith(HEAD) for leaf in rule.leaves()}
    ignored = (*mapping.ignored, *(re.escape(name) for name in sorted(unread)), re.escape(TENSOR))
    kept = tuple((path, form) for path, form in spec.kernel_formats if not path.startswith(HEAD))
    return replace(
        architecture,
        spec=replace(spec, head=HeadSpec(tied=True), kernel_formats=kept),
        mapping=replace(mapping, rules=body, ignored=ignored),
    )


def with_score(mapping: FlaxMapping, spec: ArchitectureSpec) -> FlaxMapping:
    """The mapping of a decoder's parameters with the score head beside them."""
    return replace(mapping, rules=(*mapping.rules, (SCORE, Tensor(TENSOR, (1, spec.embedding.features)))))
