"""A mixture of experts computes what transformers' own modules compute from the same parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from moe_cases import BASE, HIDDEN, KINDS, Arrays, arrays, assert_close, module, run_with_gradients, table

from ttpu_core.spec import ActivationSpec, MLPSpec, MoESpec, RouterSpec
from ttpu_jax.ops.moe import choose_experts

pytestmark = pytest.mark.torch


def halves_last(kernel: Any) -> Any:
    """[experts, hidden, 2 * inner], gate first, as llama4 stores them."""
    return kernel.transpose(0, 2, 1).reshape(len(kernel), 2, -1, HIDDEN)


def interleaved(kernel: Any) -> Any:
    """[experts, ..., 2 * inner], gate and up in turn, as gpt_oss stores them."""
    return np.stack([kernel[..., ::2], kernel[..., 1::2]], 1).swapaxes(-1, 2)


def shared_of(state: Arrays, prefix: str) -> Arrays:
    gate, up, down = (state[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return {"shared.gate_up.kernel": np.stack([gate, up]), "shared.down.kernel": down}


def stacked(state: Arrays, router: str = "gate") -> Arrays:
    """As most of transformers' modules hold them."""
    gate_up = state["experts.gate_up_proj"]
    return {
        "router.kernel": state[f"{router}.weight"],
        "experts.gate_up.kernel": gate_up.reshape(len(gate_up), 2, -1, HIDDEN),
        "experts.down.kernel": state["experts.down_proj"],
    }


SIZES = {"hidden_size": HIDDEN, "intermediate_size": 12, "num_experts_per_tok": 2}
TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any], MoESpec, Callable[[Arrays], Arrays]]] = {
    "mixtral": (
        "MixtralConfig",
        "MixtralSparseMoeBlock",
        {"num_local_experts": 8},
        replace(BASE, router=RouterSpec(renormalize=True)),
        stacked,
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeSparseMoeBlock",
        {
            "num_experts": 8,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 20,
            "norm_topk_prob": False,
        },
        replace(BASE, shared=MLPSpec(20), shared_gate=True),
        lambda state: {
            **stacked(state),
            **shared_of(state, "shared_expert"),
            "shared_gate.kernel": state["shared_expert_gate.weight"],
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3MoE",
        {
            "n_routed_experts": 8,
            "moe_intermediate_size": 12,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
        replace(KINDS["corrected_groups"], shared=MLPSpec(24)),
        lambda state: {
            **stacked(state),
            **shared_of(state, "shared_experts"),
            "router.correction_bias": state["gate.e_score_correction_bias"],
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        "Llama4TextMoe",
        {"num_local_experts": 8},
        replace(KINDS["sigmoid_on_input"], experts_per_token=2, shared=MLPSpec(12)),
        lambda state: {
            "router.kernel": state["router.weight"],
            "experts.gate_up.kernel": halves_last(state["experts.gate_up_proj"]),
            "experts.down.kernel": state["experts.down_proj"].swapaxes(1, 2),
            **shared_of(state, "shared_expert"),
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssMLP",
        {"num_local_experts": 8},
        replace(KINDS["topk_softmax"], activation=ActivationSpec("clamped_swiglu", alpha=1.702, limit=7.0)),
        lambda state: {
            "router.kernel": state["router.weight"],
            "router.bias": state["router.bias"],
            "experts.gate_up.kernel": interleaved(state["experts.gate_up_proj"]),
            "experts.gate_up.bias": interleaved(state["experts.gate_up_proj_bias"]),
            "experts.down.kernel": state["experts.down_proj"].swapaxes(1, 2),
            "experts.down.bias": state["experts.down_proj_bias"],
        },
    ),
    "phimoe": (
        "PhimoeConfig",
        "PhimoeSparseMoeBlock",
        {"num_local_experts": 8},
        KINDS["sparsemixer"],
        lambda state: stacked(state, "router"),
    ),
    "granitemoe": (
        "GraniteMoeConfig",
        "GraniteMoeMoE",
        {"num_local_experts": 8},
        replace(BASE, router=RouterSpec(score="topk_softmax")),
        lambda state: stacked(state, "router"),
    ),
}


@pytest.mark.parametrize("model_type", TRANSFORMERS)
def test_output_and_gradient_are_those_of_transformers(model_type: str) -> None:
    torch = pytest.importorskip("torch")
    config_name, block_name, options, spec, convert = TRANSFORMERS[model_type]
    package = f"transformers.models.{model_type}"
    config = getattr(import_module(f"{package}.configuration_{model_type}"), config_name)(**{**SIZES, **options})
    block = getattr(import_module(f"{package}.modeling_{model_type}"), block_name)(config).eval()
    generator = torch.Generator().manual_seed(0)
    for path, tensor in block.state_dict().items():
        tensor.normal_(0.0, 1.0 if "gate.w" in path or "router" in path else 0.4, generator=generator)
    values = {path: jnp.asarray(a) for path, a in convert(numpy_state(block)).items()}
    assert {path: a.shape for path, a in values.items()} == {path: p.shape for path, p in table(spec).items()}
    x = torch.randn(4, 6, HIDDEN, generator=generator, requires_grad=True)
    expected = block(x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    loss_weights = torch.sin(torch.arange(expected.numel(), dtype=torch.float32)).reshape(4, 6, HIDDEN)
    (expected.reshape(4, 6, HIDDEN) * loss_weights).sum().backward()
    out, _, to_x = run_with_gradients(spec, values, jnp.asarray(x.detach().numpy()))
    assert_close(out, expected.detach().numpy().reshape(out.shape))
    assert_close(to_x, x.grad.numpy(), 2e-5)


def test_gemma4_routes_as_transformers_does() -> None:
    torch = pytest.importorskip("torch")
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRouter

    config = Gemma4TextConfig(hidden_size=HIDDEN, num_experts=8, top_k_experts=2, enable_moe_block=True)
    block = Gemma4TextRouter(config)
    generator = torch.Generator().manual_seed(0)
    for tensor in block.state_dict().values():
        tensor.normal_(0.0, 1.0, generator=generator)
    spec, state = replace(KINDS["normed_and_scaled"], dense=None), numpy_state(block)
    values = arrays(spec) | {
        "router.kernel": jnp.asarray(state["proj.weight"]),
        "router.scale": jnp.asarray(state["scale"]),
        "router.expert_scale": jnp.asarray(state["per_expert_scale"]),
    }
    x = torch.randn(20, HIDDEN, generator=generator)
    _, weights, chosen = block(x)
    ours, our_weights = module(spec, values).router(jnp.asarray(x.numpy())[None])
    np.testing.assert_array_equal(ours[0], chosen.numpy())
    assert_close(our_weights[0], weights.detach().numpy())


def numpy_state(block: Any) -> Arrays:
    return {path: tensor.numpy().copy() for path, tensor in block.state_dict().items()}


def test_sparsemixer_shares_among_close_logits_as_phimoe_does() -> None:
    torch = pytest.importorskip("torch")
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    for center in (5.0, -5.0, 0.0):
        logits = center + 0.1 * torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
        expected, expected_chosen = sparsemixer(logits, 0.01, training=False)
        chosen, weights = choose_experts(jnp.asarray(logits.numpy()), RouterSpec(score="sparsemixer"), 2)
        np.testing.assert_array_equal(chosen, expected_chosen.numpy())
        assert_close(weights, expected.numpy())
        if center:
            assert 0.2 < float(jnp.median(weights)) < 0.9  # several experts are close
