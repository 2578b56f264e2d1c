"""`ttpu train` and `ttpu export`, on JAX."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import llama_checkpoint
from typer.testing import CliRunner

from ttpu import AutoModelForTPU
from ttpu_core.cli.console import print_json
from ttpu_core.cli.main import app
from ttpu_core.errors import UnsupportedError
from ttpu_core.sharding.hardware import CHIPS
from ttpu_train.cli.train import exit_code, plain_warnings, resumed_if_restarted, what_is_left
from ttpu_train.trainer import TrainOutput

TEXT = "The trainer reads this text again and again, until the model knows what comes next in it.\n" * 8


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A training file beside its model and its text."""
    llama_checkpoint(tmp_path / "llama", num_hidden_layers=1, vocab_size=260)
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "run.yaml").write_text(
        "model: llama\ntrain_dataset: text.txt\nmax_length: 16\nper_device_train_batch_size: 2\npacking: true\n"
        "learning_rate: 1e-2\nlr_scheduler_type: constant\nlogging_steps: 1\nsave_steps: 2\n"
    )
    return tmp_path / "run.yaml"


def ttpu(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(one) for one in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_run_is_resumed_and_exported(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTPU_CACHE", str(tmp_path / "cache"))
    run = f"output_dir={tmp_path / 'run'}"
    assert "2 updates, loss" in ttpu("train", file, run, "max_steps=2")
    done = json.loads(ttpu("train", file, run, "max_steps=6", "resume=true", "--json"))
    assert done["global_step"] == 6
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.5

    exported = ttpu("export", tmp_path / "run", "--out", tmp_path / "out", "--dtype", "float32")
    assert "after update 6, in float32" in exported
    trained, before = (AutoModelForTPU.from_pretrained(tmp_path / name) for name in ("out", "llama"))
    tokens = np.asarray(trained.tokenizer(TEXT[:16])["input_ids"])[None]

    def loss(model: object) -> float:
        logits = np.asarray(model(tokens).logits)[0, :-1]  # type: ignore[operator]
        shifted = logits - logits.max(-1, keepdims=True)
        chosen = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        return float(-np.take_along_axis(chosen, tokens[0, 1:, None], -1).mean())

    assert loss(trained) < loss(before) - 0.5


@pytest.mark.tpu_compile
def test_a_dry_run_says_what_a_slice_holds(file: Path) -> None:
    pytest.importorskip("libtpu")
    whole, sharded = (
        json.loads(ttpu("train", file, "--dry-run", "--topology", "v5e:2x2", f"zero_stage={stage}", "--json"))
        for stage in (0, 1)
    )
    for figures in (whole, sharded):
        assert figures["rows"] == 2 * 4
        assert 0 < figures["held_bytes"] < figures["peak_bytes"] < figures["hbm_bytes"]
        assert 0 < figures["mfu"] < 1
        assert figures["held_bytes"] <= figures["plan_held_bytes"] < figures["plan_bytes"]  # tiles pad small arrays
    assert sharded["held_bytes"] == pytest.approx(whole["held_bytes"] / 4, rel=0.05)  # but for norms and the count


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("topology", "options", "beside"),
    [
        ("2*v6e:2x2", ("parallelism_strategy=dcn.data=2,tensor=4",), "dcn_seconds"),
        ("v6e:2x2", ("parallelism_strategy=fsdp", "offload_optimizer=true"), "host_seconds"),
    ],
    ids=["slices", "host"],
)
def test_a_dry_run_counts_what_goes_between_slices_and_to_the_host(
    file: Path, monkeypatch: pytest.MonkeyPatch, topology: str, options: tuple[str, ...], beside: str
) -> None:
    pytest.importorskip("libtpu")
    from ttpu_jax.aot import training

    programs = []

    def compiled(*given: Any, **options: Any) -> Any:
        programs.append(compile_for(*given, **options))
        return programs[-1]

    compile_for = training.compile_for
    monkeypatch.setattr(training, "compile_for", compiled)
    figures = json.loads(ttpu("train", file, "--dry-run", "--topology", topology, *options, "--json"))
    (program,) = programs
    assert figures["seconds"] == program.estimate.total_seconds, "kernels and HBM's bandwidth are counted"
    rate = figures["rows"] * figures["length"] / figures["seconds"] / figures["devices"]
    assert figures["tokens_per_second_per_device"] == pytest.approx(rate)
    assert {name for name in ("dcn_seconds", "host_seconds") if figures[name]} == {beside}
    assert all("send" not in one.name for one in program.estimate.unmodelled)
    if beside == "host_seconds":  # two moments, each as large as the master weights, are brought and taken back
        moved = 4 * figures["held_bytes"] / CHIPS["v6e"].host_bytes_per_second
        assert figures["host_seconds"] == pytest.approx(moved, rel=0.05)


def test_a_dry_run_refuses_rows_that_the_run_would_refuse(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions that are learned end there; others may be extended, which is warned of in a line."""

    def reached(*_: object, **__: object) -> None:
        raise UnsupportedError("that is enough")

    monkeypatch.setattr("ttpu_jax.backend.JaxBackend.compile_training", reached)
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 32, "vocab_size": 64}
    learned = tmp_path / "learned"
    learned.mkdir()
    (learned / "config.json").write_text(json.dumps(config))
    asked = ["train", str(file), "--dry-run", "--topology", "v5e:1x1"]
    done = CliRunner().invoke(app, [*asked, f"model={learned}", "max_length=33"])
    assert done.exit_code == 2
    assert done.stderr.startswith("error: max_length is 33, but this model has learned 32 positions, ")
    done = CliRunner().invoke(app, [*asked, "max_length=1000000"])
    warned, refused = done.stderr.splitlines()
    assert warned.startswith("warning: max_length=1,000,000 was given, but the model's config names ")
    assert refused == "error: that is enough"


def test_a_dry_run_needs_a_slice(file: Path) -> None:
    done = CliRunner().invoke(app, ["train", str(file), "--dry-run"])
    assert done.exit_code == 2
    assert "--dry-run was given without --topology" in done.stderr


def test_a_command_that_is_started_again_resumes_from_its_own_checkpoints(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = {"output_dir": str(tmp_path), "max_steps": 3}
    monkeypatch.setenv("TTPU_RESTART", "1")
    assert resumed_if_restarted(given) == given  # it died before the first checkpoint
    (tmp_path / "checkpoints" / "2").mkdir(parents=True)
    assert resumed_if_restarted(given) == {**given, "resume_from_checkpoint": True}
    monkeypatch.delenv("TTPU_RESTART")
    assert resumed_if_restarted(given) == given


@pytest.mark.parametrize(
    ("stopped_by", "is_saved", "words"),
    [
        (None, True, "run: 7 updates, loss 2.5000; `ttpu export run --out DIR` writes the model"),
        (None, False, "run: 7 updates, loss 2.5000; save_strategy=no left no checkpoint"),
        ("SIGINT", True, "stopped by SIGINT after step 7: the same command with resume=true goes on from there."),
        ("SIGINT", False, "stopped by SIGINT after step 7: save_strategy=no left no checkpoint."),
    ],
)
def test_the_end_of_a_run_says_what_is_left(stopped_by: str | None, is_saved: bool, words: str) -> None:
    assert what_is_left(TrainOutput(7, 2.5, {}, stopped_by), Path("run"), is_saved=is_saved) == words


def test_json_has_null_for_numbers_that_are_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"train_loss": float("nan"), "each": [float("-inf"), 1.5], "name": "run"})
    assert json.loads(capsys.readouterr().out) == {"train_loss": None, "each": [None, 1.5], "name": "run"}


def test_a_signal_gives_the_exit_status_that_shells_have_for_it() -> None:
    assert [exit_code(name) for name in ("SIGTERM", "SIGINT", "a signal to another process")] == [143, 130, 143]


def test_warnings_are_lines_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    with plain_warnings():
        warnings.warn("rows are long", stacklevel=1)
        logging.getLogger("ttpu_train.resuming").warning("resumed with %s", "others")
        logging.getLogger("ttpu_train.resuming").info("nothing of interest")
    assert capsys.readouterr().err == "warning: rows are long\nwarning: resumed with others\n"
