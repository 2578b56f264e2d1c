"""Blocks of parameters that several layers use: one place in the table, in checkpoints, under padding and in counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ttpu_core.cli.info import _parameter_facts
from ttpu_core.errors import PluginError
from ttpu_core.mapping.layout import CheckpointNames, standard_mapping
from ttpu_core.quantization import QuantizationConfig
from ttpu_core.quantization.quantize import choices, without_layer
from ttpu_core.sharding.padding import pad_architecture
from ttpu_core.spec import (
    NO_MIXER,
    NO_ROPE,
    ArchitectureSpec,
    AttentionSpec,
    BlockSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
    SharedSpec,
    axes,
)
from ttpu_core.spec.parameters import layer_paths, stacked_parameters
from ttpu_core.spec.state_space import state_space

HIDDEN, HEADS, DIM, INNER, RANK = 6, 3, 4, 5, 2
ATTENTION = AttentionSpec(HEADS, HEADS, DIM, rope=NO_ROPE)
MLP = MLPSpec(INNER)
MIXER = state_space(hidden_size=HIDDEN, num_heads=2, head_dim=3, state_size=2, groups=1, conv_kernel=2)


def layer(block: int, mlp: Any = MLP, **fields: Any) -> LayerSpec:
    shared = SharedSpec(block, qkv_rank=fields.pop("qkv_rank", None), mlp_rank=fields.pop("mlp_rank", None))
    mixer = fields.pop("mixer", ATTENTION)
    return LayerSpec(mixer, mlp, NormSpec(), BlockSpec(shared=shared, **fields))


def model(*layers: LayerSpec) -> ArchitectureSpec:
    return ArchitectureSpec("any", EmbeddingSpec(10, HIDDEN), layers, NormSpec(), HeadSpec(tied=True), 64)


OWN = LayerSpec(MIXER, None, NormSpec())
MODEL = model(*(layer(block, beside=MIXER, qkv_rank=RANK, mlp_rank=RANK) for block in (0, 1, 0)), OWN)
BLOCK = {
    "input_norm.scale": (HIDDEN,),
    "mlp_norm.scale": (HIDDEN,),
    "attention.qkv.kernel": (HEADS, 3, DIM, HIDDEN),
    "attention.output.kernel": (HIDDEN, HEADS * DIM),
    "mlp.gate_up.kernel": (2, INNER, HIDDEN),
    "mlp.down.kernel": (HIDDEN, INNER),
}
UPDATES = {
    "attention.qkv.update.a": (3, RANK, HIDDEN),
    "attention.qkv.update.b": (HEADS, 3, DIM, RANK),
    "mlp.gate_up.update.a": (1, RANK, HIDDEN),
    "mlp.gate_up.update.b": (2, INNER, RANK),
}


def shapes(spec: ArchitectureSpec, prefix: str) -> dict[str, tuple[int, ...]]:
    return {path.removeprefix(prefix): one.shape for path, one in spec.parameters.items() if path.startswith(prefix)}


def test_norms_attention_and_mlp_are_stored_once_a_block_and_the_rest_in_each_layer() -> None:
    for block in "01":
        assert shapes(MODEL, f"shared.{block}.") == BLOCK
    for index in "012":
        own = shapes(MODEL, f"layers.{index}.")
        assert UPDATES.items() <= own.items()
        assert {path for path in own if path not in UPDATES} == {f"mixer.{name}" for name, _ in MIXER.parameters}
    assert not shapes(MODEL, "shared.2.")
    assert shapes(MODEL, "layers.3.").keys() >= {"input_norm.scale", "mixer.dt.kernel"}
    b = MODEL.parameters["layers.2.attention.qkv.update.b"]
    assert b.axes == (axes.KV_HEADS, axes.QKV, axes.HEAD_DIM, axes.LATENT)


def test_a_layer_knows_where_all_that_it_uses_lies() -> None:
    paths = layer_paths(MODEL.layers[2], 2, HIDDEN)
    assert paths["attention.qkv.kernel"] == "shared.0.attention.qkv.kernel"
    assert paths["attention.qkv.update.a"] == "layers.2.attention.qkv.update.a"
    assert paths["mixer.dt.kernel"] == "layers.2.mixer.dt.kernel"
    assert set(paths.values()) <= set(MODEL.parameters)
    assert len(paths) == len(BLOCK) + len(UPDATES) + len(MIXER.parameters)
    assert MODEL.layers_of("shared.0.mlp.down.kernel") == (MODEL.layers[0], MODEL.layers[2])
    assert MODEL.layers_of("layers.3.mixer.dt.kernel") == (OWN,)
    assert MODEL.layers_of("embed.embedding") == MODEL.layers_of("final_norm.scale") == ()


def test_layers_of_one_block_are_one_kind_where_they_repeat() -> None:
    spec = model(*(layer(block, qkv_rank=RANK) for block in (0, 1) * 3))
    assert [(len(group.unit), group.repeats) for group in spec.groups()] == [(2, 3)]
    stacked = stacked_parameters(spec)
    assert stacked["shared.0.attention.qkv.kernel"].shape == BLOCK["attention.qkv.kernel"]
    assert stacked["groups.0.1.attention.qkv.update.a"].shape == (3, 3, RANK, HIDDEN)


def test_layers_that_describe_a_block_otherwise_are_refused() -> None:
    spec = model(layer(0), layer(1, MLPSpec(7)), layer(0, MLPSpec(7)))
    with pytest.raises(PluginError, match="layer 2 of this any was described to use the shared block 0, but"):
        _ = spec.parameters


@pytest.mark.parametrize(
    ("fields", "kernel"),
    [
        ({"mlp": MoESpec(2, 1, 3), "mlp_rank": 2}, r"mlp\.up\.kernel"),
        ({"mixer": NO_MIXER, "qkv_rank": 2}, r"attention\.qkv\.kernel"),
    ],
)
def test_updates_of_what_a_layer_has_not_are_refused(fields: dict[str, Any], kernel: str) -> None:
    with pytest.raises(PluginError, match=f"an update of rank 2 of the shared {kernel} was described, but the layer"):
        _ = model(layer(0, **fields)).parameters


def test_a_mixer_that_reads_the_embedding_too_reads_twice_the_features() -> None:
    spec = model(layer(0, MLPSpec(INNER, gated=False), reads_embedding=True, qkv_rank=RANK, mlp_rank=RANK))
    doubled = {"input_norm.scale": (2 * HIDDEN,), "attention.qkv.kernel": (HEADS, 3, DIM, 2 * HIDDEN)}
    assert doubled.items() <= shapes(spec, "shared.0.").items()
    same = ("mlp_norm.scale", "attention.output.kernel", "mlp.down.kernel")
    assert {name: BLOCK[name] for name in same}.items() <= shapes(spec, "shared.0.").items()
    assert shapes(spec, "layers.0.") == {
        "attention.qkv.update.a": (3, RANK, 2 * HIDDEN),
        "attention.qkv.update.b": (HEADS, 3, DIM, RANK),
        "mlp.up.update.a": (1, RANK, HIDDEN),
        "mlp.up.update.b": (INNER, RANK),
    }
    tensors = standard_mapping(model(layer(0, reads_embedding=True))).tensors
    assert tensors["model.layers.0.self_attn.q_proj.weight"] == (HEADS * DIM, 2 * HIDDEN)
    assert tensors["model.layers.0.input_layernorm.weight"] == (2 * HIDDEN,)
    assert tensors["model.layers.0.self_attn.o_proj.weight"] == (HIDDEN, HEADS * DIM)


@pytest.mark.parametrize("fields", [{"placement": "parallel"}, {"normed_residual": True}])
def test_nothing_but_the_mixer_can_read_the_embedding_behind_its_norm(fields: dict[str, Any]) -> None:
    with pytest.raises(PluginError, match="whose mixer reads the embedding too, but whose MLP or residual begins at"):
        _ = model(layer(0, reads_embedding=True, **fields)).parameters


def test_a_block_is_stored_with_the_first_layer_that_uses_it_under_that_layers_names() -> None:
    spec = model(OWN, layer(1), layer(0), layer(1), layer(0))
    others = CheckpointNames(down="inner.down")
    mapping = standard_mapping(spec, of_layers={1: others, 3: others})
    mapping.check_parameters(spec.parameters)
    assert [name for name in mapping.tensors if "down" in name] == [
        "model.layers.1.inner.down.weight",
        "model.layers.2.mlp.down_proj.weight",
    ]
    assert not any("layers.3." in name or "layers.4." in name for name in mapping.tensors)


def test_heads_and_inner_features_of_a_block_and_of_its_updates_are_padded_alike() -> None:
    spec = model(*(layer(0, qkv_rank=RANK, mlp_rank=RANK) for _ in range(2)))
    padded, paddings = pad_architecture(spec, {"tensor": 2})
    changed = {path: padding.shape for path, padding in paddings.items() if not path.startswith(("embed", "head"))}
    updates = {
        f"layers.{index}.{name}": shape
        for index in range(2)
        for name, shape in {
            "attention.qkv.update.b": (4, 3, DIM, RANK),
            "mlp.gate_up.update.b": (2, 6, RANK),
        }.items()
    }
    assert changed == updates | {
        "shared.0.attention.qkv.kernel": (4, 3, DIM, HIDDEN),
        "shared.0.attention.output.kernel": (HIDDEN, 4 * DIM),
        "shared.0.mlp.gate_up.kernel": (2, 6, HIDDEN),
        "shared.0.mlp.down.kernel": (HIDDEN, 6),
    }
    assert all(padded.parameters[path].shape == shape for path, shape in changed.items())


def test_a_block_is_held_once_and_multiplied_by_each_layer_that_uses_it() -> None:
    once = sum(one.size for path, one in MODEL.parameters.items() if path.startswith("shared.0."))
    assert MODEL.num_active_parameters == MODEL.num_parameters
    assert MODEL.num_multiplied_parameters == MODEL.num_parameters + once
    facts = _parameter_facts(MODEL)
    assert facts["shared"] == 2 * once
    assert facts["total"] == facts["embedding"] + facts["shared"] + sum(facts["per_layer"]) + HIDDEN
    experts = MoESpec(4, 1, 3)
    spec = model(layer(0, experts), layer(0, experts), layer(1))
    kernels = 4 * (2 * 3 * HIDDEN + HIDDEN * 3)
    assert spec.num_parameters - spec.num_active_parameters == kernels * 3 // 4
    block = sum(one.size for path, one in spec.parameters.items() if path.startswith("shared.0."))
    assert spec.num_multiplied_parameters - spec.num_active_parameters == block - kernels * 3 // 4


def test_the_kernels_of_a_block_are_quantized_and_updates_are_not() -> None:
    found = {one.path: one.reason for one in choices(MODEL, QuantizationConfig.parse("int8"))}
    assert found["shared.1.attention.qkv.kernel"] == found["shared.0.mlp.down.kernel"] == ""
    assert not any("update" in path for path in found)
    assert without_layer("shared.1.mlp.down.kernel") == "shared.*.mlp.down.kernel"
    routed = model(layer(0), layer(1, MoESpec(2, 1, 3)))
    reasons = {one.path: one.reason for one in choices(routed, QuantizationConfig.parse("int8"))}
    assert reasons["shared.1.moe.router.kernel"].startswith("a router")


def test_a_block_without_updates_leaves_its_layers_without_parameters() -> None:
    spec = model(layer(0), layer(0))
    assert not shapes(spec, "layers.")
    assert replace(spec, layers=spec.layers[:1]).num_parameters == spec.num_parameters
