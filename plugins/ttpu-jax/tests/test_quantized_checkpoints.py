"""Quantized checkpoints give the logits that their own dequantization gives: those that the compressed-tensors library
writes, and GPTQ, AWQ and FP8 files packed as their formats define."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
import transformers
from quantized_files import INT4, SCHEMES, TOKENS, compressed_tensors
from safetensors.torch import load_file, save_file
from tiny import llama_checkpoint

from ttpu import AutoModelForTPU
from ttpu_core.checkpoint import open_checkpoint, open_config
from ttpu_core.checkpoint.decoded import DecodedTensor
from ttpu_core.checkpoint.header import TensorReader
from ttpu_core.errors import CheckpointError, MappingError, RequestError, TTPUError, UnsupportedError
from ttpu_core.quantization.schemes import open_quantized
from ttpu_core.quantization.stored import stored_architecture
from ttpu_core.registry import default_registry
from ttpu_jax.ops.kernels import QuantizedKernel

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    """Imported where a test runs and not where tests are collected: it takes seconds."""
    pytest.importorskip("compressed_tensors")


IDS = np.random.default_rng(1).integers(0, 250, (2, 9))
@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_checkpoint(tmp_path_factory.mktemp("dense") / "llama", vocab_size=250, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture of experts, saved by transformers."""
    folder = tmp_path_factory.mktemp("dense") / "mixtral"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "vocab_size": 250, "num_local_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **more)).save_pretrained(folder)
    return folder


def load(path: Path, **options: Any) -> Any:
    return AutoModelForTPU.from_pretrained(path, dtype="float32", **options)


def logits(model: Any) -> np.ndarray:
    return np.asarray(model(IDS).logits)


def assert_equal(ours: np.ndarray, reference: np.ndarray) -> None:
    assert np.abs(ours - reference).max() <= 1e-4 * np.abs(reference).max()


def reference(path: Path) -> np.ndarray:
    """The logits of plain transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        found: np.ndarray = model(torch.from_numpy(IDS)).logits.numpy()
    return found


@pytest.mark.parametrize("name", SCHEMES)
def test_a_checkpoint_gives_the_logits_of_its_own_dequantization(name: str, dense: Path, tmp_path: Path) -> None:
    quantized, expected = SCHEMES[name](dense, tmp_path)
    model = load(quantized)
    kernel = model.params["layers.0.mlp.down.kernel"]
    assert isinstance(kernel, QuantizedKernel)
    assert (kernel.input_order is not None) == ("activation order" in name)
    assert_equal(logits(model), reference(expected))
    config = open_config(quantized)
    architecture = default_registry().architecture(config)
    stored = stored_architecture(architecture, config, open_checkpoint(quantized)).spec.kernel_formats
    assert stored == stored_architecture(architecture, config).spec.kernel_formats, "what the config alone announces"
    assert len(stored) == 4 * len(architecture.spec.layers)


@pytest.mark.parametrize("name", ["int4 activation order", "fine-grained fp8"])
def test_a_kernel_of_which_a_part_is_quantized_is_held_dequantized(name: str, dense: Path, tmp_path: Path) -> None:
    quantized, expected = SCHEMES[name](dense, tmp_path)
    layers = range(len(default_registry().architecture(open_config(dense)).spec.layers))
    kept = [f"model.layers.{layer}.{part}" for layer in layers for part in ("self_attn.k_proj", "mlp.up_proj")]
    numbers = load_file(expected / "model.safetensors")
    tensors = load_file(quantized / "model.safetensors")
    tensors = {key: tensor for key, tensor in tensors.items() if key.rpartition(".")[0] not in kept}
    save_file(tensors | {f"{one}.weight": numbers[f"{one}.weight"] for one in kept}, quantized / "model.safetensors")
    config = json.loads((quantized / "config.json").read_text())
    settings = config["quantization_config"]
    skipped = "ignore" if settings["quant_method"] == "compressed-tensors" else "modules_to_not_convert"
    settings[skipped] = [*(settings.get(skipped) or ()), *kept]
    (quantized / "config.json").write_text(json.dumps(config))
    model = load(quantized)
    assert_equal(logits(model), reference(expected))
    formats = dict(model.spec.kernel_formats)
    assert {path.removeprefix("layers.0.") for path in formats if path.startswith("layers.0.")} == {
        "attention.output.kernel",
        "mlp.down.kernel",
    }
    assert "held dequantized because the checkpoint" in str(model.quantization)
    announced = stored_architecture(default_registry().architecture(open_config(quantized)), open_config(quantized))
    assert dict(announced.spec.kernel_formats) == formats


def test_experts_are_read_too(mixture: Path, tmp_path: Path) -> None:
    quantized, expected = SCHEMES["int4 groups asymmetric"](mixture, tmp_path)
    model = load(quantized)
    assert isinstance(model.params["layers.0.moe.experts.down.kernel"], QuantizedKernel)
    assert_equal(logits(model), reference(expected))


def test_experts_with_an_input_order_may_be_cut_along_their_inner_dimension(mixture: Path, tmp_path: Path) -> None:
    quantized, expected = SCHEMES["int4 activation order"](mixture, tmp_path)
    model = load(quantized, mesh="expert=2,tensor=4")
    assert model.params["layers.0.moe.experts.down.kernel"].values.sharding.shard_shape((4, 32, 48)) == (2, 32, 12)
    assert_equal(logits(model), reference(expected))


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("int4 groups asymmetric", "tensor=8"),
        ("fine-grained fp8", "fsdp=2,tensor=4"),
        ("gptq asymmetric, activation order", "tensor=8"),
    ],
)
def test_a_mesh_gives_what_one_device_gives(name: str, mesh: str, dense: Path, tmp_path: Path) -> None:
    """On 8 devices the heads are padded and groups are split."""
    quantized, _ = SCHEMES[name](dense, tmp_path)
    assert_equal(logits(load(quantized, mesh=mesh)), logits(load(quantized)))


def test_quantized_inputs_follow_the_checkpoint(dense: Path, tmp_path: Path) -> None:
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    quantized, expected = compressed_tensors(dense, tmp_path / "dynamic", weights, "int-quantized", TOKENS)
    model = load(quantized)
    form = dict(model.spec.kernel_formats)["layers.0.mlp.down.kernel"]
    assert form.activation is not None and not form.activation.static
    difference = np.abs(logits(model) - reference(expected)).max() / np.abs(reference(expected)).max()
    assert 1e-4 < difference < 0.05
    static = TOKENS | {"strategy": "tensor", "dynamic": False}
    quantized, _ = compressed_tensors(dense, tmp_path / "static", weights, "int-quantized", static)
    kernel = load(quantized).params["layers.0.mlp.gate_up.kernel"]
    assert np.asarray(kernel.input_scale) == np.float32(0.05)


def test_one_zero_point_is_that_of_every_group(dense: Path, tmp_path: Path) -> None:
    quantized, _ = compressed_tensors(dense, tmp_path, INT4 | {"num_bits": 8, "symmetric": False}, "int-quantized")
    damaged(quantized, lambda t: t.update({Q + "weight_zero_point": torch.tensor([3], dtype=torch.int8)}))
    found = open_quantized(open_checkpoint(quantized))
    assert found is not None
    zero = found.weights[Q + "weight"].parts["zero_point"]
    assert isinstance(zero, DecodedTensor)
    with TensorReader() as reader:
        np.testing.assert_array_equal(zero.rows(reader, 1, 4), np.full((3, 2), 3))  # groups of 16 of 32 inputs


# damaged files


def damaged(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


Q = "model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize(
    ("name", "change", "error", "words"),
    [
        ("int4 groups", lambda t: t.pop(Q + "weight_scale"), CheckpointError, "has no .*weight_scale' beside it"),
        ("int4 groups", lambda t: t[Q + "weight_scale"].fill_(np.nan), CheckpointError, "NaN or infinite: take"),
        (
            "int4 groups",
            lambda t: t.update({Q + "weight_packed": t[Q + "weight_packed"][:, 1:].contiguous()}),
            CheckpointError,
            "weight_packed' has shape .* words of 8 numbers",
        ),
        (
            "int4 groups",
            lambda t: t.update({Q + "weight_scale": t[Q + "weight_scale"][:, :1].contiguous()}),
            CheckpointError,
            "1 scales per output channel, but groups of 16 were announced",
        ),
        ("int4 activation order", lambda t: t[Q + "weight_g_idx"].fill_(7), CheckpointError, "has the entry 7, but"),
        (
            "gptq asymmetric, activation order",
            lambda t: t.update({Q + "g_idx": t[Q + "g_idx"].flip(0).contiguous()}),
            UnsupportedError,
            "stored in different orders",
        ),
        ("gptq", lambda t: t[Q + "qzeros"].fill_(0), CheckpointError, "but config.json says sym: true"),
        ("gptq", lambda t: t.pop(Q + "scales"), CheckpointError, "has no .*q_proj.scales"),
        ("awq", lambda t: t.update({Q + "qweight": t[Q + "qweight"][1:].contiguous()}), CheckpointError, "announced"),
        (
            "fine-grained fp8",
            lambda t: t.update({Q + "weight_scale_inv": torch.ones(3, 3)}),
            CheckpointError,
            "blocks of 32 x 32",
        ),
        (
            "int8 per channel",
            lambda t: t.update({Q + "weight": t[Q + "weight"][1:], Q + "weight_scale": t[Q + "weight_scale"][1:]}),
            MappingError,
            "has shape .*, but the config asks for",
        ),
    ],
)
def test_damaged_files_are_refused(
    name: str, change: Any, error: type[TTPUError], words: str, dense: Path, tmp_path: Path
) -> None:
    quantized, _ = SCHEMES[name](dense, tmp_path)
    with pytest.raises(error, match=words):
        load(damaged(quantized, change))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "stored for CUDA kernels.: take one of those, or"),
        ({"quant_method": "gguf"}, "GGUF files are read by llama.cpp"),
        ({"quant_method": "mystery"}, "this scheme is not known here"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ weights of 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "file format 'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "layout 'gemv'"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float"}}},
            },
            "'nvfp4-pack-quantized' of compressed-tensors",
        ),
    ],
)
def test_other_schemes_are_refused_in_one_sentence(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = llama_checkpoint(tmp_path / "llama")
    settings = json.loads((path / "config.json").read_text()) | {"quantization_config": config}
    (path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedError, match=words):
        load(path)


def test_a_quantized_checkpoint_is_not_quantized_again(dense: Path, tmp_path: Path) -> None:
    quantized, _ = SCHEMES["gptq"](dense, tmp_path)
    with pytest.raises(RequestError, match=r"is quantized already \(GPTQ\)"):
        load(quantized, quantization="w8a16")
