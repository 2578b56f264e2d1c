"""Mixtures of experts with fixed shapes. It replaces transformers' grouped product of experts by one that does not sort
tokens into groups, because a compiled program cannot have shapes that depend on group sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.integrations.moe import batched_mm_experts_forward

from ttpu_torch_xla.quantization.experts import by_choice
from ttpu_torch_xla.runtime import current, is_device

ROW_BYTES = 256 * 2**20
"""Activations of all experts together that may exist at once; a longer sequence is taken in parts."""

COPY_COST = 3
"""A chosen expert's weights are read, written and read again, where all experts' are read once."""

Forward = Callable[..., torch.Tensor]


def grouped_experts(original: Forward) -> Forward:
    """transformers' experts function, with the product below for tensors on the device."""

    def forward(
        experts: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        if not is_device(hidden) or experts._is_expert_parallel:
            return original(experts, hidden, top_k_index, top_k_weights)
        if few_chosen(top_k_index.numel(), experts.num_experts):
            return batched_mm_experts_forward(by_choice(experts), hidden, top_k_index, top_k_weights)
        return all_experts(experts, hidden, top_k_index, top_k_weights)

    return forward


grouped_experts.wraps_original = True  # type: ignore[attr-defined]


def few_chosen(choices: int, experts: int) -> bool:
    """Whether to copy the weights of the chosen experts, one copy per choice, as decoding few sequences wants it; not
    on a mesh, where each device has some of the experts or a part of each."""
    return choices * COPY_COST <= experts and not current().is_spmd()


def all_experts(
    experts: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Run every expert on every token; a token's weight is zero for experts that it did not choose.

    The products contract over experts and their inner size at once, so that XLA cuts them along experts or along the
    inner size without moving weights.

    Args:
        experts: a module with `gate_up_proj` [experts, 2 * inner, hidden] (or `up_proj` [experts, inner, hidden]) and
            `down_proj` [experts, hidden, inner]; transposed where it `is_transposed`.
        hidden: [tokens, hidden].
        top_k_index, top_k_weights: [tokens, k].

    Returns:
        [tokens, hidden].
    """
    first = experts.gate_up_proj if experts.has_gate else experts.up_proj
    count, widths = first.shape[0], first.shape[1:]
    width = widths[1] if experts.is_transposed else widths[0]
    share = _shares(top_k_index, top_k_weights, count)
    step = max(1, ROW_BYTES // (count * width * hidden.element_size()))
    parts = [
        _product(experts, rows, weights, first)
        for rows, weights in zip(hidden.split(step), share.split(step), strict=True)
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(hidden.dtype)


def _shares(index: torch.Tensor, weights: torch.Tensor, count: int) -> torch.Tensor:
    """What each expert weighs for each token: [tokens, experts]."""
    chosen = index[..., None] == torch.arange(count, device=index.device)
    return (chosen.to(weights.dtype) * weights[..., None]).sum(1)


def _product(experts: Any, rows: torch.Tensor, share: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    down = experts.down_proj
    up, back = ("th,ehi->eti", "eti,eih->th") if experts.is_transposed else ("th,eih->eti", "eti,ehi->th")
    inner = torch.einsum(up, rows.to(first.dtype), first)
    if experts.has_bias:
        bias = experts.gate_up_proj_bias if experts.has_gate else experts.up_proj_bias
        inner = inner + bias[:, None]
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    if not experts.has_post_expert_norm:
        out = torch.einsum(back, inner * share.t()[..., None].to(inner.dtype), down)
        return out + share.to(out.dtype) @ experts.down_proj_bias if experts.has_bias else out
    each = torch.einsum(back.replace("->th", "->eth"), inner, down)
    if experts.has_bias:
        each = each + experts.down_proj_bias[:, None]
    return torch.einsum("eth,te->th", experts.post_expert_norm(each), share.to(each.dtype))
