"""What replaces parts of a forward pass computes what it replaces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("torch_xla")

from ttpu_torch_xla.patches import experts
from ttpu_torch_xla.patches.defaults import DEFAULTS
from ttpu_torch_xla.patches.patch import applied
from ttpu_torch_xla.runtime import current

pytestmark = pytest.mark.torch

TOKENS, HIDDEN, INNER, COUNT, CHOSEN = 10, 12, 8, 6, 2


def module(**kind: bool) -> Any:
    """Experts of a kind that transformers' interface knows."""
    names = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm")
    made = SimpleNamespace(_is_expert_parallel=False, num_experts=COUNT, **(dict.fromkeys(names, False) | kind))
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(COUNT, *shape, generator=generator)

    width = 2 * INNER if made.has_gate else INNER
    up, down = (width, HIDDEN), (HIDDEN, INNER)
    first = weight(*(up[::-1] if made.is_transposed else up))
    made.gate_up_proj = made.up_proj = first
    made.down_proj = weight(*(down[::-1] if made.is_transposed else down))
    made.gate_up_proj_bias = made.up_proj_bias = weight(width)
    made.down_proj_bias = weight(HIDDEN)
    made.act_fn = torch.nn.functional.silu
    made._apply_gate = lambda x: made.act_fn(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]
    made.post_expert_norm = lambda x: x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return made


def chosen() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, and for each token its experts, each once, and their weights."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weights, index = torch.rand(TOKENS, COUNT, generator=generator).topk(CHOSEN)
    return hidden, index, weights


@pytest.mark.parametrize(
    "kind",
    [
        {"has_gate": True},
        {"has_gate": True, "has_bias": True},
        {"has_gate": True, "is_transposed": True},
        {"has_bias": True},
        {"has_gate": True, "has_bias": True, "has_post_expert_norm": True},
    ],
    ids=lambda kind: " ".join(kind),
)
def test_experts_of_fixed_shape_equal_those_of_transformers(
    kind: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.integrations.moe import batched_mm_experts_forward

    made = module(**kind)
    theirs = batched_mm_experts_forward(made, *chosen())
    torch.testing.assert_close(experts.all_experts(made, *chosen()), theirs, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(experts, "ROW_BYTES", 3 * COUNT * 2 * INNER * 4)  # three tokens at a time
    torch.testing.assert_close(experts.all_experts(made, *chosen()), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_few_tokens_and_many_take_no_host_operation(tokens: int) -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward

    made, runtime = module(has_gate=True), current()
    hidden, index, weights = (tensor[:tokens] for tensor in chosen())
    theirs = batched_mm_experts_forward(made, hidden, index, weights)
    assert experts.few_chosen(index.numel(), COUNT) == (tokens == 1)
    for name in ("gate_up_proj", "down_proj"):
        setattr(made, name, getattr(made, name).to(runtime.device()))
    with applied(DEFAULTS):
        runtime.reset_counters()
        moved = (tensor.to(runtime.device()) for tensor in (hidden, index, weights))
        ours = ALL_EXPERTS_FUNCTIONS["grouped_mm"](made, *moved).cpu()
    assert not runtime.counters().fallbacks
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("upper", "left", "unit"), [(False, True, True), (True, True, False), (False, False, True)])
def test_triangular_systems_are_solved_on_the_device(upper: bool, left: bool, unit: bool) -> None:
    runtime = current()
    matrix = torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(0)) * 0.3 + 2 * torch.eye(5)
    right = torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(1))
    asked = {"upper": upper, "left": left, "unitriangular": unit}
    theirs = torch.linalg.solve_triangular(matrix, right, **asked)
    with applied(DEFAULTS):
        there = matrix.to(runtime.device()).requires_grad_()
        runtime.sync()
        runtime.reset_counters()
        ours = torch.linalg.solve_triangular(there, right.to(runtime.device()), **asked)
        ours.sum().backward()
        runtime.sync()
    host = matrix.clone().requires_grad_()
    torch.linalg.solve_triangular(host, right, **asked).sum().backward()
    assert not runtime.counters().fallbacks
    torch.testing.assert_close(ours.detach().cpu(), theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(there.grad.cpu(), host.grad, rtol=1e-4, atol=1e-5)


def test_lazy_tensors_count_as_traced_while_the_patch_is_in_place() -> None:
    from transformers import masking_utils

    lazy = torch.zeros(1).to(current().device())
    assert not masking_utils.is_tracing(lazy)
    with applied(DEFAULTS):
        assert masking_utils.is_tracing(lazy)
        assert not masking_utils.is_tracing(torch.zeros(1))
    assert not masking_utils.is_tracing(lazy)
