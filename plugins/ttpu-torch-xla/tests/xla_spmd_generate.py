"""Generation of tiny models on a mesh of eight simulated devices, which is for a whole process (xla_spmd.py)."""

from __future__ import annotations

import copy
from typing import Any

import torch
from xla_spmd_cases import MIXTRAL, architecture_of, llama, mixtral

from ttpu_torch_xla.generation import install
from ttpu_torch_xla.handle import Handle
from ttpu_torch_xla.patches.choice import patches_for
from ttpu_torch_xla.patches.patch import applied
from ttpu_torch_xla.runtime import current
from ttpu_torch_xla.sharding import resolve, shard_model

IDS = torch.randint(1, 90, (8, 13), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, :4] = 0


def generated(stock: Any, strategy: str) -> dict[str, Any]:
    """The model cut as a strategy says: whether it generates what the host does, and what that compiled."""
    asked = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    want, want_few = (stock.generate(IDS[:n], attention_mask=MASK[:n], **asked) for n in (8, 3))
    runtime, architecture = current(), architecture_of(stock)
    parallelism = resolve(architecture.spec, runtime, parallelism_strategy=strategy)
    model, handle = copy.deepcopy(stock), Handle(architecture, runtime, parallelism=parallelism)
    with applied(patches_for(architecture, "eager")):
        handle.mesh = shard_model(model, architecture, parallelism, runtime)
        handle.attach(model)
        install(model)
        runtime.sync(wait=True)
        runtime.reset_counters()
        same = [torch.equal(model.generate(IDS, attention_mask=MASK, **asked), want)]
        first = runtime.counters()
        runtime.reset_counters()
        same.append(torch.equal(model.generate(IDS, attention_mask=MASK, **asked), want))
        second = runtime.counters()
        same.append(torch.equal(model.generate(IDS[:3], attention_mask=MASK[:3], **asked), want_few))
    return {
        "same": same,
        "compiles": [first.compiles, second.compiles],
        "fallbacks": [*first.fallbacks, *second.fallbacks],
    }


def cases() -> dict[str, dict[str, Any]]:
    """A dense model by three strategies, and one with experts."""
    torch.manual_seed(0)
    cut = [(llama().eval(), strategy) for strategy in ("fsdp", "mp", "3d")] + [(mixtral().eval(), MIXTRAL)]
    return {f"{type(model).__name__} {strategy}": generated(model, strategy) for model, strategy in cut}
