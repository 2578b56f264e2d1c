"""The file of `ttpu train`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ttpu_core.errors import RequestError
from ttpu_train import config_file
from ttpu_train.config_file import read_training_file

YAML = "model: llama\ntrain_dataset: [a.jsonl, 'b*.txt']\nlearning_rate: 1e-4\nload_options: {dtype: float32}\n"


def test_paths_are_beside_the_file_and_changes_win(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    (tmp_path / "b1.txt").write_text("x")
    file = tmp_path / "run.yaml"
    file.write_text(YAML)
    assert read_training_file(file).arguments == {"learning_rate": 1e-4}
    changes = ["max_steps=6", "output-dir=./D", "resume=true", "load_options.dtype=bfloat16", "learning_rate=3e-5"]
    read = read_training_file(file, changes)
    assert read.trainer == {
        "model": str(tmp_path / "llama"),
        "train_dataset": ["a.jsonl", str(tmp_path / "b*.txt")],  # a.jsonl is not there: of the working directory
        "load_options": {"dtype": "bfloat16"},
    }
    assert read.arguments == {
        "learning_rate": 3e-5, "max_steps": 6, "output_dir": "./D", "resume_from_checkpoint": True
    }  # fmt: skip


def test_a_mixtures_files_are_beside_the_file_and_no_is_a_word(tmp_path: Path) -> None:
    (tmp_path / "b1.txt").write_text("x")
    file = tmp_path / "run.yaml"
    file.write_text("model: m\ntrain_dataset: {one: b1.txt, two: c.txt}\neval_strategy: no\nbf16: no\n")
    read = read_training_file(file, ["save_strategy=no"])
    assert read.trainer["train_dataset"] == {"one": str(tmp_path / "b1.txt"), "two": "c.txt"}
    assert read.arguments == {"eval_strategy": "no", "save_strategy": "no", "bf16": False}


def test_a_text_of_digits_stays_one(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: m\ntrain_dataset: d\nrun_name: '2024'\nmethod: grpo\nbeta: 1e-2\n")
    read = read_training_file(file, ["output_dir='007'", "delta=1e1"])
    assert read.arguments == {"run_name": "2024", "beta": 0.01, "output_dir": "007", "delta": 10.0}


def test_examples_can_be_imported(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(
        '{"model": "m", "train_dataset": {"import": "pydoc_data.topics:topics", "skip": 2, "take": 3},'
        ' "eval_dataset": {"import": "string:ascii_letters"}}'
    )
    read = read_training_file(file)
    assert [list(one) for one in read.trainer["train_dataset"]] == [["text"]] * 3
    assert read.trainer["eval_dataset"][0] == {"text": "a"}


@pytest.mark.parametrize(
    ("content", "changes", "said"),
    [
        ("model: m\n", [], "has no train_dataset"),
        ("model: m\ntrain_dataset: d\nlerning_rate: 1\n", [], "did you mean learning_rate"),
        ("- a\n", [], "holds a list"),
        ("model: [\n", [], "not readable YAML"),
        (YAML + "learning_rate: 2\n", [], "writes the key 'learning_rate' twice (lines 3 and 5), but only one value"),
        ("model: m\nload_options: {dtype: a, dtype: b}\n", [], "writes the key 'dtype' twice (line 2)"),
        (YAML, ["max_steps"], "changes are written key=value"),
        (YAML, ["model.x=1"], "model holds a value and no keys"),
        ("model: m\ntrain_dataset: {import: 'nowhere:x'}\n", [], "'nowhere:x' was to be imported"),
        ("model: m\ntrain_dataset: {import: 'math:pi'}\n", [], "is a float, but a sequence of examples"),
        ("model: m\ntrain_dataset: {import: 'string:digits', head: 1}\n", [], "was given head"),
        ("model: m\ntrain_dataset: {import: 'string:digits', skip: x}\n", [], "with skip='x', but that is a number"),
        ("model: m\ntrain_dataset: d\n1: 2\n", [], "has the key 1, but keys are texts"),
    ],
)
def test_a_wrong_file_is_refused_in_one_sentence(tmp_path: Path, content: str, changes: list[str], said: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(content)
    with pytest.raises(RequestError) as refused:
        read_training_file(file, changes)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_key_that_stands_twice_in_a_json_file_is_refused_and_yamls_merges_are_not(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text('{"model": "m", "train_dataset": "d", "max_steps": 1, "max_steps": 2}')
    with pytest.raises(RequestError, match="writes the key 'max_steps' twice, but only one value can be meant"):
        read_training_file(file)
    file = tmp_path / "run.yaml"
    file.write_text("model: m\ntrain_dataset: &one {a: x, b: y}\neval_dataset: {<<: *one, b: z}\n")
    assert read_training_file(file).trainer["eval_dataset"] == {"a": "x", "b": "z"}
    given = "train_dataset: &one {a: x, b: y}\nmodel: {inner: &two {<<: *one, b: z}}\neval_dataset: {<<: *two}\n"
    assert yaml.load(given, config_file._Loader) == yaml.safe_load(given)  # which builds the last line first


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="does not exist"):
        read_training_file(tmp_path / "no.yaml")
