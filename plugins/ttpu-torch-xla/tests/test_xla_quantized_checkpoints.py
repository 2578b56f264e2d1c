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

import quantized_files  # noqa: E402
from quantized_files import SCHEMES, TOKENS, compressed_tensors, write  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402
from tiny import llama_checkpoint  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from ttpu import AutoModelForTPU  # noqa: E402
from ttpu_core.cli.main import app  # noqa: E402
from ttpu_core.errors import RequestError, UnsupportedError  # noqa: E402
from ttpu_torch_xla.quantization import QuantizedLinear  # noqa: E402
from ttpu_torch_xla.quantization.experts import QuantizedStack  # noqa: E402

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


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four experts, of which a token takes two, with 48 features inside."""
    sizes = {"hidden_size": 32, "moe_intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 250, "num_experts": 4, "num_experts_per_tok": 2}
    folder = tmp_path_factory.mktemp("mixture") / "qwen3_moe"
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**sizes, **more, tie_word_embeddings=False, initializer_range=0.1)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def stacks_of(model: Any) -> list[QuantizedStack]:
    return [one for one in model.modules() if isinstance(one, QuantizedStack)]


@pytest.mark.parametrize("text", ["w8a16", "w4a16-g32", "w8a16-fp8", "w4a8-g16-asym"])
def test_a_shorthand_for_experts_means_the_same_on_both_backends(text: str, mixture: Path) -> None:
    model = load(mixture, quantization=text)
    assert len(stacks_of(model)) == model.ttpu.quantization.stacks == 2
    assert error(logits(model), on_jax(mixture, quantization=text)) <= 1e-5


@pytest.mark.parametrize("text", ["w8a16", "w4a16-g16"])
def test_quantized_experts_that_ttpu_wrote_are_the_same_on_both_backends(
    text: str, mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ttpu_quantize")
    out = tmp_path / "quantized"
    result = CliRunner().invoke(app, ["quantize", str(mixture), "--scheme", text, "--out", str(out)])
    assert result.exit_code == 0, result.output
    with monkeypatch.context() as watched:
        watched.setattr(QuantizedStack, "_dequantized", lambda *_: pytest.fail("experts are dense on the host"))
        model = load(out)
    assert {one.packed for one in stacks_of(model)} == {text.startswith("w4")}
    assert not any("experts" in name for name, _ in model.named_parameters())
    assert error(logits(model), on_jax(out)) <= 1e-5


def test_experts_with_an_input_order_of_their_own_are_put_back_in_order(mixture: Path, tmp_path: Path) -> None:
    quantized, expected = SCHEMES["gptq asymmetric, activation order"](mixture, tmp_path)
    model = load(quantized)
    [up, down] = stacks_of(model)
    assert up.input_place is not None and down.input_place is not None
    ours = logits(model)
    assert error(ours, on_jax(quantized)) <= 1e-5
    assert error(ours, logits(stock(expected))) <= 1e-4
    which = torch.tensor([3, 1, 3], device=model.device)
    assert torch.equal(down[which].cpu(), down.weight.cpu()[which.cpu()])


def test_experts_and_formats_that_no_layer_holds_are_refused(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    static = compressed_tensors(
        mixture, tmp_path / "static", CHANNELS, "int-quantized", TOKENS | {"strategy": "tensor", "dynamic": False}
    )[0]
    with pytest.raises(UnsupportedError, match=r"experts with a static scale of their inputs: use backend='jax', or"):
        load(static)
    with monkeypatch.context() as changed:
        changed.setattr(quantized_files, "SKIPPED", (*quantized_files.SKIPPED, "experts.2.up_proj"))
        mixed = SCHEMES["awq"](mixture, tmp_path / "mixed")[0]
    with pytest.raises(UnsupportedError, match=r"gate_up_proj' .* not all quantized in one way: use backend='jax', or"):
        load(mixed)
    wide = llama_checkpoint(tmp_path / "wide", num_hidden_layers=1, intermediate_size=64)
    floats, _ = write(wide, tmp_path / "floats", MXFP4, microscaled)
    with pytest.raises(UnsupportedError, match=r"as float4_e2m1fn, groups of 32, but .* use backend='jax', or"):
        load(floats)


def test_a_tied_head_may_be_stored_in_place_of_the_embedding(tmp_path: Path) -> None:
    """transformers ties the embedding to it; it was refused as an incomplete download."""
    pytest.importorskip("ttpu_quantize")
    usual, path = (llama_checkpoint(tmp_path / name, tie_word_embeddings=True) for name in ("usual", "dense"))
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    expected = stock(path)(torch.from_numpy(IDS)).logits.detach().numpy()
    assert error(expected, stock(usual)(torch.from_numpy(IDS)).logits.detach().numpy()) == 0
    command = ["quantize", str(path), "--scheme", "w8a16", "--out", str(tmp_path / "stored")]
    assert CliRunner().invoke(app, command).exit_code == 0
    stored = stock(tmp_path / "stored")(torch.from_numpy(IDS)).logits.detach().numpy()
    for folder, options, wanted, bound in (
        (path, {}, expected, 1e-5),
        (path, {"quantization": "w8a16"}, on_jax(usual, quantization="w8a16"), 1e-5),
        (tmp_path / "stored", {}, stored, 1e-5),
    ):
        assert error(on_jax(folder, **options), wanted) <= bound
        model = load(folder, **options)
        assert error(logits(model), wanted) <= bound
        model.ttpu.close()


def test_layers_that_share_a_weight_share_the_quantized_layer(tmp_path: Path) -> None:
    pytest.importorskip("ttpu_quantize")
    torch.manual_seed(0)
    config = transformers.Zamba2Config(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_attention_heads=4, n_mamba_heads=4, mamba_d_state=8,
        num_hidden_layers=2, layers_block_type=["hybrid", "hybrid"], adapter_rank=8, initializer_range=0.1,
    )  # fmt: skip
    transformers.Zamba2ForCausalLM(config).save_pretrained(tmp_path / "dense")
    command = ["quantize", str(tmp_path / "dense"), "--scheme", "w8a16", "--out", str(tmp_path / "stored")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    # While loading, JAX leaves a block's own projection and its updates dense, and this backend does not.
    for path, options, bound in (("dense", {"quantization": "w8a16"}, 0.02), ("stored", {}, 1e-5)):
        model = load(tmp_path / path, **options)
        first, second = (layer.shared_transformer.self_attn.q_proj for layer in model.model.layers)
        assert isinstance(first, QuantizedLinear) and first is second
        assert error(logits(model), on_jax(tmp_path / path, **options)) <= bound
        model.ttpu.close()
