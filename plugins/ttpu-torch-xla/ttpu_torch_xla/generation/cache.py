"""A KV cache of fixed length, as a subclass of transformers' cache. A prefill fills it and decode steps write it in
place. Its fill level is a tensor, never a Python number, so that the compiled programs do not depend on it."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
STATES = ("linear_attention", "conv")
OTHERS = (*STATES, "hybrid", "dummy")


class Clock:
    """The fill level that all layers of a cache share.

    Attributes:
        slot: int64 [1] on the device, the slot of the next token; None before and during the prefill.
        shift: int64 [prompt] in the prefill, [] later: what to add to a column of the padded prompt to get the
            column of the caller's prompt.
    """

    def __init__(self, shift: torch.Tensor) -> None:
        self.slot: torch.Tensor | None = None
        self.shift = shift

    def begin_decode(self, slot: torch.Tensor, shift: torch.Tensor) -> None:
        """Switch from prefill to decoding. slot is int64 [1], the slot of the next token; shift is int64 []."""
        self.slot, self.shift = slot, shift


class FixedLayer(CacheLayerMixin):
    """Keys and values [batch, heads, length, head_dim] of one attention layer.

    Layers with a window hold all slots too, for their mask does the forgetting: a ring buffer would be shorter, but
    masks that transformers makes count slots from the oldest one.
    """

    is_compileable = True

    def __init__(self, clock: Clock, length: int, is_sliding: bool) -> None:
        super().__init__()
        self.clock, self.length, self.is_sliding = clock, length, is_sliding

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Store the prompt's keys and values, and reserve the slots of the tokens to come.

        Args:
            key_states: [batch, heads, tokens, head_dim].
            value_states: [batch, heads, tokens, value_dim].
        """
        room = self.length - key_states.shape[-2]
        self.keys = torch.nn.functional.pad(key_states, (0, 0, 0, room))
        self.values = torch.nn.functional.pad(value_states, (0, 0, 0, room))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values, and return the ones to attend to: the prompt's own in the prefill, later those of all
        slots.

        Args:
            key_states: [batch, heads, tokens, head_dim].
            value_states: [batch, heads, tokens, value_dim].
        """
        if self.clock.slot is None:
            self.lazy_initialization(key_states, value_states)
            return key_states, value_states
        assert self.keys is not None and self.values is not None
        self.keys.index_copy_(2, self.clock.slot, key_states)
        self.values.index_copy_(2, self.clock.slot, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that are attended to, and the slot of the first."""
        return (query_length if self.clock.slot is None else self.length), 0

    def get_seq_length(self) -> Any:
        """Tokens before this forward as transformers' own cache would count them, for models that count columns
        themselves: added to `arange(queries)` it gives columns without the padding to a bucket, none below zero."""
        return self.clock.shift if self.clock.slot is None else self.clock.slot[0] + self.clock.shift

    def get_max_length(self) -> int:
        """Return the number of slots."""
        return self.length


class HybridLayer(LinearAttentionLayer, FixedLayer):  # type: ignore[override]  # transformers' bases differ
    """Keys and values of one layer's attention, and the states of the mixer beside it."""

    def __init__(self, clock: Clock, length: int, **options: Any) -> None:
        FixedLayer.__init__(self, clock, length, is_sliding=False)
        LinearAttentionLayer.__init__(self, **options)

    def lazy_initialization(self, *keys_and_values: torch.Tensor, **states: Any) -> None:  # type: ignore[override]
        """Store the prompt's keys and values, or make room for states.

        Args:
            keys_and_values: as for `FixedLayer`; none for states.
            states: as for `LinearAttentionLayer`.
        """
        if keys_and_values:
            FixedLayer.lazy_initialization(self, *keys_and_values)
        else:
            LinearAttentionLayer.lazy_initialization(self, **states)

    def get_max_length(self) -> int:
        """Return the number of slots."""
        return self.length


class FixedCache(Cache):
    """A cache of fixed length for one call of `generate`.

    Args:
        config: a model's config, or that of its text part.
        length: slots for prompt and new tokens together.
        shift: int64 [prompt]; see `Clock`.
    """

    def __init__(self, config: Any, length: int, shift: torch.Tensor) -> None:
        kinds, options = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        self.clock = Clock(shift)
        super().__init__(layers=[self._layer(kind, length, own) for kind, own in zip(kinds, options, strict=True)])

    def _layer(self, kind: str, length: int, options: dict[str, Any]) -> Any:
        if kind in ATTENTION:
            return FixedLayer(self.clock, length, kind != "full_attention")
        if kind == "hybrid":
            return HybridLayer(self.clock, length, **options)
        return LinearAttentionLayer(**options) if kind in STATES else DummyLayer()

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Return the slot of the first query."""
        return 0 if self.clock.slot is None else self.clock.slot[0]


def unknown_layers(config: Any) -> tuple[str, ...]:
    """Return the layer types of a config that this cache does not support."""
    kinds, _ = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    return tuple(sorted(set(kinds) - {*ATTENTION, *OTHERS}))
