"""The attention functions that stock models call by name, with the arguments and results of transformers' attention
functions. A kernel computes the result where it can, otherwise the torch reference with the mask."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ttpu_core.errors import UnsupportedError
from ttpu_core.spec import AttentionSpec
from ttpu_torch_xla.attention.kernel import attend, objection
from ttpu_torch_xla.attention.mask import MaskMeaning, meaning_of
from ttpu_torch_xla.attention.reference import reference
from ttpu_torch_xla.runtime import is_device

REFUSED = {"indices": "sparse attention to chosen keys", "cache": "a paged cache"}


def splash_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **given: Any
) -> tuple[torch.Tensor, None]:
    """Compute attention by JAX's splash kernel, for transformers' AttentionInterface; see `attention`.

    Args:
        module: the layer's attention module.
        query: [batch, heads, queries, head_dim].
        key: [batch, kv_heads, keys, head_dim].
        value: [batch, kv_heads, keys, value_dim].
        attention_mask: [batch, 1 or heads, queries, keys], or None.
        given: further arguments of `attention`.

    Returns:
        [batch, queries, heads, value_dim], and None in place of the probabilities.
    """
    return attention("splash_attention", module, query, key, value, attention_mask, **given), None


def xla_flash_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **given: Any
) -> tuple[torch.Tensor, None]:
    """Compute attention by JAX's flash kernel, for transformers' AttentionInterface; see `attention`.

    Args:
        module: the layer's attention module.
        query: [batch, heads, queries, head_dim].
        key: [batch, kv_heads, keys, head_dim].
        value: [batch, kv_heads, keys, value_dim].
        attention_mask: [batch, 1 or heads, queries, keys], or None.
        given: further arguments of `attention`.

    Returns:
        [batch, queries, heads, value_dim], and None in place of the probabilities.
    """
    return attention("xla_flash_attention", module, query, key, value, attention_mask, **given), None


def attention(
    name: str,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    segment_ids: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor:
    """Compute the attention of one layer of a stock model.

    Args:
        name: of the kernel.
        module: the layer's attention module. Where the backend prepared the model, its attribute `ttpu` has the layer's
            AttentionSpec, the mesh and the kernel's settings; the arguments below take precedence.
        query: [batch, heads, queries, head_dim].
        key: [batch, kv_heads, keys, head_dim].
        value: [batch, kv_heads, keys, value_dim].
        attention_mask: bool or float [batch, 1 or heads, queries, keys]. A mask of `kernel_mask` is understood without
            being read; any other is read; with None, `is_causal` alone decides.
        dropout: of the probabilities.
        scaling: factor of the scores; None takes the AttentionSpec's.
        is_causal: no query sees a later key; None takes the module's.
        sliding_window: tokens that a query sees, itself included.
        softcap: of the scores.
        s_aux: [heads] logits of attention sinks.
        position_bias: [batch, 1 or heads, queries, keys], or what broadcasts to it; added to the scores.
        segment_ids: [batch, queries] of packed sequences, where the mask does not have them.
        others: `cu_seq_lens_q` [sequences + 1] where one row is packed. Other arguments that models pass are ignored.

    Returns:
        [batch, queries, heads, value_dim].

    Raises:
        UnsupportedError: an argument changes the result, and neither kernel nor reference implements it.
    """
    for argument, meaning in REFUSED.items():
        if others.get(argument) is not None:
            raise UnsupportedError(
                f"{type(module).__name__} asks its attention for {meaning}, but {name} has none: load the model with "
                'attn_implementation="eager".'
            )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    request = _Request(query, key, value, causal, sliding_window, segment_ids, others.get("cu_seq_lens_q"))
    spec = _spec(module, query, key, value, scaling, softcap, s_aux)
    on_device = is_device(query)
    if on_device and position_bias is None and not dropout and (plan := request.plan(attention_mask)) is not None:
        spec = replace(spec, causal=plan.causal, window=plan.window, chunk=plan.chunk)
        size = plan.keys
        if objection(name, spec, query.shape[2], size) is None:
            handle = getattr(module, "ttpu", None)
            return attend(
                name,
                query,
                key[:, :, :size],
                value[:, :, :size],
                plan.positions,
                plan.segments,
                s_aux,
                spec,
                options=getattr(handle, "options", ()),
                parallelism=getattr(handle, "parallelism", None),
            )
    return reference(
        query,
        key,
        value,
        request.visible(attention_mask),
        scale=spec.softmax_scale,
        softcap=spec.logit_softcap,
        sinks=s_aux,
        bias=position_bias,
        dropout=dropout,
    )


@dataclass(frozen=True, eq=False)
class _Plan:
    """What a kernel is told of the mask: positions and segments [batch, queries] of the first `keys` keys."""

    keys: int
    causal: bool
    window: int | None
    chunk: int | None
    positions: torch.Tensor
    segments: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class _Request:
    """What says who sees whom, beside the mask."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    is_causal: bool
    window: int | None
    segment_ids: torch.Tensor | None
    cu_seq_lens: torch.Tensor | None

    def plan(self, mask: torch.Tensor | None) -> _Plan | None:
        """The mask as a kernel takes it; None where it cannot be said so, or the keys are not the queries' own."""
        queries, keys = self.query.shape[2], self.key.shape[2]
        if mask is None:
            meaning: MaskMeaning | None = MaskMeaning(queries, keys, 0, self.is_causal, self.window)
        else:
            meaning = meaning_of(mask)
        if meaning is None or (meaning.queries, meaning.keys) != (queries, keys) or queries == 1:
            return None
        # Keys after the last query are the empty rest of a cache: causality hides them.
        if keys != queries and not (meaning.first_query == 0 and meaning.causal and keys > queries):
            return None
        segments = _joined(meaning.segments, self._segments(mask is None), queries)
        return _Plan(queries, meaning.causal, meaning.window, meaning.chunk, self._positions(meaning), segments)

    def visible(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """The mask to be read, with the segments that it does not have.

        Raises:
            UnsupportedError: segments of the queries are given, but not those of a cache.
        """
        queries, keys = self.query.shape[2], self.key.shape[2]
        segments = self._segments(mask is None)
        if mask is None and (queries > 1 or keys == queries):
            mask = self._band(queries, keys)
        if segments is None:
            return mask
        if keys != queries:
            raise UnsupportedError(
                f"segment_ids of {queries} tokens were given with {keys} keys, but what segments the tokens of a cache "
                "have is not known: pass packed sequences without past_key_values (use_cache=False)."
            )
        together = segments[:, None, :, None] == segments[:, None, None, :]
        if mask is None:
            return together
        if mask.dtype == torch.bool:
            return mask & together
        return torch.where(together, mask, torch.finfo(mask.dtype).min)

    def _band(self, queries: int, keys: int) -> torch.Tensor | None:
        """The mask that `is_causal` and the window mean; queries are the first keys, as everywhere in transformers."""
        if not self.is_causal and self.window is None:
            return None
        device = self.query.device
        ahead = torch.arange(keys, device=device)[None, :] - torch.arange(queries, device=device)[:, None]
        seen = ahead <= 0 if self.is_causal else torch.ones_like(ahead, dtype=torch.bool)
        if self.window is not None:
            seen = seen & (ahead > -self.window) & (ahead < self.window)
        return seen[None, None]

    def _segments(self, without_mask: bool) -> torch.Tensor | None:
        """Segments that no mask of transformers' has: its own masks have those of `cu_seq_lens_q` already."""
        found = self.segment_ids
        if self.cu_seq_lens is not None and without_mask:
            places = torch.arange(self.query.shape[2], device=self.query.device)
            packed = (places[None, :, None] >= self.cu_seq_lens[None, None, 1:]).sum(-1)
            found = _joined(packed.expand(self.query.shape[0], -1), found, self.query.shape[2])
        return found

    def _positions(self, meaning: MaskMeaning) -> torch.Tensor:
        batch, queries = self.query.shape[0], self.query.shape[2]
        if meaning.positions is not None:
            positions = meaning.positions
        else:
            positions = torch.arange(queries, device=self.query.device)[None]
            if meaning.left_padding is not None:
                positions = positions - meaning.left_padding[:, None]
        if meaning.padding is not None:
            positions = torch.where(meaning.padding[:, :queries], positions.clamp(min=0), -1)
        return positions.expand(batch, queries)


def _joined(one: torch.Tensor | None, other: torch.Tensor | None, length: int) -> torch.Tensor | None:
    """Segments that are equal where both are equal."""
    if one is None or other is None:
        return other if one is None else one
    return one * (length + 1) + other


def _spec(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> AttentionSpec:
    """The layer's attention as the tensors at hand have it: what the model passes, else what its family says."""
    handle, layer = getattr(module, "ttpu", None), getattr(module, "layer_idx", None)
    known = handle.attention_spec(layer) if handle is not None and layer is not None else None
    heads, kv = query.shape[1], key.shape[1]
    if known is not None:
        scaling = known.softmax_scale if scaling is None else scaling
        softcap = known.logit_softcap if softcap is None else softcap
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=query.shape[3],
        v_head_dim=value.shape[3],
        scale=scaling,
        logit_softcap=softcap,
        sinks=sinks is not None,
        alibi=None if known is None else known.alibi,
    )
