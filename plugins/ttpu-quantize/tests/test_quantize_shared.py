"""Matrices that several layers share are rounded to nearest, and layers are calibrated with them as they are then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ttpu_core import ModelConfig, default_registry
from ttpu_core.checkpoint import open_checkpoint
from ttpu_core.loading import LoadOptions, describe_checkpoint, open_model
from ttpu_core.quantization.config import QuantizationConfig
from ttpu_core.quantization.rounding import dequantize, round_kernel
from ttpu_quantize.calibrated import Calibration
from ttpu_quantize.gptq import GPTQ
from ttpu_quantize.linears import select
from ttpu_quantize.making import make_checkpoint
from ttpu_quantize.output import Output

CONFIG: dict[str, Any] = {
    "model_type": "zamba2", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "layers_block_type": ["hybrid", "mamba", "hybrid"], "intermediate_size": 48, "n_mamba_heads": 4,
    "mamba_d_state": 8, "adapter_rank": 8, "dtype": "float32",
}  # fmt: skip
TOKENS = np.random.default_rng(1).integers(0, 64, (4, 24)).astype(np.int32)
SCHEME = QuantizationConfig.parse("w4a16-g16")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, random = tmp_path_factory.mktemp("shared"), np.random.default_rng(0)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    shapes = default_registry().architecture(ModelConfig.from_dict(CONFIG)).mapping.tensors
    weights = {name: (random.normal(size=of) * of[-1] ** -0.5).astype(np.float32) for name, of in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def made(checkpoint: Path, folder: Path, calibration: Calibration | None) -> dict[str, np.ndarray]:
    opened, architecture = describe_checkpoint(open_checkpoint(checkpoint))
    make_checkpoint(opened, architecture, SCHEME, folder, calibration=calibration)
    return {name: array for file in sorted(folder.glob("*.safetensors")) for name, array in load_file(file).items()}


def calibration() -> Calibration:
    return Calibration(GPTQ(passes=0), default_registry().backend("jax"), LoadOptions(), TOKENS)


def test_a_calibrated_run_rounds_what_is_shared_and_goes_on_where_it_was_stopped(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nearest, whole = made(checkpoint, tmp_path / "rtn", None), made(checkpoint, tmp_path / "gptq", calibration())
    differing = {name for name, array in nearest.items() if not np.array_equal(array, whole[name])}
    assert nearest.keys() == whole.keys()
    assert not any("shared_transformer" in name for name in differing)
    assert {f"model.layers.{index}" for index in range(3)} == {name[: len("model.layers.0")] for name in differing}
    write = Output.write

    def broken(self: Output, unit: int, tensors: Any) -> None:
        if unit == 3:
            raise KeyboardInterrupt
        write(self, unit, tensors)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Output, "write", broken)
        made(checkpoint, tmp_path / "resumed", calibration())
    resumed = made(checkpoint, tmp_path / "resumed", calibration())
    assert all(np.array_equal(resumed[name], array) for name, array in whole.items())


def test_layers_see_what_the_rounded_shared_matrices_return(checkpoint: Path, tmp_path: Path) -> None:
    """Calibration runs the written weights: what the last layer's inputs were is what they are in the written model."""
    opened, architecture = describe_checkpoint(open_checkpoint(checkpoint))
    run = calibration()
    make_checkpoint(opened, architecture, SCHEME, tmp_path / "out", calibration=run)
    module = open_model(tmp_path / "out", LoadOptions(), backend="jax")
    streams = np.concatenate([np.asarray(each) for each in run._run.streams])[: len(TOKENS)]
    weights = load_file(checkpoint / "model.safetensors")
    for linear in select(architecture, opened, SCHEME):
        weights[linear.stored] = dequantize(round_kernel(weights[linear.stored], linear.form), linear.form)
    scale = np.sqrt(np.mean(streams**2, axis=-1, keepdims=True) + 1e-5)
    normed = streams / scale * weights["model.final_layernorm.weight"]
    expected = normed @ weights["model.embed_tokens.weight"].T
    found = np.asarray(module(TOKENS).logits)
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()
