"""What needs a plugin is refused of a model without one, at every door, in a sentence that names the type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from ttpu import LLM, Trainer
from ttpu_core.auto import AutoModelForTPU
from ttpu_core.backend import Scores
from ttpu_core.cli.main import main
from ttpu_core.config import ModelConfig
from ttpu_core.errors import PluginError, RequestError, UnsupportedError
from ttpu_core.registry import default_registry

pytestmark = pytest.mark.torch

TINY: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a type that no plugin describes."""
    folder = tmp_path_factory.mktemp("biogpt")
    torch.manual_seed(0)
    transformers.BioGptForCausalLM(transformers.BioGptConfig(**TINY)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Any:
    return AutoModelForTPU.from_pretrained(folder, backend="jax")


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    """The exit code of `ttpu` in this process."""
    monkeypatch.setattr("sys.argv", ["ttpu", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def trained(model: Any, out: Path, **options: Any) -> None:
    Trainer(model, train_dataset=[{"input_ids": [3, 4, 5, 6]}], output_dir=out, max_steps=1, **options).train()


@pytest.mark.parametrize(
    "option",
    [
        {"attention_config": {"block": 1}},
        {"attn_implementation": "flash"},
        {"enable_paged_attention": True},
        {"experts": "few"},
        {"patch_packs": ["some"]},
        {"plan": "plan.json"},
        {"quantization": "int8"},
        {"random_seed": 1},
        {"sharding_rules": {"heads": "tensor"}},
    ],
    ids=lambda option: next(iter(option)),
)
def test_an_option_that_needs_a_plugin_is_refused_by_name(option: dict[str, Any], folder: Path) -> None:
    name = next(iter(option))
    with pytest.raises(RequestError, match=rf"^{name}=.* was asked for, but no plugin describes model type 'biogpt'"):
        AutoModelForTPU.from_pretrained(folder, backend="jax", **option)


@pytest.mark.parametrize("options", [{}, {"peft_config": {"target_modules": "all-linear"}}], ids=["weights", "lora"])
@pytest.mark.parametrize("opened", [False, True], ids=["folder", "loaded"])
def test_training_is_refused(
    opened: bool,
    options: dict[str, Any],
    folder: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a folder before its weights are read."""
    model = request.getfixturevalue("loaded") if opened else folder
    monkeypatch.delattr("ttpu_any.fallback.load_model")
    with pytest.raises(RequestError, match=r"of type 'biogpt' was to be trained, but no plugin describes this type"):
        trained(model, tmp_path, **options)


def test_a_draft_model_is_refused_before_it_is_loaded(folder: Path, tmp_path: Path) -> None:
    sizes = {key: value for key, value in TINY.items() if not key.endswith("token_id")}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=r"as a draft model, but no plugin describes its type 'biogpt'"):
        LLM(str(tmp_path), kv_cache_memory=1 << 20, speculative_config={"model": str(folder)})


def test_what_a_loaded_model_has_not_is_refused(loaded: Any, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"the Flax module of .* no plugin describes this model"):
        _ = loaded.module
    with pytest.raises(RequestError, match=r"save_pretrained was called on .* which no plugin describes"):
        loaded.save_pretrained(tmp_path)


def test_a_description_is_refused_without_advice_to_install_what_is_installed(folder: Path) -> None:
    """`ttpu quantize`, `ttpu compile` and `ttpu parameters` ask for one."""
    config = ModelConfig.from_dict(json.loads((folder / "config.json").read_text()))
    with pytest.raises(PluginError, match=r"model type 'biogpt' was asked for, but no installed plugin") as refused:
        default_registry().architecture(config)
    assert "ttpu new-plugin --from CONFIG" in str(refused.value)
    assert "ttpu-core[any]" not in str(refused.value)


def test_info_says_where_it_runs_and_what_a_plugin_adds(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "info", str(folder), "--backend", "jax", "--json") in (0, None)
    found = json.loads(capsys.readouterr().out)
    assert found["plugin"] is None and found["code"].endswith("BioGptForCausalLM")
    assert "`ttpu generate`" in found["runs_in"] and "`ttpu eval`" in found["runs_in"]
    assert "`ttpu train`" not in found["runs_in"]
    assert "quantization and training" in " ".join(found["a_plugin_would_add"])
    assert found["begin_a_plugin"] == f"ttpu new-plugin --from {folder}"


def test_text_logits_of_padded_rows_are_those_of_each_row_alone(folder: Path, loaded: Any) -> None:
    """`ttpu eval` measures models by these."""
    tokens = np.random.default_rng(0).integers(3, 61, (2, 9)).astype(np.int32)
    tokens[1, 5:] = TINY["pad_token_id"]
    runs = default_registry().backend("jax")
    assert isinstance(runs, Scores)
    logits = runs.text_logits(loaded, tokens, np.array([9, 5]))
    host = transformers.BioGptForCausalLM.from_pretrained(folder).eval()
    for row, length in enumerate((9, 5)):
        with torch.no_grad():
            expected = host(torch.tensor(tokens[row : row + 1, :length])).logits[0].numpy()
        np.testing.assert_allclose(logits[row, :length], expected, atol=5e-5)


@pytest.mark.parametrize("command", ["parameters", "quantize", "compile"])
def test_commands_that_need_a_plugin_end_with_one_error(
    command: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {
        "parameters": [], "quantize": ["--scheme", "w8a16", "--out", str(tmp_path / "new")],
        "compile": ["--topology", "v5e:1x1"],
    }  # fmt: skip
    monkeypatch.setenv("TTPU_COMPILE_CACHE", str(tmp_path / "programs"))
    assert run(monkeypatch, command, str(folder), *more[command]) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert "model type 'biogpt' was asked for, but no installed plugin serves it" in printed
