"""A classifier's head is not left out in silence: its checkpoint is opened as nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ttpu_core import open_checkpoint
from ttpu_core.checkpoint.classifier import HEADS, refuse_classifier
from ttpu_core.errors import UnsupportedError
from ttpu_core.loading import LoadOptions, open_model


def written(folder: Path, architecture: object, model_type: str = "llama") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "architectures": architecture}))
    return folder


@pytest.mark.parametrize("end", HEADS)
@pytest.mark.parametrize("model_type", ["llama", "bert"])
def test_a_classifier_is_refused_before_it_is_loaded_with_what_it_is(tmp_path: Path, end: str, model_type: str) -> None:
    folder = written(tmp_path / "model", [f"Some{end}"], model_type)
    with pytest.raises(UnsupportedError, match=f"holds a Some{end}, whose head .*: use it with") as refusal:
        open_model(folder, LoadOptions())
    assert ("reward_funcs" in str(refusal.value)) == (end == "ForSequenceClassification")


@pytest.mark.parametrize("architecture", [["LlamaForCausalLM"], ["BertModel"], [], None, "odd", [5]])
def test_other_models_are_not(tmp_path: Path, architecture: object) -> None:
    refuse_classifier(open_checkpoint(written(tmp_path / "model", architecture)))


def test_one_that_is_used_for_embeddings_is_opened_for_them(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", ["BertForSequenceClassification"])
    (folder / "modules.json").write_text("[]")
    refuse_classifier(open_checkpoint(folder))
