"""Every kind of file, dataset and example is read as what it is, and what is malformed is refused by its place."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from data_cases import ASSISTANT, BOS, EOS, USER, documents, tokenizer, write_lines

from ttpu_core.errors import DataError, RequestError
from ttpu_train.data.settings import DataSettings

TEXTS = ["The for statement.", "A while loop, with an else clause."]


def ids(text: str) -> list[int]:
    return tokenizer()(text)["input_ids"]


def test_all_kinds_of_files_give_the_same_documents(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    examples = [{"text": text} for text in TEXTS]
    write_lines(tmp_path / "a.jsonl", examples)
    (tmp_path / "b.json").write_text(json.dumps(examples))
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write((tmp_path / "a.jsonl").read_text())
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(examples), tmp_path / "d.parquet")
    (tmp_path / "e.txt").write_text("\n---\n".join(TEXTS))
    for name in ("a.jsonl", "b.json", "c.jsonl.gz", "d.parquet", "e.txt"):
        found = documents(tmp_path / name, document_separator="\n---\n")
        assert [each.tokens.tolist() for each in found] == [[*ids(text), EOS] for text in TEXTS], name
        assert all(each.weights.all() and each.divisible for each in found)
    assert len(documents(str(tmp_path / "*.json*"))) == 6  # a glob
    assert len(documents([tmp_path / "a.jsonl", tmp_path / "b.json"])) == 4
    assert len(documents(tmp_path)) == 9  # a folder: without a separator a text file is one document
    assert len(documents({"one": tmp_path / "a.jsonl", "two": examples})) == 4


def test_a_hugging_face_dataset_and_any_iterable_are_read() -> None:
    import datasets

    examples = [{"body": text} for text in TEXTS]
    expected = [ids(text) for text in TEXTS]
    for given in (datasets.Dataset.from_list(examples), examples, tuple(examples), iter(examples)):
        found = documents(given, text_field="body", append_eos=False)
        assert [each.tokens.tolist() for each in found] == expected
    with pytest.raises(DataError, match=r"splits 'train', 'test'.*pass one"):
        documents(datasets.DatasetDict({"train": datasets.Dataset.from_list(examples), "test": None}))


def test_token_ids_are_taken_as_they_are() -> None:
    [plain] = documents([{"input_ids": [5, 6, 7]}])
    assert plain.tokens.tolist() == [5, 6, 7]
    assert plain.divisible
    [labelled] = documents([{"input_ids": [5, 6, 7, 0], "labels": [-100, 6, 7, -100], "attention_mask": [1, 1, 1, 0]}])
    assert (labelled.tokens.tolist(), labelled.weights.tolist()) == ([5, 6, 7], [0, 1, 1])
    assert not labelled.divisible


def test_only_the_completion_of_a_prompt_has_weight() -> None:
    example = {"prompt": "The for ", "completion": "statement."}
    [found] = documents([example])
    whole, prompt = [*ids("The for statement."), EOS], ids("The for ")
    shared = next(n for n, (one, other) in enumerate(zip(prompt, whole, strict=False)) if one != other)
    assert shared == len(prompt) - 1, "the space becomes part of the completion's first token"
    assert found.tokens.tolist() == whole
    assert found.weights.tolist() == [0] * shared + [1] * (len(whole) - shared)
    assert documents([example], completion_only_loss=False)[0].weights.all()
    chat = {"prompt": [{"role": "user", "content": "for"}], "completion": [{"role": "assistant", "content": "A loop"}]}
    [found] = documents([chat])
    body = found.tokens.tolist()
    assert body == [BOS, USER, *ids("for")[1:], ASSISTANT, *ids("A loop")[1:], EOS]
    assert found.weights.tolist() == [0] * (body.index(ASSISTANT) + 1) + [1] * (len(ids("A loop")) - 1 + 1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text":  \n', r"a\.jsonl, line 2 .*not JSON \(Expecting value at column 9\)"),
        ("a.jsonl", b'{"text": "x"}\n\n[1]\n', r"a\.jsonl, line 3 .*JSON list.*must be an object"),
        ("a.jsonl", b'{"text": "x"}\n{"body": "y"}\n', r"a\.jsonl, line 2 .*fields 'body': an example needs 'text'"),
        ("a.jsonl", b'{"text": ""}\n', r"a\.jsonl, line 1 .*'text' holds str ''.*not empty"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', r"a\.jsonl, line 2, .*0xff is not UTF-8.*iconv"),
        ("a.txt", b"one\ntwo\n\xe9t\xe9", r"a\.txt, line 3, .*0xe9 is not UTF-8"),
        ("a.txt", b"  \n", r"a\.txt .*holds no example"),
        ("a.jsonl", b"", r"a\.jsonl .*holds no example"),
        ("a.json", b'{"text": "x"}', r"a\.json .*JSON dict: a \.json file must be one array.*\.jsonl"),
        ("a.csv", b"text\nx\n", r"a\.csv .*suffix '\.csv' is not known: use \.txt"),
        ("a.parquet", b"text", r"a\.parquet .*is not parquet"),
        ("a.jsonl.gz", b"\x1f\x8b\x08", r"a\.jsonl\.gz .*not a whole gzip file"),
        ("a.jsonl", b'{"prompt": "x"}\n', r"line 1 .*'prompt', but it has no 'completion'"),
        ("a.jsonl", b'{"prompt": "x", "completion": []}\n', r"line 1 .*a str and a completion that is a list"),
        ("a.jsonl", b'{"messages": "hi"}\n', r"line 1 .*'messages' holds str 'hi'.*list of at least one"),
        (
            "a.jsonl",
            b'{"messages": [{"content": "hi"}]}\n',
            r"line 1 .*message 0 of its field 'messages' has no 'role'",
        ),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}\n', r"line 1 .*has no 'content'"),
        ("a.jsonl", b'{"input_ids": [1, 2], "labels": [1]}\n', r"line 1 .*2 input_ids, but with 1 labels"),
        ("a.jsonl", b'{"input_ids": [1, 2], "labels": [2, 3]}\n', r"line 1 .*label 2 for token 0.*not be shifted"),
        ("a.jsonl", b'{"input_ids": [1, -2]}\n', r"line 1 .*number below 0"),
        ("a.jsonl", b'{"text": "\\ud83d\\ude00"}\n{"text": "\\ud800"}', r"a\.jsonl, line 2 .*holds \\ud800, one half"),
        ("a.json", b'[{"messages": [{"role": "user", "content": "\\uDC00"}]}]', r"example 0 .*holds \\udc00, one half"),
        ("a.jsonl", b'{"input_ids": ["a"]}\n', r"line 1 .*not a flat list of whole numbers"),
    ],
)
def test_malformed_data_is_refused_by_file_and_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        documents(tmp_path / name)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("/nowhere/*.txt", r"'/nowhere/\*\.txt' .*no such file.*load_dataset"),
        ([], "the dataset .*is empty"),
        (7, "the dataset .*is a int: pass a path"),
        (["/nowhere", {"text": "x"}], "'/nowhere' .*no such file"),
        (["abc"], "'abc' .*no such file"),
        ([{"text": "\ud800"}], r"the dataset, example 0 .*holds \\ud800, one half of a character"),
        ([{"prompt": "\ud800", "completion": "x"}], r"the dataset, example 0 .*holds \\ud800, one half of a character"),
        ([{"input_ids": [1, [2]]}], "example 0 .*not a flat list of whole numbers"),
        (SimpleNamespace(iloc=None, columns=[]), r"the dataset .*of pandas.*frame.to_dict\('records'\)"),
        (SimpleNamespace(iloc=None), r"the dataset .*of pandas.*a list, as in series.tolist\(\)\.$"),
        ([{"text": "x"}, "y"], "the dataset, example 1 .*is a str: each example must be a mapping"),
    ],
)
def test_what_is_no_dataset_is_refused(dataset: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        documents(dataset)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_length", 1), ("rows", 0), ("epochs", 0), ("document_separator", ""), ("overlong", "cut"), ("seed", True)]
    + [("mixture_weights", weights) for weights in ((), (1.0, 0.0), (float("nan"),))],
)
def test_settings_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=re.escape(f"{name}={value!r}")) as caught:
        DataSettings(**{name: value})
    assert caught.value.param == name
