"""Checkpoints whose config ties the head to the embedding, and that hold a head all the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny
from safetensors.numpy import save_file
from typer.testing import CliRunner

from ttpu_core import default_registry, open_checkpoint
from ttpu_core.checkpoint.tied_head import CHUNK, has_own_head
from ttpu_core.cli.main import app
from ttpu_core.loading import describe_checkpoint, planned_architecture

SIZES = {
    "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip
EMBEDDING = np.arange(88, dtype=np.float32).reshape(11, 8)


def held(path: Path, config: dict[str, object], **tensors: np.ndarray) -> bool:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**SIZES, **config}))
    save_file({name.replace("/", "."): tensor for name, tensor in tensors.items()}, path / "model.safetensors")
    checkpoint = open_checkpoint(path)
    return has_own_head(checkpoint, default_registry().architecture(checkpoint.config).mapping)


TIED = {"model_type": "llama", "tie_word_embeddings": True}


@pytest.mark.parametrize("chunk", [CHUNK, 100])
def test_the_bytes_decide(tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ttpu_core.checkpoint.tied_head.CHUNK", chunk)
    table = {"model/embed_tokens/weight": EMBEDDING}
    other = EMBEDDING.copy()
    other[-1, -1] += 1
    assert not held(tmp_path / "none", TIED, **table)
    assert not held(tmp_path / "alone", TIED, **{"lm_head/weight": EMBEDDING})
    assert not held(tmp_path / "copy", TIED, **table, **{"lm_head/weight": EMBEDDING})
    assert held(tmp_path / "own", TIED, **table, **{"lm_head/weight": other})
    assert held(tmp_path / "shape", TIED, **table, **{"lm_head/weight": other[:7]})
    assert held(tmp_path / "dtype", TIED, **table, **{"lm_head/weight": EMBEDDING.astype(np.float16)})


def test_an_untied_config_is_right_as_it_is(tmp_path: Path) -> None:
    tensors = {"model/embed_tokens/weight": EMBEDDING, "lm_head/weight": EMBEDDING + 1}
    assert not held(tmp_path / "untied", {**TIED, "tie_word_embeddings": False}, **tensors)


def test_plans_and_facts_are_of_the_head_that_the_weights_hold(tmp_path: Path) -> None:
    """They used to be of a tied one, so that no plan of such a checkpoint suited the model that was loaded from it."""
    tensors = tiny.tensors(tiny.CONFIG)
    for name, head in (("own", tensors["lm_head.weight"]), ("copy", tensors["model.embed_tokens.weight"])):
        path = tiny.llama_checkpoint(tmp_path / name, tie_word_embeddings=True)
        save_file({**tensors, "lm_head.weight": head}, path / "model.safetensors")
        planned, (_, opened) = planned_architecture(str(path)), describe_checkpoint(open_checkpoint(path))
        assert planned.spec == opened.spec
        assert ("head.kernel" in planned.spec.parameters) == (name == "own")
        facts = json.loads(CliRunner().invoke(app, ["info", str(path), "--json"]).stdout)
        assert facts["parameters"]["head"] == (259 * 32 if name == "own" else 0)
    assert "head.kernel" not in planned_architecture(str(path / "config.json")).spec.parameters
