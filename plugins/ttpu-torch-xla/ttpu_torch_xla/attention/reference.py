"""Attention in plain torch, for the cases that the kernels do not serve: decoding, masks of any kind, biases, dropout.
Tests compare the kernels with it."""

from __future__ import annotations

import torch

MASKED = -1e30  # finite: a row whose keys are all masked (a padding query) stays a number


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Compute softmax attention with all scores in memory, without repeating the keys and values that heads share.

    Args:
        query: [batch, heads, queries, head_dim].
        key: [batch, kv_heads, keys, head_dim].
        value: [batch, kv_heads, keys, value_dim].
        visible: [batch, 1 or heads, queries, keys], or what broadcasts to it: bool, true where a query sees a key, or a
            number to add to the scores; None: every query sees every key.
        scale: factor of the scores.
        softcap: of the scaled scores.
        sinks: [heads] logits of a sink that takes probability and adds no value.
        bias: [batch, 1 or heads, queries, keys], or what broadcasts to it; added to the scores.
        dropout: of the probabilities.

    Returns:
        [batch, queries, heads, value_dim].
    """
    batch, heads, queries, dim = query.shape
    kv, keys = key.shape[1], key.shape[2]
    group = heads // kv
    rows = query.reshape(batch, kv, group * queries, dim)
    scores = torch.matmul(rows, key.transpose(2, 3)).reshape(batch, kv, group, queries, keys) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.float()
    for one in (bias, visible):
        if one is None:
            continue
        grouped = _grouped(one, kv, group, keys)
        scores = torch.where(grouped, scores, MASKED) if one.dtype == torch.bool else scores + grouped
    if sinks is not None:
        column = sinks.float().reshape(1, kv, group, 1, 1).expand(batch, kv, group, queries, 1)
        probabilities = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
    probabilities = torch.nn.functional.dropout(probabilities.to(value.dtype), dropout, training=dropout > 0)
    mixed = torch.matmul(probabilities.reshape(batch, kv, group * queries, keys), value)
    return mixed.reshape(batch, heads, queries, value.shape[-1]).transpose(1, 2).contiguous()


def _grouped(x: torch.Tensor, kv: int, group: int, keys: int) -> torch.Tensor:
    """[batch, 1 or heads, queries, keys or more] as [batch, 1 or kv, 1 or group, queries, keys]."""
    x = x[..., :keys]
    while x.ndim < 4:
        x = x[None]
    shape = (x.shape[0], kv, group, *x.shape[2:]) if x.shape[1] == kv * group else (x.shape[0], 1, 1, *x.shape[2:])
    return x.reshape(shape)
