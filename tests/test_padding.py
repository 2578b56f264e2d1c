"""What a mesh does not divide is padded as far as results stay those of one device; the rest is left to be refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sharded_share import sharded_share

from ttpu_core.errors import UnsupportedError
from ttpu_core.mapping import Concat, FlaxMapping, Tensor, gather, pad_mapping, scatter
from ttpu_core.mapping.padding import Padding, merged_runs
from ttpu_core.sharding.padding import pad_architecture, stacked_paddings
from ttpu_core.sharding.strategy import DEFAULT_STRATEGY, Strategy
from ttpu_core.spec import (
    AlibiSpec,
    ArchitectureSpec,
    AttentionSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    MixerSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
    Parameter,
    axes,
)

NORM = NormSpec()
QWEN = AttentionSpec(28, 4, 128, qkv_bias=True)  # Qwen2.5-7B


def architecture(*mixers: Any, mlp: Any = MLPSpec(24), vocab: int = 48, hidden: int = 16) -> ArchitectureSpec:  # noqa: B008
    layers = tuple(LayerSpec(mixer, mlp, NORM) for mixer in mixers)
    return ArchitectureSpec("tiny", EmbeddingSpec(vocab, hidden), layers, NORM, HeadSpec(bias=True), 64)


def heads(attention: AttentionSpec, devices: int) -> tuple[int, int]:
    """Query and KV heads on so many devices."""
    padded, _ = pad_architecture(architecture(attention), {"tensor": devices})
    mixer = padded.layers[0].mixer
    assert isinstance(mixer, AttentionSpec)
    return mixer.num_heads, mixer.num_kv_heads


@pytest.mark.parametrize(
    ("devices", "found"),
    [
        (2, (28, 4)),
        (4, (28, 4)),
        (7, (49, 7)),  # three KV heads of zeros take 63 slots, seven replicas of each 84
        (8, (32, 8)),  # each KV head twice, for four and three queries
        (16, (32, 16)),
        (32, (32, 32)),
    ],
)
def test_heads_are_repeated_or_added_whatever_takes_the_fewest_slots(devices: int, found: tuple[int, int]) -> None:
    assert heads(QWEN, devices) == found


def test_without_groups_heads_are_added() -> None:
    assert heads(AttentionSpec(40, 40, 128), 32) == (64, 64)


def test_what_divides_is_left_as_it_is() -> None:
    spec = architecture(QWEN)
    for mesh in ({}, {"tensor": 1}, {"tensor": 4}, {"fsdp": 3, "data": 5}):
        padded, paddings = pad_architecture(spec, mesh)
        assert padded == spec and not paddings


def test_padding_twice_changes_nothing() -> None:
    padded, _ = pad_architecture(architecture(QWEN, mlp=MLPSpec(27), vocab=47), {"tensor": 8})
    again, paddings = pad_architecture(padded, {"tensor": 8})
    assert again == padded and not paddings


def test_the_vocabulary_keeps_its_size_and_the_table_gets_rows() -> None:
    padded, paddings = pad_architecture(architecture(QWEN, vocab=47), {"tensor": 4})
    assert padded.vocab_size == 47 and padded.embedding.rows == 48
    assert {path for path in paddings if not path.startswith("layers.")} == {
        "embed.embedding",
        "head.kernel",
        "head.bias",
    }


def test_mlps_experts_and_what_stands_beside_them_are_padded() -> None:
    mlp = MoESpec(4, 2, 10, shared=MLPSpec(7), dense=MLPSpec(5))
    padded, paddings = pad_architecture(architecture(QWEN, mlp=mlp), {"tensor": 4})
    moe = padded.layers[0].mlp
    assert isinstance(moe, MoESpec) and moe.shared and moe.dense
    assert (moe.intermediate_size, moe.shared.intermediate_size, moe.dense.intermediate_size) == (12, 8, 8)
    assert paddings["layers.0.moe.experts.gate_up.kernel"].shape == (4, 2, 12, 16)


def test_a_strategy_says_which_axes_count() -> None:
    spec = architecture(QWEN, mlp=MLPSpec(27), vocab=47)
    strategy = Strategy(((axes.KV_HEADS, ("tensor", "fsdp")), (axes.MLP, ("fsdp",))))
    padded, paddings = pad_architecture(spec, {"fsdp": 2, "tensor": 4}, strategy)
    layer = padded.layers[0]
    assert isinstance(layer.mixer, AttentionSpec) and isinstance(layer.mlp, MLPSpec)
    assert (layer.mixer.num_kv_heads, layer.mlp.intermediate_size, padded.embedding.rows) == (8, 28, 47)
    assert all(path.startswith("layers.") for path in paddings)


@pytest.mark.parametrize("devices", [3, 5, 8, 16, 32])
def test_every_parameter_is_padded_to_the_shape_of_the_padded_table_and_back(devices: int) -> None:
    attention = replace(QWEN, head_dim=4, v_head_dim=6, sinks=True, q_norm=NORM, k_norm=NORM, qk_norm_scope="full")
    spec = architecture(attention, mlp=MLPSpec(27, bias=True), vocab=47)
    padded, paddings = pad_architecture(spec, {"tensor": devices})
    random = np.random.default_rng(0)
    for path, parameter in padded.parameters.items():
        original = spec.parameters[path].shape
        if path not in paddings:
            assert parameter.shape == original
            continue
        padding, value = paddings[path], random.standard_normal(original)
        result = padding.pad(value)
        assert result.shape == parameter.shape
        np.testing.assert_array_equal(padding.unpad(result), value)
        boxes = np.zeros(padding.shape)
        for target, source in padding.boxes():
            boxes[tuple(slice(*dim) for dim in target)] = value[tuple(slice(*dim) for dim in source)]
        np.testing.assert_array_equal(boxes, result)
        DEFAULT_STRATEGY.mesh_axes(parameter.axes, parameter.shape, {"tensor": devices}, path)


def test_a_gradient_is_summed_over_replicas_and_zero_where_zeros_are() -> None:
    padding = Padding((2, 1), (5, 1), (2, 1), 0, ((0, 1), (0, 1), (1, 1), (-1, 1), (1, 1)))
    gradient = np.array([[1.0], [2], [4], [8], [16]])
    projected = padding.project_gradient(gradient)
    assert projected.ravel().tolist() == [3, 3, 20, 0, 20]
    assert padding.unpad(projected).ravel().tolist() == [3, 20]


def test_runs_are_merged() -> None:
    assert merged_runs(iter([(0, 2), (2, 1), (-1, 1), (-1, 2), (5, 0), (4, 1), (4, 1)])) == (
        (0, 3),
        (-1, 3),
        (4, 1),
        (4, 1),
    )


NORMED = replace(QWEN, qk_norm_scope="full", q_norm=NormSpec("layer"))


@pytest.mark.parametrize(
    ("mixer", "mlp", "message"),
    [
        (replace(QWEN, output_norm=NORM), MLPSpec(24), "has 4 kv_heads: use 1, 2, 4 devices"),
        (replace(QWEN, alibi=AlibiSpec()), MLPSpec(24), "has 4 kv_heads: use 1, 2, 4 devices"),
        (NORMED, MLPSpec(24), "has 4 kv_heads: use 1, 2, 4 devices"),
        (AttentionSpec(8, 8, 4), MLPSpec(12, inner_norm=NORM), "has 12 mlp: use 1, 2, 3, 4, 6, 12 devices"),
        (AttentionSpec(8, 8, 4), MLPSpec(12, sparsity=0.9), "has 12 mlp: use 1, 2, 3, 4, 6, 12 devices"),
        (
            MixerSpec("other", parameters=(("kernel", Parameter((6, 16), (axes.KV_HEADS, axes.EMBED))),)),
            MLPSpec(24),
            "has 6 kv_heads: use 1, 2, 3, 6 devices",
        ),
    ],
    ids=["output norm", "alibi", "layer norm over all heads", "inner norm", "sparsity", "a plugin's own mixer"],
)
def test_what_padding_would_change_is_left_and_refused(mixer: Any, mlp: MLPSpec, message: str) -> None:
    padded, paddings = pad_architecture(architecture(mixer, mlp=mlp), {"tensor": 8})
    assert not paddings
    with pytest.raises(UnsupportedError, match=message):
        for path, parameter in padded.parameters.items():
            DEFAULT_STRATEGY.mesh_axes(parameter.axes, parameter.shape, {"tensor": 8}, path)


def test_layers_that_share_keys_are_padded_alike() -> None:
    spec = architecture(QWEN, replace(QWEN, num_heads=8, kv_from_layer=0))
    padded, _ = pad_architecture(spec, {"tensor": 8})
    kv = {layer.mixer.num_kv_heads for layer in padded.layers if isinstance(layer.mixer, AttentionSpec)}
    assert kv == {8}


def test_stacked_layers_list_the_padding_of_each_copy() -> None:
    layers = [LayerSpec(QWEN, MLPSpec(size), NORM) for size in (24, 23, 22)]
    spec = replace(architecture(), layers=tuple(layers))
    padded, paddings = pad_architecture(spec, {"tensor": 4})
    stacked = stacked_paddings(padded, paddings)
    path = "mlp.down.kernel"
    assert stacked == {
        f"groups.0.0.{name}": tuple(paddings.get(f"layers.{layer}.{name}") for layer in range(3))
        for name in ("mlp.gate_up.kernel", path)
    }
    assert stacked[f"groups.0.0.{path}"][0] is None


def test_a_padded_mapping_reads_the_padded_parameter_and_writes_the_original() -> None:
    rule = Concat((Tensor("q", (4, 3)), Tensor("k", (2, 3))))
    padding = Padding((6, 3), (8, 3), (6, 3), 0, ((0, 5), (-1, 1), (5, 1), (5, 1)))
    mapping = pad_mapping(FlaxMapping((("qk", rule), ("other", Tensor("o", (1,))))), {"qk": padding})
    stored = {"q": np.arange(12.0).reshape(4, 3), "k": np.arange(6.0).reshape(2, 3)}
    out = np.empty((8, 3))
    gather(mapping["qk"], stored.__getitem__, out)
    np.testing.assert_array_equal(out, padding.pad(np.concatenate([stored["q"], stored["k"]])))
    written = {name: np.empty_like(value) for name, value in stored.items()}
    scatter(mapping["qk"], out, lambda leaf: written[leaf.name])
    assert all(np.array_equal(stored[name], written[name]) for name in stored)
    assert mapping.tensors == {"q": (4, 3), "k": (2, 3), "o": (1,)}


def test_the_share_that_is_cut_counts_bytes() -> None:
    spec = architecture(QWEN, vocab=47)
    norms = 3 * 16  # two of the layer's and the final one
    elements = pad_architecture(spec, {"tensor": 8})[0].num_parameters
    assert sharded_share(spec, {"tensor": 8}) == pytest.approx(1 - norms / elements)
    assert sharded_share(spec, {"data": 8}) == 0.0
