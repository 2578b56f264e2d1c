"""Plain text is read without transformers where that was seen to read it alike, and only there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoTokenizer

from ttpu_core.checkpoint import Checkpoint, open_checkpoint
from ttpu_core.errors import CheckpointError
from ttpu_jax.runner.compilation_cache import VARIABLE
from ttpu_jax.text_tokenizer import TextTokenizer, text_tokenizer

SHIPPED = Path(__file__).parents[3] / "examples" / "checkpoints" / "pydoc-llama"
TEXTS = ("", "def f(x):\n    return", " two  blanks", "naïve 日本語 \U0001f600", "<|bos|>a<|eos|>", "<|user|>Hi")

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="folders have no owners here")


@pytest.fixture(autouse=True)
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of notes, empty."""
    folder = tmp_path / "cache"
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder / "tokenizers"


def checkpoint(folder: Path, **written: Any) -> Checkpoint:
    """The shipped checkpoint with other keys in tokenizer_config.json; None drops one."""
    folder.mkdir()
    for file in SHIPPED.iterdir():
        shutil.copy(file, folder / file.name)
    path = folder / "tokenizer_config.json"
    keys = json.loads(path.read_text()) | written
    path.write_text(json.dumps({name: value for name, value in keys.items() if value is not None}))
    return open_checkpoint(folder)


def test_the_second_time_text_is_read_as_transformers_reads_it(tmp_path: Path, notes: Path) -> None:
    opened = checkpoint(tmp_path / "a")
    theirs = AutoTokenizer.from_pretrained(str(opened.path))
    assert type(text_tokenizer(opened)) is type(theirs) and len(list(notes.iterdir())) == 1
    ours = text_tokenizer(opened)
    assert isinstance(ours, TextTokenizer) and ours._whole is None
    for text in TEXTS:
        assert ours(text, verbose=False)["input_ids"] == theirs(text)["input_ids"], text
    assert (ours.eos_token_id, ours.pad_token_id) == (theirs.eos_token_id, theirs.pad_token_id)
    assert ours._whole is None, "nothing of that needs transformers"
    assert ours.chat_template == theirs.chat_template and type(ours.whole()) is type(theirs)
    assert ours(["a", "b"])["input_ids"] == theirs(["a", "b"])["input_ids"]


@pytest.mark.parametrize(
    "written",
    [
        {"add_bos_token": True},
        {"add_eos_token": True},
        {"eos_token": "<|another|>"},
        {"extra_special_tokens": ["<|new|>"]},
        {"split_special_tokens": True},
        {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": True},
    ],
    ids=lambda written: "-".join(written),
)
def test_what_transformers_reads_in_another_way_is_left_to_it(written: dict[str, Any], tmp_path: Path) -> None:
    opened = checkpoint(tmp_path / "a", **written)
    theirs = AutoTokenizer.from_pretrained(str(opened.path))
    for _ in range(2):
        ours = text_tokenizer(opened)
        for text in TEXTS:
            assert ours(text, verbose=False)["input_ids"] == theirs(text)["input_ids"], text
        assert ours.eos_token_id == theirs.eos_token_id


def test_a_note_is_about_the_files_that_it_was_made_of(tmp_path: Path) -> None:
    opened = checkpoint(tmp_path / "a")
    text_tokenizer(opened)
    assert isinstance(text_tokenizer(opened), TextTokenizer)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = opened.path / name
        before = path.read_text()
        path.write_text(before + " ")
        assert not isinstance(text_tokenizer(opened), TextTokenizer), name
        path.write_text(before)
    (opened.path / "special_tokens_map.json").write_text("{}")
    assert not isinstance(text_tokenizer(opened), TextTokenizer)


def test_notes_that_others_may_have_written_or_that_are_damaged_are_not_believed(tmp_path: Path, notes: Path) -> None:
    opened = checkpoint(tmp_path / "a")
    text_tokenizer(opened)
    [note] = notes.iterdir()
    note.chmod(0o666)
    assert not isinstance(text_tokenizer(opened), TextTokenizer)
    [note] = notes.iterdir()
    for content in ("{", "[]", '{"eos_token_id": 1}'):
        note.write_text(content)
        assert not isinstance(text_tokenizer(opened), TextTokenizer), content
        assert json.loads(note.read_text()).keys() == {"eos_token_id", "pad_token_id"}, "written again"


def test_without_a_folder_transformers_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    opened = checkpoint(tmp_path / "a")
    assert [isinstance(text_tokenizer(opened), TextTokenizer) for _ in range(2)] == [False, False]


def test_a_tokenizer_that_does_not_read_every_text_is_left_to_transformers(tmp_path: Path, notes: Path) -> None:
    opened = checkpoint(tmp_path / "a")
    words = Tokenizer(WordLevel({"<|bos|>": 0, "<|eos|>": 1, "<|pad|>": 2, "def": 3, "f": 4}))  # and no unknown token
    words.pre_tokenizer = Whitespace()
    words.save(str(opened.path / "tokenizer.json"))
    for _ in range(2):
        ours = text_tokenizer(opened)
        assert not isinstance(ours, TextTokenizer) and ours("def f")["input_ids"] == [3, 4]
    assert not list(notes.iterdir())


def test_a_file_that_is_damaged_is_refused_by_name(tmp_path: Path) -> None:
    opened = checkpoint(tmp_path / "a")
    (opened.path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer .*cannot be read"):
        text_tokenizer(opened)


GENERATED = """
import sys
from ttpu_core.cli.main import main
sys.argv = ["ttpu", "generate", sys.argv[1], "--prompt", "def f", "--max-new-tokens", "4"]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print([name for name in ("torch", "transformers", "jax.experimental.pallas") if name in sys.modules])
"""


def test_generate_imports_neither_transformers_nor_pallas_and_keeps_its_programs(notes: Path) -> None:
    """They would take half of the time until the first program is compiled."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    printed = [
        subprocess.run(
            [sys.executable, "-c", GENERATED, str(SHIPPED)], capture_output=True, text=True, env=environment, check=True
        ).stdout.splitlines()
        for _ in range(2)
    ]
    (*first, before), (*second, after) = printed
    assert first == second and "transformers" in before and after == "[]"
    kept = {file.name.split("-")[0] for file in (notes.parent / "jax").rglob("*-cache")}
    assert {"jit__prefill", "jit__decode"} <= kept
