"""Quantized checkpoints on torch_xla: the logits of the JAX backend and of transformers on the same numbers, and
refusals of what its layers cannot hold. Dense checkpoints become the same numbers on both backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch_xla")
pytest.importorskip("ttpu_jax")
transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

from quantized_files import SCHEMES, TOKENS, compressed_tensors, write  # noqa: E402
from tiny import llama_checkpoint  # noqa: E402

from ttpu import AutoModelForTPU  # noqa: E402
from ttpu_core.errors import RequestError, UnsupportedError  # noqa: E402
from ttpu_torch_xla.quantization import QuantizedLinear  # noqa: E402

pytestmark = pytest.mark.torch

IDS = np.random.default_rng(1).integers(0, 250, (2, 9))
CHANNELS = {"num_bits": 8, "type": "int", "strategy": "channel"}

MXFP4 = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float"}}},
}


def microscaled(module: str, weight: Any) -> tuple[dict[str, Any], Any]:
    """Tensors of the right shapes for 4-bit floats in groups of 32."""
    out, inputs = weight.shape
    bytes_ = {"weight_packed": torch.zeros(out, inputs // 2), "weight_scale": torch.full((out, inputs // 32), 127.0)}
    return {name: one.to(torch.uint8) for name, one in bytes_.items()}, weight


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_checkpoint(
        tmp_path_factory.mktemp("dense") / "llama", vocab_size=258, num_hidden_layers=1, tie_word_embeddings=False
    )


def load(path: Path, **options: Any) -> Any:
    return AutoModelForTPU.from_pretrained(path, backend="torch_xla", dtype="float32", **options)


def logits(model: Any) -> np.ndarray:
    with torch.no_grad():
        found: np.ndarray = model(torch.from_numpy(IDS).to(model.device), use_cache=False).logits.cpu().numpy()
    return found


def on_jax(path: Path, **options: Any) -> np.ndarray:
    return np.asarray(AutoModelForTPU.from_pretrained(path, backend="jax", dtype="float32", **options)(IDS).logits)


def stock(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def error(ours: np.ndarray, theirs: np.ndarray) -> float:
    assert np.isfinite(ours).all()
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize(
    "name",
    [
        "int8 per channel",
        "int4 groups asymmetric",
        "int4 activation order",
        "fp8 per tensor",
        "fp8 blocks",
        "gptq asymmetric, activation order",
        "gptq v2, 8 bits",
        "awq",
        "fine-grained fp8",
    ],
)
def test_both_backends_and_transformers_agree_on_a_checkpoint(name: str, dense: Path, tmp_path: Path) -> None:
    quantized, expected = SCHEMES[name](dense, tmp_path)
    model = load(quantized)
    layer = model.get_submodule("model.layers.0.mlp.down_proj")
    assert isinstance(layer, QuantizedLinear)
    assert layer.packed == (layer.format.dtype == "int4")
    assert type(model).__name__ == "LlamaForCausalLM" and not hasattr(model.config, "quantization_config")
    ours = logits(model)
    assert error(ours, on_jax(quantized)) <= 1e-5
    assert error(ours, logits(stock(expected))) <= 1e-4


@pytest.mark.parametrize(
    ("weights", "form", "activation"),
    [
        (CHANNELS, "int-quantized", TOKENS),
        (CHANNELS, "int-quantized", TOKENS | {"strategy": "tensor", "dynamic": False}),
        (CHANNELS | {"type": "float"}, "float-quantized", TOKENS | {"type": "float"}),
    ],
    ids=["int8 tokens", "static int8", "fp8 tokens"],
)
def test_inputs_are_quantized_as_on_jax(weights: Any, form: str, activation: Any, dense: Path, tmp_path: Path) -> None:
    quantized, expected = compressed_tensors(dense, tmp_path, weights, form, activation)
    ours = logits(load(quantized))
    assert error(ours, on_jax(quantized)) <= 1e-5
    assert error(ours, logits(stock(expected))) > 1e-4


@pytest.mark.parametrize("text", ["w8a16", "w4a16-g32", "w8a8", "w4a8-g16-asym", "w8a8-fp8"])
def test_a_shorthand_means_the_same_on_both_backends(text: str, dense: Path) -> None:
    """48 inputs get groups of 16 where 32 are asked for."""
    model = load(dense, quantization=text)
    assert error(logits(model), on_jax(dense, quantization=text)) <= 1e-5
    finer = "groups of 16, because 32 does not divide 48 inputs: model.layers.0.mlp.down_proj"
    assert (finer in str(model.ttpu.quantization)) == text.endswith("g32")


def test_a_quantized_checkpoint_generates_what_its_numbers_do(dense: Path, tmp_path: Path) -> None:
    quantized, expected = SCHEMES["gptq"](dense, tmp_path)
    model, ids = load(quantized), torch.from_numpy(IDS)
    arguments = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **arguments).cpu(), stock(expected).generate(ids, **arguments))
    assert model.ttpu.quantization.formats == {"int4, groups of 16": 4}
    with pytest.raises(UnsupportedError, match="save_pretrained was called on a model with quantized layers"):
        model.save_pretrained(tmp_path / "saved")
    with pytest.raises(RequestError, match=r"is quantized already \(GPTQ\)"):
        load(quantized, quantization="w8a16")


def test_no_dense_weight_of_a_quantized_layer_is_made(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized, _ = SCHEMES["awq"](dense, tmp_path)
    made: list[tuple[int, ...]] = []
    fill = QuantizedLinear.fill

    def watched(self: QuantizedLinear, *arguments: Any) -> None:
        made.extend(tuple(one.shape) for one in self.buffers() if one.is_floating_point())
        fill(self, *arguments)

    monkeypatch.setattr(QuantizedLinear, "fill", watched)
    model = load(quantized)
    assert set(made) == {(inputs // 16, out) for inputs, out in ((32, 32), (32, 16), (32, 48), (48, 32))}
    assert not any("proj" in name for name, _ in model.named_parameters())


def test_stacked_experts_and_formats_without_a_layer_are_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "vocab_size": 250, "num_local_experts": 2, "num_experts_per_tok": 1}
    transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **more)).save_pretrained(tmp_path / "mixtral")
    experts, _ = SCHEMES["awq"](tmp_path / "mixtral", tmp_path / "experts")
    with pytest.raises(UnsupportedError, match=r"makes a tensor of stacked experts, .* use backend='jax', or"):
        load(experts)
    wide = llama_checkpoint(tmp_path / "wide", num_hidden_layers=1, intermediate_size=64)
    floats, _ = write(wide, tmp_path / "floats", MXFP4, microscaled)
    with pytest.raises(UnsupportedError, match=r"as float4_e2m1fn, groups of 32, but .* use backend='jax', or"):
        load(floats)
