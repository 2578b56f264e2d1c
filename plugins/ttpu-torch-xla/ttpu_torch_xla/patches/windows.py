"""The growing cache of layers with a window, on a lazy device. It returns all keys and values that queries attend to,
and keeps as many as the window needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ttpu_torch_xla.runtime import is_device

Update = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def update(original: Update) -> Update:
    """`DynamicSlidingWindowLayer.update` for tensors elsewhere; the same for those on the device, whose slices may
    not begin before a tensor does."""

    def update(
        self: Any, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not is_device(key_states):
            return original(self, key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = key_states.shape[-2]
        self.cumulative_length += new
        keys, values = torch.cat([self.keys, key_states], -2), torch.cat([self.values, value_states], -2)
        if self.record_past:
            self.keys, self.values = keys, values
            return _last(keys, self.sliding_window - 1 + new), _last(values, self.sliding_window - 1 + new)
        self.keys, self.values = _last(keys, self.sliding_window - 1), _last(values, self.sliding_window - 1)
        return keys, values

    return update


update.wraps_original = True  # type: ignore[attr-defined]


def _last(states: torch.Tensor, count: int) -> torch.Tensor:
    """The last `count` of states [batch, heads, tokens, head_dim]; all of them for 0, as `[-0:]` has it."""
    length = states.shape[-2]
    return states[:, :, length - count :] if 0 < count < length else states
