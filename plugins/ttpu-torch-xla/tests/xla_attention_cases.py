"""Kernels on a mesh of eight simulated devices, which is for a whole process (xla_spmd.py)."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from transformers.masking_utils import sliding_window_causal_mask_function

from ttpu_core.sharding.parallelism import Parallelism, resolve_parallelism
from ttpu_torch_xla.attention import interface
from ttpu_torch_xla.attention.interface import attention
from ttpu_torch_xla.attention.mask import kernel_mask
from ttpu_torch_xla.attention.reference import reference
from ttpu_torch_xla.runtime import current

BATCH, HEADS, KV, SEQ, DIM, WINDOW, SCALE, CAP = 4, 4, 2, 136, 16, 50, 0.3, 5.0
# The last one has more devices along tensor than there are KV heads: they all compute with all heads.
MESHES = ("data=2,fsdp=2,tensor=2", "fsdp=2,tensor=4")


@dataclass
class Layer:
    """What an attention module is to an attention function."""

    ttpu: Any
    layer_idx: int = 0


def arrays() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, HEADS, SEQ, DIM), (BATCH, KV, SEQ, DIM), (BATCH, KV, SEQ, DIM), (HEADS,)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def padding() -> torch.Tensor:
    mask = torch.ones(BATCH, SEQ, dtype=torch.bool)
    mask[1, :30] = False
    return mask


def on_the_host() -> list[torch.Tensor]:
    query, key, value, sinks = (one.requires_grad_() for one in arrays())
    seen = torch.ones(SEQ, SEQ, dtype=torch.bool).tril().triu(1 - WINDOW) & padding()[:, None, None, :]
    mixed = reference(query, key, value, seen, scale=SCALE, softcap=CAP, sinks=sinks) * padding()[:, :, None, None]
    (mixed**2).sum().backward()
    return [mixed.detach(), *(one.grad for one in (query, key, value, sinks) if one.grad is not None)]


def on_the_mesh(parallelism: Parallelism) -> list[torch.Tensor]:
    runtime = current()
    mesh = runtime.mesh(dict(parallelism.mesh))
    device = runtime.device()
    there = [one.to(device) for one in arrays()]
    for one in there[:3]:
        runtime.shard(one, mesh, (("data", "fsdp") if "data" in dict(parallelism.mesh) else "fsdp", None, None, None))
    query, key, value, sinks = (one.requires_grad_() for one in there)
    layer = Layer(SimpleNamespace(parallelism=parallelism, options=(), attention_spec=lambda index: None))
    given: dict[str, Any] = {"scaling": SCALE, "softcap": CAP, "s_aux": sinks}
    mask = kernel_mask(
        BATCH, SEQ, SEQ, mask_function=sliding_window_causal_mask_function(WINDOW),
        attention_mask=padding().to(device), device=device,
    )  # fmt: skip
    mixed = attention("splash_attention", layer, query, key, value, mask, **given)
    mixed = mixed * padding().to(device)[:, :, None, None]
    (mixed**2).sum().backward()
    runtime.sync()
    return [mixed.detach().cpu(), *(one.grad.cpu() for one in (query, key, value, sinks) if one.grad is not None)]


def cases() -> dict[str, Any]:
    """How far each mesh is from the host, and how often a kernel was called."""
    calls: list[str] = []
    attend = interface.attend

    def counted(name: str, *arguments: Any, **named: Any) -> Any:
        calls.append(name)
        return attend(name, *arguments, **named)

    interface.attend = counted
    try:
        on_meshes = {text: on_the_mesh(resolve_parallelism(text, 8)) for text in MESHES}
    finally:
        interface.attend = attend
    expected, errors = on_the_host(), {}
    for text, found in on_meshes.items():
        pairs = zip(("output", "query", "key", "value", "sinks"), found, expected, strict=True)
        errors[text] = {name: float((a - b).abs().max() / b.abs().max()) for name, a, b in pairs}
    return {"devices": current().num_devices(), "kernel_calls": len(calls), "errors": errors}
