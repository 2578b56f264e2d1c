"""Where training examples come from: text, JSONL, JSON and parquet files, Hugging Face datasets, and any sequence or
iterable of examples. A source gives examples in order, each with the words that name its place in an error, and a key
that changes with its content."""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from ttpu_core.errors import DataError, MissingDependencyError
from ttpu_train.data.settings import DataSettings

TEXT, LINES, ARRAY, PARQUET = (".txt", ".text", ".md", ".rst"), (".jsonl", ".ndjson"), (".json",), (".parquet",)
SUFFIXES = (*TEXT, *LINES, *ARRAY, *PARQUET)
Example = Mapping[str, Any]
READ = ("messages", "tools", "prompt", "completion", "chosen", "rejected")
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""How JSON writes half of a character beyond the first 65,536; `json.loads` joins two halves and leaves one alone."""


class Source(Protocol):
    """Examples in a fixed order."""

    @property
    def name(self) -> str:
        """What errors and the progress bar call it."""
        ...

    def key(self) -> str:
        """Words that change when the examples do."""
        ...

    def examples(self) -> Iterator[tuple[str, Example]]:
        """Each example after the words that name its place.

        Raises:
            DataError: a file cannot be read or does not hold what its suffix says.
        """
        ...


@dataclass(frozen=True)
class Files:
    """Files of any of the known kinds, one after the other."""

    paths: tuple[Path, ...]
    text_field: str
    document_separator: str | None

    @property
    def name(self) -> str:
        first = self.paths[0].name
        return first if len(self.paths) == 1 else f"{first} and {len(self.paths) - 1:,} more"

    def key(self) -> str:
        stats = [(path, path.stat()) for path in self.paths]
        return json.dumps(
            [self.text_field, self.document_separator]
            + [[str(path.resolve()), stat.st_size, stat.st_mtime_ns] for path, stat in stats]
        )

    def examples(self) -> Iterator[tuple[str, Example]]:
        """Each example after its file and line.

        Raises:
            DataError: a file cannot be read or does not hold what its suffix says.
        """
        for path in self.paths:
            found = 0
            try:
                for place, example in self._read(path):
                    found += 1
                    yield place, example
            except (gzip.BadGzipFile, zlib.error, EOFError) as error:
                raise DataError(
                    f"{path} was given as training data, but it is not a whole gzip file ({error}): get it again."
                ) from error
            if not found:
                raise DataError(
                    f"{path} was given as training data, but it holds no example: training needs at least one in each "
                    "file; leave this file out."
                )

    def _read(self, path: Path) -> Iterator[tuple[str, Example]]:
        kind = suffix(path)
        if kind in TEXT:
            yield from self._documents(path)
        elif kind in LINES:
            yield from _lines(path)
        elif kind in ARRAY:
            yield from _array(path)
        else:
            yield from _parquet(path)

    def _documents(self, path: Path) -> Iterator[tuple[str, Example]]:
        with _opened(path) as file:
            text = _decoded(file.read(), path)
        documents = [text] if self.document_separator is None else text.split(self.document_separator)
        for number, document in enumerate(documents, 1):
            if document.strip():
                place = str(path) if len(documents) == 1 else f"{path}, document {number}"
                yield place, {self.text_field: document}


class Examples:
    """A sequence of examples, such as a list or a Hugging Face dataset. An iterable without length is read into
    memory."""

    def __init__(self, examples: Iterable[Example], name: str) -> None:
        ours = hasattr(examples, "__len__") and hasattr(examples, "__getitem__")
        self._examples: Any = examples if ours else list(examples)
        self.name = name

    def key(self) -> str:
        fingerprint = getattr(self._examples, "_fingerprint", None)  # a Hugging Face dataset knows the hash of its data
        if isinstance(fingerprint, str):
            return f"datasets {fingerprint}"
        digest = hashlib.blake2b(digest_size=16)
        for _, example in self.examples():
            digest.update(json.dumps(example, sort_keys=True, default=_plain).encode() + b"\n")
        return f"examples {digest.hexdigest()}"

    def examples(self) -> Iterator[tuple[str, Example]]:
        """Each example after its number.

        Raises:
            DataError: there is none.
        """
        if len(self._examples) == 0:
            raise DataError(
                f"{self.name} was given as training data, but it is empty: training needs at least one example; pass "
                "other data."
            )
        for number in range(len(self._examples)):
            yield f"{self.name}, example {number}", self._examples[number]


def sources_of(dataset: Any, settings: DataSettings) -> tuple[Source, ...]:
    """The sources that a dataset argument names.

    Args:
        dataset: a path, a glob or a folder; a dataset object, a sequence or an iterable of examples; a list of any of
            these, or a mapping from names to them. Each member of a list or mapping is one source.
        settings: of the run.

    Raises:
        DataError: no such file, or a suffix of an unknown kind.
    """
    if isinstance(dataset, Mapping):
        if type(dataset).__module__.partition(".")[0] == "datasets":  # DatasetDict: train, test, ...
            raise DataError(
                f"a {type(dataset).__name__} with the splits {', '.join(map(repr, dataset))} was given as training "
                "data, but only one split is trained on: pass one, as in dataset['train']."
            )
        named = [(str(name), member) for name, member in dataset.items()]
        if not named:
            raise DataError(
                "an empty mapping was given as training data, but training needs at least one source: name some, as in "
                "{books: books/*.txt}."
            )
    elif isinstance(dataset, list | tuple) and dataset and not isinstance(dataset[0], Mapping):
        named = [(f"dataset {number}", member) for number, member in enumerate(dataset)]
    else:
        named = [("the dataset", dataset)]
    return tuple(_source(name, member, settings) for name, member in named)


def suffix(path: Path) -> str:
    """The suffix that tells a file's kind; that of compression is left out."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def _source(name: str, member: Any, settings: DataSettings) -> Source:
    if isinstance(member, str | Path):
        return Files(_paths(member), settings.text_field, settings.document_separator)
    if isinstance(member, list | tuple) and member and all(isinstance(each, str | Path) for each in member):
        paths = tuple(path for each in member for path in _paths(each))
        return Files(paths, settings.text_field, settings.document_separator)
    if hasattr(member, "iloc"):  # pandas, where [0] is a label and not a place
        way = "frame.to_dict('records')" if hasattr(member, "columns") else "series.tolist()"
        raise DataError(
            f"{name} was given as a {type(member).__name__} of pandas, whose rows are not read: pass them as a list, "
            f"as in {way}."
        )
    random_access = hasattr(member, "__len__") and hasattr(member, "__getitem__")
    if isinstance(member, Mapping) or not (random_access or isinstance(member, Iterable)):
        raise DataError(
            f"{name} was given as training data, but it is a {type(member).__name__}: pass a path, a "
            "datasets.Dataset, or a sequence or iterable of examples."
        )
    return Examples(member, name)


def _paths(given: str | Path) -> tuple[Path, ...]:
    path = Path(given).expanduser()
    if path.is_dir():
        found = sorted(each for each in path.rglob("*") if each.is_file() and suffix(each) in SUFFIXES)
        missing = "that folder holds no file of a known kind"
    elif path.exists():
        found, missing = [path], ""
    else:
        matches = glob.glob(str(path), recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        found = sorted(Path(each) for each in matches if Path(each).is_file())
        missing = "no such file is there"
    if not found:
        raise DataError(
            f"{str(given)!r} was given as training data, but {missing}: give a file, a folder or a glob of files that "
            f"end in {', '.join(SUFFIXES)}, or load a dataset of the hub by datasets.load_dataset and pass that."
        )
    for each in found:
        if suffix(each) not in SUFFIXES or (each.suffix == ".gz" and suffix(each) in PARQUET):
            raise DataError(
                f"{each} was given as training data, but the suffix {each.suffix!r} is not known: use "
                f"{', '.join(SUFFIXES)}, or these with .gz (parquet excepted), or pass a datasets.Dataset."
            )
    return tuple(found)


def _opened(path: Path) -> IO[bytes] | gzip.GzipFile:
    try:
        return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")
    except OSError as error:
        raise DataError(
            f"{path} was given as training data, but it cannot be opened ({error.strerror}): make it readable, or "
            "leave it out."
        ) from error


def _decoded(data: bytes, path: Path, first_line: int = 1) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raise DataError(
            f"{path}, line {line}, was given as training data, but its byte 0x{data[error.start]:02x} is not UTF-8, "
            "the only encoding that is read: convert the file, as with iconv -t UTF-8."
        ) from error


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{place} was given as training data, but it is not JSON ({error.msg} at column {error.colno}): each "
            "example must be one JSON object; correct it."
        ) from error


def _object(value: Any, place: str, *, check: bool) -> Example:
    """An example; `check` where a text of it may hold half a character. (Plain text is checked where it is read.)"""
    if not isinstance(value, dict):
        raise DataError(
            f"{place} was given as training data, but it holds a JSON {type(value).__name__}: each example must be an "
            'object such as {"text": "..."}; correct it.'
        )
    if check:
        read = {field: value[field] for field in READ if field in value}
        check_characters(json.dumps(read, ensure_ascii=False), place)
    return value


def check_characters(text: str, place: str) -> None:
    """Refuse half a character, which no encoding has and no tokenizer takes.

    Raises:
        DataError: there is one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place} was given as training data, but it holds \\u{ord(text[error.start]):04x}, one half of a "
            "character that JSON writes as two: write both, or leave it out."
        ) from error


def _lines(path: Path) -> Iterator[tuple[str, Example]]:
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                place = f"{path}, line {number}"
                text = _decoded(line.rstrip(), path, number)
                yield place, _object(_json(text, place), place, check=SURROGATE.search(text) is not None)


def _array(path: Path) -> Iterator[tuple[str, Example]]:
    with _opened(path) as file:
        data = file.read()
    if not data.strip():
        return
    text = _decoded(data, path)
    value, check = _json(text, str(path)), SURROGATE.search(text) is not None
    if not isinstance(value, list):
        raise DataError(
            f"{path} was given as training data, but it holds a JSON {type(value).__name__}: a .json file must be one "
            "array of objects; for one object in each line name the file .jsonl."
        )
    for number, example in enumerate(value):
        place = f"{path}, example {number}"
        yield place, _object(example, place, check=check)


def _parquet(path: Path) -> Iterator[tuple[str, Example]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingDependencyError(
            f"{path} was given as training data, but pyarrow, which reads parquet, is not installed: "
            "pip install 'ttpu-train[parquet]'."
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for example in batch.to_pylist():
                    yield f"{path}, row {number}", example
                    number += 1
    except pyarrow.ArrowException as error:
        raise DataError(
            f"{path} was given as training data, but it is not parquet ({error}): get the file again, or name it by "
            "its kind."
        ) from error


def _plain(value: Any) -> Any:
    """JSON's form of numpy arrays and scalars, and of whatever else says what it holds."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)
