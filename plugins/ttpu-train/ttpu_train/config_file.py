"""Reads the file of `ttpu train`: the arguments of `Trainer` and the fields of `TrainingArguments`, as YAML or JSON,
with changes from the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from ttpu_core.errors import RequestError
from ttpu_core.loading import refuse_unknown
from ttpu_train.arguments import TrainingArguments
from ttpu_train.distillation import NAMES as DISTILLATION_NAMES
from ttpu_train.grpo.method import NAMES as GRPO_NAMES
from ttpu_train.imports import imported
from ttpu_train.preference import NAMES as PREFERENCE_NAMES

TRAINER_KEYS = ("model", "backend", "method", "train_dataset", "eval_dataset", "load_options", "cache_dir", "deepspeed")
DATASETS = ("train_dataset", "eval_dataset")
INTERVALS = ("eval_strategy", "save_strategy")
"""Fields with the choice "no", which YAML reads as False."""
PATHS = ("model", "deepspeed", "plan", "adapter_name_or_path", "teacher_model", "reward_funcs")
TEXTS = (*TRAINER_KEYS, *(one.name for one in fields(TrainingArguments) if str(one.type).startswith("str")))
"""Keys whose values may be a text of digits."""
IMPORTED_KEYS = ("import", "skip", "take")


@dataclass(frozen=True)
class TrainingFile:
    """What a file asks for.

    Attributes:
        trainer: the arguments of `Trainer` by name, datasets resolved.
        arguments: the fields of `TrainingArguments` that are given.
    """

    trainer: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)


def read_training_file(path: str | Path, changes: Sequence[str] = ()) -> TrainingFile:
    """Read a file and apply changes.

    Paths in the file are relative to its folder where something is there, else to the working directory, as those of
    changes always are.

    Args:
        path: a .yaml, .yml or .json file.
        changes: key=value, where the value is YAML and the key may be dotted, as in load_options.dtype=bfloat16;
            `resume` is short for resume_from_checkpoint.

    Raises:
        RequestError: the file cannot be read, or a key is unknown or missing.
    """
    source = Path(path).expanduser()
    content = _content(source)
    content = {key: _beside(value, source.parent) if key in (*PATHS, *DATASETS) else _number(key, value)
               for key, value in content.items()}  # fmt: skip
    tasks = content.get("eval_tasks")
    if isinstance(tasks, str | list):  # a folder beside the file may have the name of a task
        names = [tasks] if isinstance(tasks, str) else tasks
        content["eval_tasks"] = [_beside(one, source.parent) if _is_yaml(one) else one for one in names]
    for change in changes:
        _apply(content, change)
    if "resume" in content:
        content["resume_from_checkpoint"] = content.pop("resume")
    of_methods = {"grpo": GRPO_NAMES, "distill": DISTILLATION_NAMES, **PREFERENCE_NAMES}
    of_method = of_methods.get(str(content.get("method")), ())
    known = (*TRAINER_KEYS, *(one.name for one in fields(TrainingArguments)), *of_method)
    refuse_unknown(content, known, f"the training file {source}", "it", " (see docs/training.md)")
    for key in ("model", "train_dataset"):
        if content.get(key) is None:
            raise RequestError(
                f"the training file {source} has no {key}, but a model is trained on data: add `{key}: ...`, or pass "
                f"{key}=... on the command line."
            )
    trainer = {key: content[key] for key in TRAINER_KEYS if key in content}
    for key in DATASETS:
        if key in trainer:
            trainer[key] = resolved(trainer[key], source.parent)
    given = {key: value for key, value in content.items() if key not in TRAINER_KEYS}
    for key in INTERVALS:
        if given.get(key) is False:
            given[key] = "no"
    if "reward_funcs" in given:
        given["reward_funcs"] = _functions(given["reward_funcs"], source.parent)
    return TrainingFile(trainer, given)


def resolved(dataset: Any, folder: Path = Path()) -> Any:
    """A dataset as the file names it, with what is to be imported replaced by its examples.

    {import: "package.module:name", skip: N, take: N} stands for a sequence of examples, or of texts, or a mapping whose
    values are texts, or a function that returns one of these; skip and take choose a part of it. A module may be a file
    too, "file.py:name", beside the training file.

    Args:
        dataset: the value of a key.
        folder: that paths are relative to.

    Raises:
        RequestError: it cannot be imported, or holds something else.
    """
    if not isinstance(dataset, Mapping) or "import" not in dataset:
        return dataset
    refuse_unknown(dataset, IMPORTED_KEYS, "a dataset with import", "it")
    target = str(dataset["import"])
    found = imported(target, folder, "the dataset", "a sequence of examples")
    examples: Any = found() if callable(found) else found
    if isinstance(examples, Mapping):
        examples = list(examples.values())
    try:
        examples = [{"text": one} if isinstance(one, str) else one for one in examples]
    except TypeError as error:
        raise RequestError(
            f"the dataset {target!r} is a {type(examples).__name__}, but a sequence of examples is needed: import a "
            "list, a mapping of texts, or a function that returns one."
        ) from error
    begin, count = dataset.get("skip", 0), dataset.get("take")
    for name, value in (("skip", begin), ("take", 0 if count is None else count)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise RequestError(
                f"the dataset {target!r} was given with {name}={value!r}, but that is a number of examples: correct it."
            )
    return examples[begin : None if count is None else begin + count]


def _functions(given: Any, folder: Path) -> list[Any]:
    """Reward functions, each written as {import: "package.module:name"}, and reward models, by their folder or Hub id.

    Raises:
        RequestError: one is written in another way, or cannot be imported.
    """
    functions = []
    for one in given if isinstance(given, list) else [given]:
        if isinstance(one, str):
            functions.append(one)
            continue
        if not isinstance(one, Mapping) or set(one) != {"import"}:
            raise RequestError(
                f"reward_funcs holds {one!r}, but in a file each function is imported: write {{import: "
                '"module:name"}, where the module may be a file.py beside the training file, or the folder of a reward '
                "model."
            )
        functions.append(imported(str(one["import"]), folder, "the reward function", "a function"))
    return functions


class _TwinKey(ValueError):
    """A key that stands twice in one mapping; `where` are words that follow it."""

    def __init__(self, key: Any, where: str = "") -> None:
        super().__init__(key)
        self.key, self.where = key, where


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, which refuses a key that stands twice where that takes the last value in silence."""

    def construct_document(self, node: Any) -> Any:
        # Before anything is built, which writes merged keys into the nodes that they are merged into.
        left, seen = [node], {id(node)}
        while left:
            node_of_tree = left.pop()
            if isinstance(node_of_tree, yaml.MappingNode):
                _refuse_twins(node_of_tree)
                parts = [each for pair in node_of_tree.value for each in pair]
            else:
                parts = node_of_tree.value if isinstance(node_of_tree, yaml.SequenceNode) else []
            new = [part for part in parts if id(part) not in seen]
            seen.update(map(id, new))
            left += new
        return super().construct_document(node)


def _refuse_twins(node: yaml.MappingNode) -> None:
    lines: dict[tuple[str, str], int] = {}
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                both = f"lines {lines[name]} and {line}" if lines[name] != line else f"line {line}"
                raise _TwinKey(key.value, f" ({both})")
            lines[name] = line


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a JSON file."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise _TwinKey(key)
        values[key] = value
    return values


def _content(source: Path) -> dict[str, Any]:
    try:
        text = source.read_text(encoding="utf-8")
        is_json = source.suffix == ".json"
        content = json.loads(text, object_pairs_hook=_without_twins) if is_json else yaml.load(text, _Loader)
    except _TwinKey as error:
        raise RequestError(
            f"the training file {source} writes the key {error.key!r} twice{error.where}, but only one value can be "
            "meant: remove one of them."
        ) from error
    except FileNotFoundError as error:
        raise RequestError(
            f"the training file {source} was asked for, but it does not exist: correct the path."
        ) from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, yaml.YAMLError) as error:
        raise RequestError(
            f"the training file {source} was asked for, but it is not readable "
            f"{'JSON' if source.suffix == '.json' else 'YAML'} ({' '.join(str(error).split())}): correct it."
        ) from error
    if not isinstance(content, dict):
        raise RequestError(
            f"the training file {source} holds a {type(content).__name__}, but keys with values are needed, such as "
            "`model: ./llama`: correct it."
        )
    wrong = [key for key in content if not isinstance(key, str)]
    if wrong:
        raise RequestError(
            f"the training file {source} has the key {wrong[0]!r}, but keys are texts, such as model: correct it, or "
            "quote it."
        )
    return content


def _beside(value: Any, folder: Path) -> Any:
    """Paths in a value, resolved beside the file where they are there."""
    if isinstance(value, str):
        beside = folder / value
        return str(beside) if beside.exists() or ("*" in value and any(folder.glob(value))) else value
    if isinstance(value, list):
        return [_beside(one, folder) for one in value]
    if isinstance(value, dict):
        return {key: one if key in IMPORTED_KEYS else _beside(one, folder) for key, one in value.items()}
    return value


def _is_yaml(name: Any) -> bool:
    return isinstance(name, str) and name.endswith((".yaml", ".yml"))


def _apply(content: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    if not equals or not key:
        raise RequestError(f"{change!r} was given, but changes are written key=value: correct it, as in max_steps=20.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RequestError(
            f"{change!r} was given, but its value is no YAML ({' '.join(str(error).split())}): quote it."
        ) from error
    *path, last = key.replace("-", "_").split(".")
    for part in path:
        content = content.setdefault(part, {})
        if not isinstance(content, dict):
            raise RequestError(f"{change!r} was given, but {part} holds a value and no keys: correct it.")
    content[last] = value if path else _number(last, value)


def _number(key: str, value: Any) -> Any:
    """The number in a text such as 1e-4, which YAML reads as text, unless the field holds texts."""
    if key not in TEXTS and isinstance(value, str) and not value.isalpha():  # nan and inf are words
        with suppress(ValueError):
            return float(value)
    return value
