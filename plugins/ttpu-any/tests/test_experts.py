"""Functions that are traced in the place of experts compute what the modules' own code does."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from ttpu_any.aten.products import solve_triangular
from ttpu_any.experts import REPLACED, replace_experts

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "DbrxFFN": ("dbrx", {"d_model": 16, "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 5, "moe_top_k": 2}}),
    "LongcatFlashMoE": (
        "longcat_flash",
        {"hidden_size": 16, "expert_ffn_hidden_size": 24, "n_routed_experts": 5, "zero_expert_num": 2, "moe_topk": 3},
    ),
    "JetMoeMoE": (
        "jetmoe",
        {"hidden_size": 16, "intermediate_size": 24, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
}


@pytest.mark.torch
@pytest.mark.parametrize("name", CASES)
def test_replaced_experts_compute_what_their_own_code_does(name: str) -> None:
    model_type, keys = CASES[name]
    module = import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    torch.manual_seed(0)
    layer = getattr(module, name)(transformers.CONFIG_MAPPING[model_type](**keys)).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
        hidden = torch.randn(2, 7, 16)
        expected = layer(hidden)
        replace_experts(layer)
        found = layer(hidden)
    for each, own in zip(*((one if isinstance(one, tuple) else (one,)) for one in (found, expected)), strict=True):
        torch.testing.assert_close(each, own, rtol=1e-4, atol=1e-3)


def test_every_replaced_class_is_in_transformers() -> None:
    modules = [import_module(f"transformers.models.{each}.modeling_{each}") for each, _ in CASES.values()]
    assert all(any(hasattr(module, name) for module in modules) for name in REPLACED)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("upper", [True, False])
def test_triangular_systems_are_solved_as_in_torch(upper: bool, left: bool) -> None:
    a = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0)) + 4 * torch.eye(4)
    a = a.triu() if upper else a.tril()
    b = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(1))
    expected = torch.linalg.solve_triangular(a, b, upper=upper, left=left).numpy()
    found = solve_triangular(None, a.numpy(), b.numpy(), upper=upper, left=left)  # type: ignore[arg-type]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
