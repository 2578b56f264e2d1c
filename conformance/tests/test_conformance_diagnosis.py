"""A diagnosis names the right hook: of routers, mixers, single layers and tensors that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from broken import cases

from ttpu_conformance.every_field import changes_of
from ttpu_conformance.misfits import Misfits, hook_of_path, hook_of_tensor, hooks_of
from ttpu_conformance.runner import run
from ttpu_conformance.selection import checks_for
from ttpu_core.architecture import Architecture
from ttpu_core.config import ModelConfig
from ttpu_core.registry import default_registry
from ttpu_core.spec import AttentionSpec, MixerSpec, MoESpec

WITH = """
from {module} import *
import {module} as right
from ttpu_core.spec import *

@hookimpl
def {hook}({arguments}):
    made = right.{hook}({arguments})
    return {answer}
"""
GLM4_MOE: dict[str, Any] = {"n_group": 3, "topk_group": 2}
QWEN3_NEXT: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "rms_norm_eps": 0.1,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}
MISTAKES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "another number of experts": (
        "glm4_moe",
        WITH.format(
            module="ttpu_zoo.glm4_moe",
            hook="ttpu_mlp",
            arguments="config, layer",
            answer="replace(made, experts_per_token=3) if layer else made",
        ),
        GLM4_MOE,
        "with MoESpec(experts_per_token=2) in `ttpu_mlp` the logits agree: correct `ttpu_mlp`.",
    ),
    "experts without groups": (
        "glm4_moe",
        WITH.format(
            module="ttpu_zoo.glm4_moe",
            hook="ttpu_mlp",
            arguments="config, layer",
            answer="replace(made, router=replace(made.router, groups=1, top_groups=1)) if layer else made",
        ),
        GLM4_MOE,
        "in layer 1, in its MLP or the norm of it: without the MLP they agree",
    ),
    "rope in a layer without positions": (
        "smollm3",
        "from ttpu_zoo.smollm3 import *\n@hookimpl\ndef ttpu_rope(config, attention):\n"
        "    return rope_from_config(config, head_dim=attention.head_dim)\n",
        {"no_rope_layers": [1, 0]},
        "the logits agree: correct `ttpu_rope`.",
    ),
    "an option of a mixer": (
        "qwen3_next",
        WITH.format(
            module="ttpu_qwen.qwen3_next",
            hook="ttpu_mixer",
            arguments="config, layer",
            answer="replace(made, options=tuple((k, 3.0 if k == 'norm_eps' else v) for k, v in made.options))",
        ),
        QWEN3_NEXT,
        "`ttpu_mixer`",
    ),
    "a shared expert is forgotten": (
        "glm4_moe",
        WITH.format(
            module="ttpu_zoo.glm4_moe",
            hook="ttpu_mlp",
            arguments="config, layer",
            answer="replace(made, shared=None) if layer else made",
        ),
        GLM4_MOE,
        "The checkpoint and the description do not fit each other: correct `ttpu_mlp`.",
    ),
}


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_one_part_of_a_layer_names_its_hook(tmp_path: Path, mistake: str) -> None:
    pytest.importorskip("torch")
    model_type, source, base, message = MISTAKES[mistake]
    made = cases(tmp_path, model_type, source, "diagnosed", base=base)
    (result,) = run(checks_for(made, "quick", only=["float32_logits"]))
    assert result.status == "failed"
    assert message in result.reason, result.reason


@pytest.mark.parametrize(
    ("tensor", "hook"),
    [
        ("model.layers.0.self_attn.q_proj.bias", "ttpu_attention"),
        ("model.layers.0.self_attn.q_norm.weight", "ttpu_attention"),
        ("transformer.h.3.attn.c_attn.weight", "ttpu_attention"),
        ("model.layers.1.mlp.experts.0.up_proj.weight", "ttpu_mlp"),
        ("model.layers.1.block_sparse_moe.gate.weight", "ttpu_mlp"),
        ("model.layers.1.mlp.gate.e_score_correction_bias", "ttpu_mlp"),
        ("model.layers.0.mamba.A_log", "ttpu_mixer"),
        ("model.layers.0.linear_attn.conv1d.weight", "ttpu_mixer"),
        ("model.layers.0.post_feedforward_layernorm.weight", "ttpu_block"),
        ("model.layers.0.input_layernorm.bias", "ttpu_norm"),
        ("model.norm.weight", "ttpu_final_norm"),
        ("transformer.wpe.weight", "ttpu_embedding"),
        ("lm_head.bias", "ttpu_head"),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", "ttpu_flax_mapping"),
    ],
)
def test_a_tensors_name_tells_the_hook(tensor: str, hook: str) -> None:
    assert hook_of_tensor(tensor) == hook


def llama() -> Architecture:
    config = {"model_type": "llama", "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}  # fmt: skip
    return default_registry().architecture(ModelConfig.from_dict(config))


def test_a_parameters_path_tells_the_hook() -> None:
    found = {hook_of_path(path) for path in llama().spec.parameters}
    assert found == {"ttpu_embedding", "ttpu_block", "ttpu_attention", "ttpu_mlp", "ttpu_final_norm", "ttpu_head"}
    assert hook_of_path("layers.0.mixer.conv.kernel") == "ttpu_mixer"
    assert hook_of_path("layers.0.input_norm.bias") == "ttpu_norm"


def test_tensors_that_are_named_or_cut_otherwise_point_at_the_mapping_and_other_sizes_do_not() -> None:
    up = "model.layers.0.mlp.up_proj.weight"
    assert hooks_of(Misfits({up: (24, 16)}, {"model.layers.0.mlp.fc1.weight": (24, 16)}, ()), llama()) == (
        "ttpu_flax_mapping",
    )
    assert hooks_of(Misfits({}, {}, ((up, (24, 16), (16, 24)),)), llama()) == ("ttpu_flax_mapping",)
    assert hooks_of(Misfits({}, {}, ((up, (24, 16), (30, 16)),)), llama()) == ("ttpu_mlp",)
    assert hooks_of(Misfits({up: (24, 16)}, {}, ()), llama()) == ("ttpu_mlp",)


def test_tensors_under_another_prefix_are_the_mappings_and_those_of_other_layers_are_not() -> None:
    architecture = llama()
    tensors = architecture.mapping.tensors
    mlp = {name: shape for name, shape in tensors.items() if ".layers.0.mlp." in name}
    prefixed = {name.replace("model.", "model.language_model.", 1): shape for name, shape in mlp.items()}
    assert hooks_of(Misfits(mlp, prefixed, ()), architecture) == ("ttpu_flax_mapping",)
    moved = {name.replace(".0.", ".1.", 1): shape for name, shape in mlp.items()}
    assert hooks_of(Misfits(mlp, moved, ()), architecture) == ("ttpu_mlp",)


def test_every_field_is_changed_to_other_choices_and_to_the_configs_numbers() -> None:
    numbers = {"sliding_window": 13.0, "hidden_size": 64.0}
    attention = {one.text.removeprefix("AttentionSpec") for one in changes_of(AttentionSpec(4, 2, 16), numbers)}
    assert {"(window=13)", "(causal=False)", "(qk_norm_scope='full')"} <= attention
    assert "(window=64)" not in attention
    experts = {one.text for one in changes_of(MoESpec(6, 2, 48), {})}
    assert {"MoESpec(experts_per_token=3)", "RouterSpec(score='sigmoid')"} <= experts
    assert "MoESpec(experts_per_token=0)" not in experts  # refused by the part itself
    mixer = MixerSpec("mean", options=(("flag", True), ("eps", 0.5), ("name", "x")))
    changed = {one.text for one in changes_of(mixer, {"norm_eps": 0.1})}
    assert {"MixerSpec(flag=False)", "MixerSpec(eps=0)"} <= changed
