"""DeepSeek-V2's rotary embedding in real numbers, for XLA devices, which have no complex numbers. The functions replace
two functions of transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_rope_utils import dynamic_rope_update


@torch.no_grad()
@dynamic_rope_update
def rotary(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Cosines and sines [2, batch, 1, seq, rope_dim / 2]. transformers returns e^(i·angle) instead.

    Args:
        x: [batch, seq, hidden]; only its device is used.
        position_ids: [batch, seq].
    """
    angles = position_ids[:, None, :, None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
    return torch.stack((angles.cos(), angles.sin())) * self.attention_scaling


def apply_rotary(query: torch.Tensor, key: torch.Tensor, turns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate neighbouring pairs of features. The results have the shapes of query and key.

    Args:
        query: [batch, heads, seq, rope_dim].
        key: [batch, 1, seq, rope_dim].
        turns: [2, batch, 1, seq, rope_dim / 2], the result of `rotary`.
    """
    cos, sin = turns

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2).to(x.dtype)

    return turned(query), turned(key)
