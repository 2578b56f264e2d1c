"""Finds the sequences of packed rows on a lazy device. It takes positions, which restart where a sequence begins, and
returns the sequence of each token."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ttpu_torch_xla.runtime import is_device

Find = Callable[[torch.Tensor], torch.Tensor | None]


def find_packed_sequence_indices(original: Find) -> Find:
    """transformers' function for tensors elsewhere; the same, counted in whole numbers, for those on the device."""

    def find(position_ids: torch.Tensor) -> torch.Tensor | None:
        if not is_device(position_ids):
            return original(position_ids)
        steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
        return (steps != 1).long().cumsum(-1)

    return find


find_packed_sequence_indices.wraps_original = True  # type: ignore[attr-defined]
