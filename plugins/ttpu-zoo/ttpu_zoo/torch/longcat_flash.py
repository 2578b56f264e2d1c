"""LongCat-Flash's experts with fixed shapes, for programs that XLA compiles. The function replaces a method of
transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from ttpu_torch_xla.patches.experts import all_experts


def experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of the chosen experts' outputs; those numbered after the others return their input.

    Args:
        hidden_states: [tokens, hidden].
        top_k_index, top_k_weights: [tokens, k].

    Returns:
        [tokens, hidden].
    """
    count = self.num_routed_experts

    def gated(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        result: torch.Tensor = self.act_fn(gate) * up
        return result

    others = {"has_gate": True, "has_bias": False, "is_transposed": False, "has_post_expert_norm": False}
    routed = SimpleNamespace(
        gate_up_proj=self.gate_up_proj[:count], down_proj=self.down_proj, _apply_gate=gated, **others
    )
    kept = top_k_weights.where(top_k_index >= count, 0).sum(-1, keepdim=True)
    unchanged = (hidden_states * kept).to(hidden_states.dtype)
    return all_experts(routed, hidden_states, top_k_index, top_k_weights) + unchanged
