"""`ttpu eval`: every token is scored once, and figures are those that the definition gives."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tiny import llama_checkpoint
from typer.testing import CliRunner

from ttpu_core.cli.main import app
from ttpu_core.errors import RequestError
from ttpu_core.loading import LoadOptions, open_model
from ttpu_core.registry import default_registry
from ttpu_quantize.evaluation import evaluate_model, text_for
from ttpu_quantize.windows import batches, windows

TEXT = "A window moves over the text by the stride, and scores what no window scored before."


@pytest.mark.parametrize(("count", "size", "stride"), [(2, 4, 2), (10, 4, 3), (11, 4, 2), (9, 9, 1), (30, 8, 5)])
def test_every_token_but_the_first_is_scored_once_with_its_context(count: int, size: int, stride: int) -> None:
    scored = [token for window in windows(count, size, stride) for token in range(window.first, window.stop)]
    assert scored == list(range(1, count))
    for window in windows(count, size, stride):
        assert window.stop - window.start <= size
        assert window.start == 0 or window.first - window.start >= size - stride


@pytest.mark.parametrize(("count", "size", "stride"), [(1, 4, 2), (9, 1, 1), (9, 4, 0), (9, 4, 4)])
def test_windows_that_could_not_score_every_token_are_refused(count: int, size: int, stride: int) -> None:
    with pytest.raises(RequestError):
        windows(count, size, stride)


def test_batches_hold_the_windows_and_their_targets() -> None:
    text = list(range(100, 110))
    held = list(batches(text, windows(10, 4, 3), 4, rows=2))
    targets = np.concatenate([batch.targets[batch.scored] for batch in held])
    sources = np.concatenate([batch.tokens[batch.scored] for batch in held])
    assert targets.tolist() == text[1:]
    assert sources.tolist() == text[:-1]
    assert {batch.tokens.shape for batch in held} == {(2, 4)}


def test_figures_are_those_of_the_definition(tmp_path: Path) -> None:
    one, other = (
        open_model(llama_checkpoint(tmp_path / str(seed), seed=seed), LoadOptions(), backend="jax") for seed in (0, 1)
    )
    text = text_for(one, TEXT, size=32, stride=8, rows=2)
    found = evaluate_model(default_registry().backend("jax"), "other", other, text, one)
    losses, divergences, agreements = [], [], []
    for window in text.cut:
        ids = [list(text.tokens[window.start : window.stop])]
        expected, logits = (np.asarray(model(ids).logits[0], np.float64) for model in (one, other))
        expected, logits = (row - np.log(np.exp(row).sum(-1, keepdims=True)) for row in (expected, logits))
        for token in range(window.first, window.stop):
            place = token - 1 - window.start
            losses.append(-logits[place, text.tokens[token]])
            divergences.append((np.exp(expected[place]) * (expected[place] - logits[place])).sum())
            agreements.append(expected[place].argmax() == logits[place].argmax())
    assert found.tokens == len(text.tokens) - 1 == len(losses)
    assert found.loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert found.perplexity == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)
    assert found.divergence == pytest.approx(np.mean(divergences), rel=1e-3)
    assert found.agreement == pytest.approx(np.mean(agreements))
    assert found.weight_bytes == sum(array.nbytes for array in other.params.values())


def test_the_command_prints_a_table_and_json_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    name = str(llama_checkpoint(tmp_path / "one"))
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    request = ["eval", name, name, "--text", str(text), "--window", "32", "--batch", "2", "--limit", "60", "--quiet"]
    table = CliRunner().invoke(app, [*request, "--plot", str(tmp_path / "figure.png")])
    assert table.exit_code == 0, table.output
    assert "59 tokens, windows of 32 every 16" in table.stdout and "100.00%" in table.stdout
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    parsed = CliRunner().invoke(app, [*request, "--json"])
    document = json.loads(parsed.stdout)
    first, second = document["models"]
    assert (document["window"], document["stride"]) == (32, 16)
    assert (first["tokens"], first["divergence"], second["divergence"]) == (59, None, pytest.approx(0, abs=1e-6))
    assert first["loss"] == pytest.approx(second["loss"])


def test_a_text_that_one_window_holds_is_said_to_have_one(tmp_path: Path) -> None:
    name, text = str(llama_checkpoint(tmp_path / "one")), tmp_path / "text.txt"
    text.write_text(TEXT)
    table = CliRunner().invoke(app, ["eval", name, "--text", str(text), "--limit", "20", "--quiet"])
    assert "text.txt: 19 tokens, one window" in table.stdout
    parsed = CliRunner().invoke(app, ["eval", name, "--text", str(text), "--limit", "20", "--quiet", "--json"])
    assert json.loads(parsed.stdout)["stride"] is None


def test_checkpoints_with_other_vocabularies_are_refused(tmp_path: Path) -> None:
    names = [str(llama_checkpoint(tmp_path / str(size), vocab_size=size)) for size in (259, 260)]
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    result = CliRunner().invoke(app, ["eval", *names, "--text", str(text), "--window", "16"])
    assert result.exit_code == 2
    assert "its vocabulary has 260 tokens and the first one's 259" in result.stderr


def test_a_text_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(b"\xff\xfe\xff")
    for name, found in (("missing.txt", "cannot be read"), ("text.txt", "is not UTF-8")):
        result = CliRunner().invoke(app, ["eval", "nowhere", "--text", str(tmp_path / name)])
        assert result.exit_code == 2
        assert found in result.stderr


def test_schemes_quantize_the_first_checkpoint(tmp_path: Path) -> None:
    name = str(llama_checkpoint(tmp_path / "one"))
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    request = ["eval", name, "--text", str(text), "--window", "32", "--limit", "40", "--scheme", "w8a16,w4a16-g16"]
    parsed = CliRunner().invoke(app, [*request, "--json"])
    assert parsed.exit_code == 0, parsed.output
    dense, eight, four = json.loads(parsed.stdout)["models"]
    assert (eight["name"], four["name"]) == (f"{name} in w8a16", f"{name} in w4a16-g16")
    assert 0 < eight["divergence"] < four["divergence"]
    assert max(four["weight_bytes"], eight["weight_bytes"]) < dense["weight_bytes"]  # a CPU may hold int4 as int8
    refused = CliRunner().invoke(app, [*request, "--quantization", "w8a16"])
    assert refused.exit_code == 2
    assert "leave --quantization out" in refused.stderr
    unknown = CliRunner().invoke(app, [*request[:-1], "w8a16,w5"])
    assert unknown.exit_code == 2
    assert "'w5' was asked for" in unknown.stderr
