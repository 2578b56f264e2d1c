"""The kit turns the knobs of a config class by itself, and finds a plugin that takes one of them wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from broken import LLAMA, cases

from ttpu_conformance.automatic import Knob, knobs
from ttpu_conformance.checks import knobs as subject
from ttpu_conformance.runner import run
from ttpu_conformance.selection import checks_for

pytestmark = pytest.mark.torch

BIAS_IN_QUERIES_ALONE = """
@hookimpl
def ttpu_attention(config):
    return replace(defaults.ttpu_attention(config), output_bias=False)
"""


def test_every_key_of_the_class_is_turned(tmp_path: Path) -> None:
    (case,) = cases(tmp_path, "qwen2", LLAMA)
    found = {knob.key: [setting[knob.key] for setting in knob.settings] for knob in knobs(case)}
    assert found["use_sliding_window"] == [True]
    assert found["rms_norm_eps"] == [1e-2]
    assert found["hidden_act"] == ["gelu", "gelu_pytorch_tanh"]
    assert found["num_key_value_heads"] == [1, 4]
    assert found["layer_types"][-1] == ["full_attention", "sliding_attention"]
    ropes = [rope["rope_type"] for rope in found["rope_parameters"]]
    assert ropes == ["default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"]
    assert "attention_dropout" not in found and "bos_token_id" not in found


def test_a_knob_that_no_variant_turns_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turned = [Knob("attention_bias", ({"attention_bias": True},)), Knob("an_object", ())]
    monkeypatch.setattr(subject, "knobs", lambda case: turned)
    (result,) = run(checks_for(cases(tmp_path, "llama", BIAS_IN_QUERIES_ALONE, "wrong"), only=("every_knob",)))
    assert result.status == "failed"
    assert result.reason.startswith("With attention_bias=True, ") and "`ttpu_attention`" in result.reason
    (result,) = run(checks_for(cases(tmp_path, "llama", LLAMA, "right"), only=("every_knob",)))
    assert (result.status, result.reason) == ("passed", "never varied: an_object")
    assert result.details["turned"] == ["attention_bias=True"]


def test_only_the_full_level_turns_knobs(tmp_path: Path) -> None:
    made = cases(tmp_path, "llama", LLAMA)
    for depth, count in (("quick", 0), ("standard", 0), ("full", 1)):
        assert sum(item.check.id == "every_knob" for item in checks_for(made, depth)) == count  # type: ignore[arg-type]
