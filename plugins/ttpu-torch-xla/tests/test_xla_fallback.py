"""Model types without a plugin run on torch_xla as transformers' own code, with the same tokens and two programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

pytest.importorskip("torch_xla")

from ttpu import LLM, Trainer
from ttpu_core.auto import AutoModelForTPU
from ttpu_core.cli.main import main
from ttpu_core.errors import MappingError, RequestError, UnsupportedError
from ttpu_torch_xla import fallback
from ttpu_torch_xla.generation import stock
from ttpu_torch_xla.runtime import current

pytestmark = pytest.mark.torch

TINY: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IDS = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(1))
ASKED: dict[str, Any] = {
    "attention_mask": torch.ones_like(IDS), "max_new_tokens": 6, "do_sample": False, "eos_token_id": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def biogpt(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A type that no plugin describes: its folder, and transformers' model on the host."""
    folder = tmp_path_factory.mktemp("biogpt")
    torch.manual_seed(0)
    model = transformers.BioGptForCausalLM(transformers.BioGptConfig(**TINY)).eval()
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture
def opened(biogpt: tuple[Path, Any]) -> Any:
    model = AutoModelForTPU.from_pretrained(biogpt[0], backend="torch_xla")
    yield model
    model.ttpu.close()


def test_logits_and_tokens_equal_transformers_and_nothing_is_compiled_twice(
    biogpt: tuple[Path, Any], opened: Any
) -> None:
    expected = biogpt[1].generate(IDS, **ASKED)
    assert torch.equal(opened.generate(IDS, **ASKED), expected)
    runtime = current()
    runtime.reset_counters()
    assert torch.equal(opened.generate(IDS, **ASKED), expected)
    assert runtime.counters().compiles == 0
    with torch.no_grad():
        logits = opened(input_ids=IDS.to(runtime.device())).logits.cpu()
        torch.testing.assert_close(logits, biogpt[1](IDS).logits, atol=2e-5, rtol=0)


def test_where_the_loop_is_wrong_transformers_own_runs(biogpt: tuple[Path, Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(fallback, "TOLERANCE", {"float32": -1.0})
    with pytest.warns(UserWarning, match="transformers' own loop runs"):
        model = AutoModelForTPU.from_pretrained(biogpt[0], backend="torch_xla")
    assert torch.equal(model.generate(IDS, **ASKED), biogpt[1].generate(IDS, **ASKED))
    model.ttpu.close()


def test_what_needs_a_plugin_is_refused(biogpt: tuple[Path, Any], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="quantization='int8' was asked for, but no plugin"):
        AutoModelForTPU.from_pretrained(biogpt[0], backend="torch_xla", quantization="int8")
    transformers.BartConfig().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="'bart' has an encoder and a decoder"):
        fallback.StockFallback().describe(fallback.ModelConfig.from_dict(transformers.BartConfig().to_dict()))


@pytest.mark.parametrize("loaded", [False, True], ids=["folder", "loaded"])
def test_training_is_refused(
    loaded: bool,
    biogpt: tuple[Path, Any],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a folder before its weights are read."""
    model = request.getfixturevalue("opened") if loaded else biogpt[0]
    monkeypatch.delattr(fallback, "stock_model")
    with pytest.raises(RequestError, match="of type 'biogpt' was to be trained, but no plugin describes this type"):
        Trainer(
            model, train_dataset=[{"input_ids": [3, 4, 5, 6]}], output_dir=tmp_path, max_steps=1, backend="torch_xla"
        ).train()


def test_an_engine_is_refused(biogpt: tuple[Path, Any]) -> None:
    with pytest.raises(UnsupportedError, match="'torch_xla' was asked for, but that backend makes no runners"):
        LLM(str(biogpt[0]), backend="torch_xla")


class Command:
    """Runs `ttpu` in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *words: str) -> Any:
        """What it prints as JSON."""
        self.monkeypatch.setattr("sys.argv", ["ttpu", *words, "--json"])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code in (0, None)
        return json.loads(self.capsys.readouterr().out)


@pytest.fixture
def ttpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


def test_info_says_what_runs_it_and_what_a_plugin_would_add(biogpt: tuple[Path, Any], ttpu: Command) -> None:
    found = ttpu("info", str(biogpt[0]), "--backend", "torch_xla")
    assert found["plugin"] is None
    assert found["code"].endswith("BioGptForCausalLM")
    assert "attention kernels for TPUs" in found["a_plugin_would_add"]
    assert found["context"] == 128
    assert "ttpu inspect" in found["runs_in"]


def test_inspect_takes_a_type_without_a_plugin(ttpu: Command, tmp_path: Path) -> None:
    transformers.CodeGenConfig(n_layer=12, n_embd=256, rotary_dim=16, vocab_size=5000).save_pretrained(tmp_path)
    found = ttpu("inspect", str(tmp_path), "--quiet")
    assert (found["model_type"], found["layers"], found["left"]) == ("codegen", 2, [])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("falcon", "ALiBi"),
        ("minimax", "a cache of the model's own"),
    ],
)
def test_what_the_static_cache_cannot_hold_is_left_to_transformers(
    kind: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, dict[str, Any]] = {
        "falcon": {"hidden_size": 32, "num_attention_heads": 2, "alibi": True, "parallel_attn": False},
        "minimax": {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2},
    }
    monkeypatch.setattr(stock, "_warned", set())
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = transformers.AutoConfig.for_model(kind, vocab_size=64, num_hidden_layers=2, **keys[kind], **ends)
    torch.manual_seed(0)
    host = transformers.AutoModelForCausalLM.from_config(config).eval()
    host.save_pretrained(tmp_path)
    opened = AutoModelForTPU.from_pretrained(tmp_path, backend="torch_xla")
    prompt = torch.arange(3, 14)[None]
    with pytest.warns(UserWarning, match=reason):
        ours = opened.generate(prompt, do_sample=False, max_new_tokens=3)
    assert ours.tolist() == host.generate(prompt, do_sample=False, max_new_tokens=3).tolist()
    with torch.no_grad():
        logits = opened(input_ids=prompt.to(opened.device)).logits.cpu()
        torch.testing.assert_close(logits, host(prompt).logits, atol=2e-5, rtol=0)
    opened.ttpu.close()


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a head that fills in masked tokens, as published checkpoints have it."""
    folder = tmp_path_factory.mktemp("encoder") / "bert"
    torch.manual_seed(0)
    transformers.BertForMaskedLM(transformers.BertConfig(**TINY)).save_pretrained(folder)
    return folder


def test_an_encoder_gives_the_hidden_states_of_each_text(
    bert: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = AutoModelForTPU.from_pretrained(bert, backend="torch_xla")
    assert "REPORT" not in capfd.readouterr().err, "the head that is not loaded is no news"
    mask = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
    device, host = current().device(), transformers.BertModel.from_pretrained(bert).eval()
    with torch.no_grad():
        found = model(input_ids=IDS.to(device), attention_mask=mask.to(device)).last_hidden_state.cpu()
        for row, length in enumerate((9, 5)):
            expected = host(IDS[row : row + 1, :length]).last_hidden_state[0]
            torch.testing.assert_close(found[row, :length], expected, atol=1e-5, rtol=0)
    with pytest.raises(RequestError, match="bert was to generate text, but it is an encoder"):
        model.generate(IDS)
    model.ttpu.close()
    monkeypatch.setattr(fallback, "TOLERANCE", {"float32": -1.0})
    with pytest.raises(UnsupportedError, match="BertModel was to be run without a plugin, but the hidden states"):
        AutoModelForTPU.from_pretrained(bert, backend="torch_xla")


def test_missing_tensors_are_not_left_random(biogpt: tuple[Path, Any], tmp_path: Path) -> None:
    biogpt[1].biogpt.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((biogpt[0] / "config.json").read_text())
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if name.endswith("fc1.weight"))
    save_file({key: value for key, value in weights.items() if key != name}, tmp_path / "model.safetensors")
    with pytest.raises(MappingError, match=r"has no tensor for '.*fc1\.weight' \(1 missing\)"):
        AutoModelForTPU.from_pretrained(tmp_path, backend="torch_xla")


def test_tensors_that_the_config_does_not_describe_are_told_of(biogpt: tuple[Path, Any], tmp_path: Path) -> None:
    biogpt[1].save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    more = {name.replace("layers.0.", "layers.1."): value.clone() for name, value in weights.items()}
    save_file({**more, **weights}, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match=r"BioGptForCausalLM does not read 'biogpt\.layers\.1.* and \d+ more in"):
        AutoModelForTPU.from_pretrained(tmp_path, backend="torch_xla").ttpu.close()


def test_an_encoder_is_described_and_inspected_as_one(bert: Path, ttpu: Command) -> None:
    found = ttpu("info", str(bert), "--backend", "torch_xla")
    assert found["code"].endswith("BertModel") and "begin_a_plugin" not in found
    inspected = ttpu("inspect", str(bert))
    assert {one["during"] for one in inspected["found"]} == {"forward"} and not inspected["left"]
