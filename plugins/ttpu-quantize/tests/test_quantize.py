"""`ttpu quantize`: transformers computes what the written weights stand for, an interrupted run goes on, and requests
that cannot be met are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import llama_checkpoint
from typer.testing import CliRunner

from ttpu_core import ModelConfig, default_registry
from ttpu_core.checkpoint import open_checkpoint
from ttpu_core.cli.main import app
from ttpu_core.errors import CheckpointError
from ttpu_core.loading import LoadOptions, describe_checkpoint, open_model
from ttpu_core.quantization.config import QuantizationConfig
from ttpu_core.quantization.rounding import dequantize, round_kernel
from ttpu_core.quantization.schemes import open_quantized
from ttpu_quantize.linears import select
from ttpu_quantize.making import make_checkpoint
from ttpu_quantize.output import Output

SHIPPED = Path(__file__).parents[3] / "examples" / "checkpoints" / "pydoc-llama"
TEXT = "Layer by layer, the model runs over a text, and each layer sees what the quantized ones before it return. " * 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_checkpoint(tmp_path_factory.mktemp("made") / "tiny")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped checkpoint in w4a16-g32."""
    folder = tmp_path_factory.mktemp("shipped") / "w4a16-g32"
    result = invoke(SHIPPED, "--scheme", "w4a16-g32", "--out", folder)
    assert result.exit_code == 0, result.output
    return folder


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["quantize", *map(str, arguments)])


def tensors_in(folder: Path) -> dict[str, np.ndarray]:
    return {name: array for file in sorted(folder.glob("*.safetensors")) for name, array in load_file(file).items()}


def test_rounding_to_nearest_writes_the_reference_and_leaves_the_rest(checkpoint: Path, tmp_path: Path) -> None:
    result = invoke(checkpoint, "--scheme", "w8a8", "--out", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    made = json.loads(result.stdout)
    before, after = load_file(checkpoint / "model.safetensors"), tensors_in(tmp_path / "out")
    assert (made["matrices"], made["method"]) == (14, "rtn")
    assert made["bytes_after"] == sum(array.nbytes for array in after.values())
    name = "model.layers.1.mlp.down_proj"
    form = QuantizationConfig.parse("w8a8").kernel_format
    parts = round_kernel(before[f"{name}.weight"], form)
    np.testing.assert_array_equal(after[f"{name}.weight"], parts["values"])
    np.testing.assert_array_equal(after[f"{name}.weight_scale"], parts["scale"][:, None])
    for kept in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.input_layernorm.weight"):
        np.testing.assert_array_equal(after[kept], before[kept])
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(after)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (checkpoint / "tokenizer.json").read_bytes()
    assert [path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("method", ["gptq", "awq", "smoothquant"])
def test_an_interrupted_run_is_finished_as_if_it_had_not_been(
    checkpoint: Path, text: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibration = ["--method", method, "--calibrate", text, "--num-samples", 3, "--seq-len", 32]
    request = [checkpoint, "--scheme", "w4a16-g16", *calibration]
    whole = invoke(*request, "--out", tmp_path / "whole", "--json")
    assert whole.exit_code == 0, whole.output
    errors = json.loads(whole.stdout)["errors"]
    assert len(errors) == 7
    if method != "smoothquant":  # made for activations: it may cost weights some precision
        assert sum(one[method] for one in errors.values()) < sum(one["rounding"] for one in errors.values())

    from ttpu_quantize.output import Output

    write = Output.write

    def broken(self: Output, unit: int, tensors: Any) -> None:
        if unit == 2:
            raise KeyboardInterrupt
        write(self, unit, tensors)

    with monkeypatch.context() as patched:
        patched.setattr(Output, "write", broken)
        assert invoke(*request, "--out", tmp_path / "resumed").exit_code == 130
    assert not (tmp_path / "resumed" / "config.json").exists()
    kept = (tmp_path / "resumed" / "model-00002-of-00003.safetensors").stat().st_mtime_ns
    assert invoke(*request, "--out", tmp_path / "resumed").exit_code == 0
    assert (tmp_path / "resumed" / "model-00002-of-00003.safetensors").stat().st_mtime_ns == kept
    one, other = tensors_in(tmp_path / "whole"), tensors_in(tmp_path / "resumed")
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("scheme", "skip"),
    [("w4a16-g32", ()), ("w4a16-g16-asym", ("layers.1.mlp",)), ("w8a16", ()), ("fp8", ("layers.0",))],
)
def test_transformers_and_ttpu_compute_what_the_written_weights_stand_for(
    checkpoint: Path, tmp_path: Path, scheme: str, skip: tuple[str, ...]
) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors", exc_type=ImportError)
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    opened, architecture = describe_checkpoint(open_checkpoint(checkpoint))
    config = replace(QuantizationConfig.parse(scheme), skip=skip)
    make_checkpoint(opened, architecture, config, tmp_path / "out")
    weights = load_file(checkpoint / "model.safetensors")
    for linear in select(architecture, opened, config):
        weights[linear.stored] = dequantize(round_kernel(weights[linear.stored], linear.form), linear.form)
    dense = llama_checkpoint(tmp_path / "dense")
    save_file(weights, dense / "model.safetensors", metadata={"format": "pt"})
    tokens = torch.arange(3, 43).reshape(2, 20)
    # Decompressed weights are dense, so that activations are not quantized by either.
    dequantized = CompressedTensorsConfig(dequantize=True)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(dense)(tokens).logits
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", quantization_config=dequantized)(tokens).logits
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    ours = open_model(tmp_path / "out", LoadOptions(), backend="jax")(tokens.numpy()).logits
    assert np.abs(np.asarray(ours) - expected.numpy()).max() <= 1e-4 * expected.abs().max()


@pytest.mark.torch
def test_transformers_gives_the_logits_that_ttpu_gives_for_the_shipped_checkpoint(shipped: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors", exc_type=ImportError)
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(3, 35).reshape(2, 16) * 7
    with torch.no_grad():  # weights are decompressed to float32 here, but to the scales' bfloat16 by dequantize=True
        expected = AutoModelForCausalLM.from_pretrained(shipped, dtype=torch.float32)(tokens).logits.numpy()
    ours = open_model(shipped, LoadOptions(dtype="float32"), backend="jax")(tokens.numpy()).logits
    assert np.abs(np.asarray(ours) - expected).max() <= 1e-4 * np.abs(expected).max()


def test_info_describes_a_quantized_checkpoint(shipped: Path) -> None:
    result = CliRunner().invoke(app, ["info", str(shipped), "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["quantization"]["scheme"] == "compressed-tensors"
    assert facts["quantization"]["formats"] == {"int4, groups of 32": 18, "int4, groups of 16": 6}
    assert facts["quantization"]["kept"] == {"stored so in the checkpoint": ["embed.embedding"]}
    assert facts["files"]["bytes"] == sum(array.nbytes for array in tensors_in(shipped).values())
    assert facts["parameters"]["total"] == 2_699_712
    assert "Pallas (8 rows)" in facts["kernels"]["operations"]["products (int4, groups of 32)"]
    lines = CliRunner().invoke(app, ["info", str(shipped)]).stdout
    assert "compressed-tensors: int4, groups of 32 (18 kernels); int4, groups of 16 (6 kernels)" in lines


def test_a_group_that_does_not_divide_becomes_finer_and_says_so(checkpoint: Path, tmp_path: Path) -> None:
    result = invoke(checkpoint, "--scheme", "w4a16-g32", "--out", tmp_path / "out")  # mlp.down has 48 inputs
    assert "groups of 16, because 32 does not divide 48 inputs: layers.*.mlp.down.kernel" in result.stdout
    groups = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"]
    assert [group["weights"]["group_size"] for group in groups.values()] == [16, 32]
    assert groups["group_0"]["targets"] == [r"re:model\.layers\.\d+\.mlp\.down_proj$"]
    assert groups["group_1"]["targets"] == ["Linear"]


def test_a_layer_that_is_skipped_is_named_and_its_like_are_read_as_quantized(checkpoint: Path, tmp_path: Path) -> None:
    result = invoke(checkpoint, "--scheme", "w8a16", "--skip", "layers.0", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert "re:lm_head$" in ignored
    assert [name for name in ignored if "down_proj" in name] == ["model.layers.0.mlp.down_proj"]
    quantized = open_quantized(open_checkpoint(tmp_path / "out"))
    assert quantized is not None
    assert len(quantized.weights) == 7
    assert all(name.startswith("model.layers.1.") for name in quantized.weights)


EXPERTS = {
    "model_type": "qwen3_moe",
    "vocab_size": 259,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "dtype": "float32",
}


def expert_tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Random weights under the names of a checkpoint that has a tensor for each expert."""
    mapping = default_registry().architecture(ModelConfig.from_dict(config)).mapping
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in mapping.tensors.items()}


def in_one_tensor(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights of `EXPERTS` with a tensor for all experts."""
    experts = "model.layers.0.mlp.experts"
    whole = {name: array for name, array in weights.items() if not name.startswith(experts)}
    gates, ups, downs = (
        np.stack([weights[f"{experts}.{index}.{name}.weight"] for index in range(3)])
        for name in ("gate_proj", "up_proj", "down_proj")
    )
    return whole | {f"{experts}.gate_up_proj": np.concatenate([gates, ups], axis=1), f"{experts}.down_proj": downs}


@pytest.mark.parametrize(("family", "method"), [("qwen3_moe", "gptq"), ("mixtral", "awq")])
def test_calibrated_methods_lower_the_error_of_every_matrix_of_experts(
    family: str, method: str, checkpoint: Path, text: Path, tmp_path: Path
) -> None:
    config = EXPERTS
    if family == "mixtral":
        config = {key: value for key, value in EXPERTS.items() if key not in ("moe_intermediate_size", "num_experts")}
        config |= {"model_type": family, "intermediate_size": 16, "num_local_experts": 3}
    weights = expert_tensors(config)
    folder = tmp_path / family
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    save_file(in_one_tensor(weights) if family == "qwen3_moe" else weights, folder / "model.safetensors")
    calibration = ["--method", method, "--calibrate", text, "--num-samples", 3, "--seq-len", 32]
    result = invoke(folder, "--scheme", "w4a16-g16", *calibration, "--out", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    errors = json.loads(result.stdout)["errors"]
    assert sum("experts" in name for name in errors) == 3
    assert all(one[method] < one["rounding"] for one in errors.values())
    assert sum(".experts." in name and name.endswith("weight_packed") for name in tensors_in(tmp_path / "out")) == 9


def test_experts_in_one_tensor_are_quantized_as_those_in_many(tmp_path: Path) -> None:
    weights = expert_tensors(EXPERTS)
    experts = "model.layers.0.mlp.experts"
    found = []
    for name, tensors in {"many": weights, "one": in_one_tensor(weights)}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(EXPERTS))
        save_file(tensors, tmp_path / name / "model.safetensors")
        result = invoke(tmp_path / name, "--scheme", "w4a16-g16-asym", "--out", tmp_path / f"{name}-w4")
        assert result.exit_code == 0, result.output
        found.append(tensors_in(tmp_path / f"{name}-w4"))
    assert f"{experts}.2.up_proj.weight_packed" in found[0]
    assert found[0].keys() == found[1].keys()
    assert all(np.array_equal(found[0][name], found[1][name]) for name in found[0])
    configs = [json.loads((tmp_path / f"{name}-w4" / "config.json").read_text()) for name in ("many", "one")]
    assert configs[0] == configs[1]


def test_a_full_disk_is_told_in_one_sentence(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")  # safetensors'

    monkeypatch.setattr("ttpu_quantize.output.save_file", full)
    result = invoke(checkpoint, "--scheme", "w8a16", "--out", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert "failed (No space left on device): make room, or name another folder." in result.stderr
    monkeypatch.setattr("ttpu_jax.params.export.save_file", full)
    with pytest.raises(CheckpointError, match=r"failed \(No space left on device\): make room"):
        open_model(checkpoint, LoadOptions(), backend="jax").save_pretrained(tmp_path / "copy")


def test_a_file_that_is_gone_is_not_told_as_a_full_disk(tmp_path: Path) -> None:
    output = Output(tmp_path / "out", {}, 0)
    with pytest.raises(CheckpointError, match=r"a file that it needs cannot be read \(FileNotFoundError.*gone.json"):
        output.finish({}, [tmp_path / "gone.json"])


def test_requests_that_cannot_be_met_are_refused(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    def refused(*arguments: object, out: Path = tmp_path / "new") -> str:
        result = invoke(*arguments, "--out", out)
        assert result.exit_code == 2, result.output
        return str(result.stderr)

    assert "'w3a16' was asked for" in refused(checkpoint, "--scheme", "w3a16")
    assert "mxfp4 was asked for" in refused(checkpoint, "--scheme", "mxfp4")
    assert "pass --calibrate FILE" in refused(checkpoint, "--scheme", "w4a16", "--method", "gptq")
    long = ["--method", "awq", "--calibrate", text, "--seq-len", "300"]
    assert "context holds 256 tokens" in refused(checkpoint, "--scheme", "w4a16", *long)
    unread = (
        ("rtn", "--calibrate", text),
        ("rtn", "--num-samples", 3),
        ("rtn", "--damping", 0.01),
        ("gptq", "--strength", 0.5),
        ("smoothquant", "--actorder", "none"),
    )
    for method, option, value in unread:
        given = refused(checkpoint, "--scheme", "w8a16", "--method", method, option, value)
        assert f"{option} was given, but it has no effect with --method {method}: add --method" in given
    assert "names 'mlp.sideways'" in refused(checkpoint, "--scheme", "w4a16", "--skip", "mlp.sideways")
    assert "is not empty" in refused(checkpoint, "--scheme", "w4a16", out=checkpoint)
    assert invoke(checkpoint, "--scheme", "w8a16", "--out", tmp_path / "done").exit_code == 0
    assert "says that it is already" in refused(tmp_path / "done", "--scheme", "w8a16")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / ".ttpu-quantize.json").write_text("{}")
    assert "another quantization was begun" in refused(checkpoint, "--scheme", "w8a16", out=tmp_path / "begun")
    broken = llama_checkpoint(tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = np.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    assert "holds infinities or NaN" in refused(broken, "--scheme", "w8a16", out=tmp_path / "nan")
