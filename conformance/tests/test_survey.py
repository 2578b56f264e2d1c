"""The survey: rows say what is right, wrong, refused or crashed, and rows that are there are kept."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ttpu_conformance.survey import probe as probe_module
from ttpu_conformance.survey import types, walk
from ttpu_conformance.survey.page import page
from ttpu_conformance.survey.rows import Row, Survey
from ttpu_conformance.survey.types import exclusions, surveyed_types
from ttpu_core.errors import RequestError, UnsupportedError

RIGHT = Row("biogpt", "BioGptForCausalLM", "fallback", error=1e-6, decodes=True, padded=True, compiles=True)
VERSIONS = {"transformers": "5"}


class TorchModel:
    """Stands for a model of TTPU: torch's own, with what a test adds to its logits."""

    def __init__(self, folder: Path, whole: float = 0.0, decoding: float = 0.0) -> None:
        import transformers

        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        self.programs = SimpleNamespace(_params={}, _get=None)
        self.whole, self.decoding = whole, decoding

    def __call__(self, tokens: np.ndarray) -> Any:
        with torch.no_grad():
            return SimpleNamespace(logits=self.model(torch.tensor(tokens)).logits.numpy() + self.whole)

    def generate(self, prompts: list[list[int]], *, max_new_tokens: int, ignore_eos: bool) -> np.ndarray:
        longest = max(map(len, prompts))
        rows = []
        for prompt in prompts:
            tokens = list(prompt)
            for _ in range(max_new_tokens):
                logits = self(np.array([tokens])).logits[0, -1]
                logits[7] += self.decoding
                tokens.append(int(logits.argmax()))
            rows.append([0] * (longest - len(prompt)) + tokens)
        return np.array(rows)


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Probes biogpt as if TTPU opened it in some way."""
    monkeypatch.setattr(probe_module, "NEW_TOKENS", 3)
    monkeypatch.setattr(probe_module._Programs, "refused", lambda self: "")

    def probe(open_model: Any) -> Row:
        opened = SimpleNamespace(from_pretrained=lambda folder, backend, **_: open_model(folder, backend))
        monkeypatch.setattr(probe_module, "AutoModelForTPU", opened)
        return probe_module.probe("biogpt")

    return probe


@pytest.mark.torch
def test_a_model_with_torchs_logits_and_tokens_is_right(probed: Any) -> None:
    row = probed(lambda folder, backend: TorchModel(folder))
    assert (row.way, row.equal, row.decodes, row.padded, row.compiles) == ("fallback", True, True, True, True)
    assert not row.wrong


@pytest.mark.torch
@pytest.mark.parametrize(("fault", "reason"), [("whole", "logits differ"), ("decoding", "generated a token")])
def test_a_model_with_other_logits_or_tokens_is_wrong(probed: Any, fault: str, reason: str) -> None:
    row = probed(lambda folder, backend: TorchModel(folder, **{fault: 5.0}))
    assert row.wrong
    assert row.reason.startswith(reason)


def refuse(folder: Path, backend: str) -> None:
    raise UnsupportedError("it looks ahead.")


@pytest.mark.torch
def test_what_jax_refuses_is_tried_on_torch_xla(probed: Any) -> None:
    row = probed(lambda folder, name: TorchModel(folder).model if name == "torch_xla" else refuse(folder, name))
    assert (row.way, row.equal, row.decodes) == ("torch_xla", True, True)
    assert row.reason == "on JAX: it looks ahead."


@pytest.mark.torch
def test_a_refusal_is_a_row_with_its_reason(probed: Any) -> None:
    row = probed(refuse)
    assert (row.way, row.reason, row.error) == ("refused", "it looks ahead.", None)


def crash(model_type: str) -> Row:
    os._exit(3)


def hang(model_type: str) -> Row:
    time.sleep(60)
    raise AssertionError


@pytest.mark.parametrize(
    ("function", "seconds", "reason"), [(crash, 60.0, "ended with status 3"), (hang, 0.5, "not done after 0.5 s")]
)
def test_a_type_that_crashes_or_hangs_ends_its_own_row_alone(
    function: Any, seconds: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_module, "probe", function)
    row = walk.row_of("biogpt", seconds=seconds)
    assert row.way == "refused"
    assert reason in row.reason


def test_rows_that_are_there_are_kept_and_those_of_named_types_are_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.setattr(walk, "LIBRARIES", ())
    monkeypatch.setattr(walk, "row_of", lambda name: made.append(name) or Row(name, "Class", "fallback"))
    known = dict.fromkeys(("biogpt", "xglm", "llama", "bart"), "SomeForCausalLM")
    for module in (walk, types):
        monkeypatch.setattr(module, "surveyed_types", lambda: known)
    file = tmp_path / "rows.json"
    walk.walk(file)
    assert made == ["biogpt", "xglm", "llama"]
    made.clear()
    walk.walk(file, ["biogpt"])
    walk.walk(file)
    assert made == ["biogpt", "llama"]  # a plugin describes llama, and its row is the fallback's
    with pytest.raises(RequestError, match="'gpt5'"):
        walk.walk(file, ["gpt5"])


def test_results_of_another_transformers_count_for_nothing(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(Survey(VERSIONS, {"biogpt": RIGHT}).to_json())
    assert Survey.read(file, VERSIONS).rows == {"biogpt": RIGHT}
    assert Survey.read(file, {"transformers": "6"}).rows == {}


def test_the_page_counts_decoders_of_text_and_names_what_is_wrong() -> None:
    wrong = Row("xglm", "XGLMForCausalLM", "fallback", error=1e-3, decodes=True, padded=False, compiles=True)
    encoder = Row("bert", "BertLMHeadModel", "fallback", error=1e-6, decodes=True, padded=True, compiles=True)
    text = page(Survey(VERSIONS, {row.model_type: row for row in (RIGHT, wrong, encoder)}))
    total = len(surveyed_types()) - sum(len(each.types) for each in exclusions())
    assert f"Of {total} types" in text
    assert f"* **2** ({2 / total:.1%}) fallback" in text
    assert f"* **1** ({1 / total:.1%}) have torch's logits" in text
    assert "* 1 run and compute something else than torch: xglm" in text
    assert "| `xglm` | `XGLMForCausalLM` | fallback | 1.0e-03 | yes, same length | yes |  |" in text
    assert text.index("Encoders, run as decoders") < text.index("| `bert` |")


def test_each_type_is_excluded_once_and_sizes_are_of_types_that_transformers_has() -> None:
    names = [name for each in exclusions() for name in each.types]
    assert len(names) == len(set(names))
    written = [name for each in types._facts()["excluded"].values() for name in each["types"]]
    assert set(written) | set(types._facts()["sizes"]) <= set(surveyed_types())
