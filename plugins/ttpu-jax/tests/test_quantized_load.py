"""Weights are quantized while they are loaded: to the same numbers on one device and on a mesh, padded or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from padded import qwen_checkpoint
from safetensors.numpy import load_file, save_file
from tiny import llama_checkpoint

from ttpu import AutoModelForTPU
from ttpu_core import default_registry, open_checkpoint
from ttpu_core.errors import CheckpointError, RequestError
from ttpu_core.mapping import gather, stack_layers
from ttpu_core.quantization import QuantizationConfig, quantize_spec
from ttpu_core.quantization.rounding import dequantize, round_kernel
from ttpu_core.spec.kernel_format import KernelFormat
from ttpu_core.spec.parameters import stacked_parameters
from ttpu_jax.model.causal_model import causal_model
from ttpu_jax.model.modules import Runtime, different_ropes
from ttpu_jax.ops.kernels import QuantizedKernel, dense
from ttpu_jax.params.initialize import abstract_parameters, random_parameters
from ttpu_jax.params.load import load_parameters, row_blocks
from ttpu_jax.params.padding import pad_for
from ttpu_jax.params.placement import Placement, local_placement
from ttpu_jax.params.quantized import groupings_for

FLOAT32 = np.dtype(np.float32)
IDS = np.random.default_rng(1).integers(0, 250, (2, 9))


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """28 query and 4 KV heads."""
    return qwen_checkpoint(tmp_path_factory.mktemp("uneven") / "qwen", intermediate_size=128)


def load(path: Path, quantization: Any, **options: Any) -> Any:
    return AutoModelForTPU.from_pretrained(path, dtype="float32", quantization=quantization, **options)


def logits(model: Any) -> np.ndarray:
    return np.asarray(model(IDS).logits)


def loaded(path: Path, text: str, *, stacked: bool = False) -> tuple[Any, dict[str, Any]]:
    checkpoint = open_checkpoint(path)
    architecture = default_registry().architecture(checkpoint.config)
    spec = quantize_spec(architecture.spec, QuantizationConfig.parse(text))
    mapping, table = architecture.mapping, spec.parameters
    if stacked:
        mapping, table = stack_layers(mapping, spec), stacked_parameters(spec)
    groupings = groupings_for(spec, Placement(), stacked=stacked)
    return spec, load_parameters(checkpoint, mapping, table, Placement(), FLOAT32, groupings=groupings)


@pytest.mark.parametrize("text", ["w8a16", "w4a16-g32-asym", "w8a16-fp8-g32", "mxfp4"])
def test_each_kernel_is_rounded_to_the_nearest_numbers(text: str, uneven: Path) -> None:
    spec, params = loaded(uneven, text)
    mapping = default_registry().architecture(open_checkpoint(uneven).config).mapping
    files = load_file(uneven / "model.safetensors")
    for path, form in spec.kernel_formats:
        weights = np.empty(spec.parameters[path].shape, np.float32)
        gather(mapping[path], files.__getitem__, weights)
        expected = dequantize(round_kernel(weights, form), form)
        # XLA's division may differ in the last bit, and so round a number between two others the other way.
        steps = np.abs(np.asarray(dense(params[path])) - expected) > 1e-6
        assert steps.mean() < 1e-3, path
    assert isinstance(params["head.kernel"], jax.Array)


def test_stacked_layers_hold_the_same_kernels(uneven: Path) -> None:
    _, params = loaded(uneven, "w4a16-g32-asym")
    _, stacked = loaded(uneven, "w4a16-g32-asym", stacked=True)
    for path in ("attention.qkv.kernel", "mlp.down.kernel"):
        for part in ("values", "scale", "zero_point"):
            both = [getattr(params[f"layers.{layer}.{path}"], part) for layer in range(2)]
            assert np.array_equal(getattr(stacked[f"groups.0.0.{path}"], part), np.stack(both))


@pytest.mark.parametrize("block", [1000, 5000])
def test_large_kernels_are_rounded_block_by_block_to_the_same_numbers(
    block: int, uneven: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = loaded(uneven, "w4a16-g32-asym")
    monkeypatch.setattr("ttpu_jax.params.load.BLOCK", block)
    _, params = loaded(uneven, "w4a16-g32-asym")
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize("shape", [(7, 3), (2, 5, 3), (4, 2, 6, 3), (1, 3)])
@pytest.mark.parametrize("most", [1, 6, 9, 100])
def test_blocks_of_rows_cover_a_kernel(shape: tuple[int, ...], most: int) -> None:
    kernel = np.arange(np.prod(shape)).reshape(shape)
    found = np.full((kernel.size // 3, 3), -1)
    blocks = [(start, kernel[tuple(slice(*each) for each in box)]) for start, box in row_blocks(shape, most)]
    assert {block.shape for _, block in blocks} == {blocks[0][1].shape}
    assert blocks[0][1].size <= max(most, 3)
    for start, block in blocks:
        rows = block.reshape(-1, 3)
        found[start : start + len(rows)] = rows
    assert np.array_equal(found, kernel.reshape(-1, 3))


@pytest.mark.parametrize(
    ("text", "mesh"), [("w4a16-g32-asym", "fsdp=2,tensor=4"), ("w4a16-g32", "tensor=8"), ("w8a8", "tensor=8")]
)
def test_a_padded_model_on_a_mesh_is_the_model_of_one_device(text: str, mesh: str, uneven: Path) -> None:
    alone, sharded = load(uneven, text), load(uneven, text, mesh=mesh)
    expected = logits(alone)
    assert np.abs(logits(sharded) - expected).max() <= 2e-5 * np.abs(expected).max()
    output = sharded.params["layers.0.attention.output.kernel"]
    assert output.values.sharding.spec == output.scale.sharding.spec or text == "w8a8"


def test_the_head_and_expert_kernels_follow_the_configuration(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = llama_checkpoint(tmp_path / "llama")
    model = load(path, {"bits": 8, "group_size": 32, "lm_head": True, "skip": ["layers.0", "self_attn"]})
    quantized = {name for name, kernel in model.params.items() if isinstance(kernel, QuantizedKernel)}
    assert quantized == {"layers.1.mlp.gate_up.kernel", "layers.1.mlp.down.kernel", "head.kernel"}
    assert np.isfinite(logits(model)).all()
    assert model.quantization.formats == {"int8, groups of 32": 2, "int8, groups of 16": 1}
    assert "in groups of 16, because 32 does not divide 48 inputs: layers.*.mlp.down.kernel" in caplog.text
    assert "not quantized, skipped by 'self_attn': layers.*.attention.qkv.kernel" in str(model.quantization)


@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_table_is_looked_up_by_row_and_serves_as_the_head(tied: bool, tmp_path: Path) -> None:
    path = llama_checkpoint(tmp_path / "llama", tie_word_embeddings=tied)
    weights = load_file(path / "model.safetensors")
    parts = round_kernel(weights["model.embed_tokens.weight"], KernelFormat("int8"))
    weights["model.embed_tokens.weight"] = dequantize(parts, KernelFormat("int8"))
    rounded_path = llama_checkpoint(tmp_path / "rounded", tie_word_embeddings=tied)
    save_file(weights, rounded_path / "model.safetensors", metadata={"format": "pt"})
    asked = {"bits": 4, "embeddings": True, "skip": ["layers.0", "layers.1"]}
    model, expected = load(path, asked, mesh="fsdp=2,tensor=4"), logits(load(rounded_path, None))
    table = model.params["embed.embedding"]
    assert isinstance(table, QuantizedKernel)
    assert (table.scale.shape, table.dtype) == ((260,), np.int8)  # of 259 rows
    assert np.abs(logits(model)[..., :259] - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("block", [2**18, 1000])
def test_weights_that_are_no_numbers_are_refused(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ttpu_jax.params.load.BLOCK", block)
    path = llama_checkpoint(tmp_path / "llama")
    weights = load_file(path / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 4] = np.nan
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.down.kernel was to be quantized, but .* NaN"):
        load(path, "w8a16")


def test_abstract_and_random_parameters_have_the_structure_of_loaded_ones(uneven: Path) -> None:
    spec, params = loaded(uneven, "w4a16-g32-asym")
    placement = local_placement("tensor=4")
    spec, _ = pad_for(spec, placement)
    abstract = abstract_parameters(spec.parameters, placement, FLOAT32)
    drawn = random_parameters(spec.parameters, placement, FLOAT32)
    assert jax.tree.structure(abstract) == jax.tree.structure(drawn)
    assert {path: type(kernel) for path, kernel in drawn.items()}.items() >= {
        (path, QuantizedKernel) for path, kernel in params.items() if isinstance(kernel, QuantizedKernel)
    }
    model = causal_model(spec, Runtime(placement, ropes=different_ropes(spec.layers)))
    for one, other, sharding in zip(*map(jax.tree.leaves, (abstract, drawn, dict(model.placements))), strict=True):
        assert (one.shape, one.dtype, one.sharding) == (other.shape, other.dtype, other.sharding)
        assert one.sharding == sharding


def test_a_quantized_model_is_not_saved_as_a_dense_one(tmp_path: Path) -> None:
    model = load(llama_checkpoint(tmp_path / "llama"), "w8a16")
    with pytest.raises(RequestError, match="ttpu quantize"):
        model.save_pretrained(tmp_path / "saved")
