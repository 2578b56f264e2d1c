"""Mixtures of experts whose PyTorch code goes from expert to expert by values, which cannot be traced, and the
functions that are traced in their place: every expert reads every token, and its part is weighted by the router's
choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch


def replace_experts(model: torch.nn.Module) -> None:
    """Give modules of `REPLACED` classes another `forward`; the caller gives them their own back."""
    for module in model.modules():
        function = REPLACED.get(type(module).__name__)
        if function is not None:
            module.forward = partial(function, module)


def chosen(index: torch.Tensor, weights: torch.Tensor, experts: int) -> torch.Tensor:
    """The weight of each expert for each token [tokens, experts], 0 where it is not chosen; `index` and `weights` are
    [tokens, experts per token]."""
    return torch.zeros(index.shape[0], experts, dtype=weights.dtype).scatter(1, index, weights)


def dbrx_experts(module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """DBRX: hidden [batch, seq, features], index and weights [tokens, experts per token]; the result has the same shape
    as hidden."""
    mlp, features = module.mlp, module.hidden_size
    gate, up, down = (
        each.view(module.num_experts, module.ffn_hidden_size, features) for each in (mlp.w1, mlp.v1, mlp.w2)
    )
    tokens = hidden.reshape(1, -1, features)
    inner = mlp.activation_fn(tokens @ gate.transpose(1, 2)) * (tokens @ up.transpose(1, 2))
    shares = chosen(index, weights, module.num_experts).T[:, :, None]
    return ((inner @ down) * shares).sum(0).view(hidden.shape)


def longcat_experts(module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """LongCat-Flash: hidden [tokens, features], index and weights [tokens, experts per token]; the result has the same
    shape as hidden. Experts beyond the routed ones hand tokens on."""
    shares = chosen(index, weights, module.total_experts)
    unchanged = hidden * shares[:, module.num_routed_experts :].sum(1, keepdim=True)
    if module.gate_up_proj is None:
        return unchanged
    gate_up = module.gate_up_proj[: module.num_routed_experts]
    gate, up = (hidden[None] @ gate_up.transpose(1, 2)).chunk(2, -1)
    out = (module.act_fn(gate) * up) @ module.down_proj.transpose(1, 2)
    return (out * shares[:, : module.num_routed_experts].T[:, :, None]).sum(0).to(hidden.dtype) + unchanged


def jetmoe_router(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """JetMoe's router for hidden [tokens, features]: rows by expert, their tokens, their weights, the rows of each
    expert, and the router's logits."""
    logits = module.layer(hidden).float()
    top, experts = logits.topk(module.top_k, dim=1)
    gates = torch.softmax(top, dim=1).type_as(hidden).flatten()
    rows = torch.arange(module.num_experts)
    sizes = (experts.flatten()[:, None] == rows).long().sum(0)
    _, order = experts.flatten().sort(0)
    return order, order.div(module.top_k, rounding_mode="trunc"), gates[order], sizes, logits


def jetmoe_experts(module: Any, inputs: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """JetMoe: inputs [rows, features] ordered by expert, and sizes [experts], the rows of each → [rows, out]."""
    rows = torch.arange(inputs.shape[0])
    expert = (rows[:, None] >= sizes.cumsum(0)[None]).long().sum(1)
    every = inputs[None] @ module.weight.transpose(1, 2)
    return every[expert, rows]


REPLACED: Mapping[str, Callable[..., Any]] = {
    "DbrxExperts": dbrx_experts,
    "JetMoeParallelExperts": jetmoe_experts,
    "JetMoeTopKGating": jetmoe_router,
    "LongcatFlashExperts": longcat_experts,
}
"""Name of the module's class → what is traced in the place of its `forward`."""
