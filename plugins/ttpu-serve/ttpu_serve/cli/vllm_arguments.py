"""Reads a command line with vLLM's flags, and the file of `--config`, as the words that `ttpu serve` takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ttpu_core.errors import RequestError
from ttpu_serve.cli.vllm_flags import IGNORED, PARALLEL, REFUSED, RENAMED, SEVERAL, SHORT, Takes

CONFIG = "--config"
_OF_VLLM = (RENAMED, IGNORED, REFUSED, PARALLEL, SEVERAL, ("--model", "--checkpoint", "--enable-expert-parallel"))
"""The tables and the names of vLLM's flags, which a file may have too."""
STRATEGIES = ("--parallelism-strategy", "--sharding-strategy", "--mesh", "--plan")


def rewritten(
    arguments: Sequence[str],
    switches: frozenset[str],
    note: Callable[[str], None] = lambda text: None,
    *,
    left_out: frozenset[str] = frozenset(),
    known: frozenset[str] | None = None,
) -> list[str]:
    """Return a command line without vLLM's flags and without `--config`.

    Args:
        arguments: the words after `ttpu serve`.
        switches: options of `ttpu serve` that take no value.
        note: gets a sentence on each flag that has no effect.
        left_out: options that are left out where a file has them, because they are another command's.
        known: the options that a file may have beside vLLM's; None accepts any.

    Raises:
        RequestError: a flag is refused, contradicts another, or lacks its value, or the file cannot be read or has an
            option that there is not.
    """
    words = [_canonical(word) for word in arguments]
    files, words = _without_config(words)
    given = {word.partition("=")[0] for word in words if word.startswith("-")}
    for file in files:
        words = [*_words_of(file, given, switches, words, left_out, known), *words]
    return _Reader(words, switches, note).read()


def _canonical(word: str) -> str:
    """Return an option with dashes and its long name; values stay as they are."""
    if not word.startswith("-") or word in ("-", "--"):
        return word
    name, equals, value = word.partition("=")
    if word.startswith("--"):
        return name.replace("_", "-") + equals + value
    if name.startswith("-O") and name[2:].isdigit():
        return f"{SHORT['-O']}={name[2:]}"
    return SHORT.get(name, name) + equals + value


def _without_config(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the files of `--config`, and the other words."""
    files, kept, rest = [], [], list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            kept += [word, *rest]
            break
        name, equals, value = word.partition("=")
        if name != CONFIG:
            kept.append(word)
            continue
        if not equals and not rest:
            raise RequestError(f"{CONFIG} was given without a value: name a YAML file of options.")
        files.append(value if equals else rest.pop(0))
    return files, kept


def _words_of(
    file: str,
    given: set[str],
    switches: frozenset[str],
    words: list[str],
    left_out: frozenset[str],
    known: frozenset[str] | None,
) -> list[str]:
    """Return the options of a file as words, without those that the command line gives and those of other commands."""
    import yaml

    try:
        found = yaml.safe_load(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise RequestError(f"{CONFIG} {file} cannot be read ({reason}): pass a YAML file of options.") from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise RequestError(
            f"{CONFIG} {file} holds no options: write one a line, as in `max-model-len: 4096`, without dashes before."
        )
    made: list[str] = []
    for key, value in found.items():
        name = _canonical(f"--{key}")
        if name == CONFIG:
            raise RequestError(f"{CONFIG} {file} names another {CONFIG}: write all options into one file.")
        if known is not None and not any(name in names for names in (known, *_OF_VLLM)):
            raise RequestError(f"{CONFIG} {file} has {key}, but there is no such option{_similar(name, known)}.")
        if name in ("--model", "--checkpoint"):
            if not _has_checkpoint(words, switches):
                made += [f"--model={value}"]
        elif name not in given and value is not None:
            option = _option(file, name, value, switches)
            meant = _Reader(option, switches, lambda text: None).read() if left_out else []
            made += [] if left_out & {word.partition("=")[0] for word in meant} else option
    return made


def _similar(name: str, known: frozenset[str]) -> str:
    """What to do about an unknown option: the names that resemble it, or where all are listed."""
    options = {*known, *RENAMED, *PARALLEL, *SEVERAL, "--model"}
    found = [f"`{one[2:]}`" for one in get_close_matches(name, options, cutoff=0.8)]
    return f": did you mean {' or '.join(found)}?" if found else ": correct it, or see --help for all of them"


def _has_checkpoint(words: list[str], switches: frozenset[str]) -> bool:
    reader = _Reader([word for word in words if word != "--"], switches, lambda text: None)
    reader.read()
    return reader.checkpoint


def _option(file: str, name: str, value: Any, switches: frozenset[str]) -> list[str]:
    """Return one option of a file as words."""
    if isinstance(value, bool):
        if _takes(name, switches) != "nothing":
            raise RequestError(f"{CONFIG} {file} has {name[2:]}: {str(value).lower()}, but it takes a value: write it.")
        no = f"--no-{name[2:]}"
        return [name] if value else [no] if no in RENAMED else []
    if _takes(name, switches) == "nothing" and name != "--enable-lora":
        raise RequestError(f"{CONFIG} {file} has {name[2:]}: {value}, but it is true or false: write one of them.")
    if isinstance(value, dict):
        return [f"{name}={json.dumps(value)}"]
    if isinstance(value, list):
        texts = [json.dumps(one) if isinstance(one, dict) else str(one) for one in value]
        return [f"{name}={text}" for text in texts]
    return [f"{name}={value}"]


def _takes(name: str, switches: frozenset[str]) -> Takes:
    if name in switches or name in REFUSED:
        return "nothing"
    known = RENAMED.get(name) or IGNORED.get(name)
    return "a value" if known is None else known.takes


class _Reader:
    """Reads words from left to right. checkpoint: whether one was named."""

    def __init__(self, words: Sequence[str], switches: frozenset[str], note: Callable[[str], None]) -> None:
        self._rest, self._switches, self._note = list(words), switches, note
        self._made: list[str] = []
        self._sizes: dict[str, int] = {}
        self._lora = self._expert_parallel = False
        self.checkpoint = False

    def read(self) -> list[str]:
        """Return the words of `ttpu serve`.

        Raises:
            RequestError: a flag is refused, contradicts another, or lacks its value.
        """
        while self._rest:
            word = self._rest.pop(0)
            if word == "--":
                self._made += [word, *self._rest]
                self._rest = []
            elif not word.startswith("-") or word == "-":
                self.checkpoint = True
                self._made.append(word)
            else:
                name, equals, value = word.partition("=")
                self._flag(name, value if equals else None)
        names = {word.partition("=")[0] for word in self._made}
        if self._lora and not names & {"--max-adapters", "--enable-lora", "--lora-modules"}:
            self._made += RENAMED["--enable-lora"].words("")
        return [*self._mesh(names), *self._rules(names), *self._made]

    def _flag(self, name: str, value: str | None) -> None:
        if name in REFUSED:
            raise RequestError(f"{name} was given, but {REFUSED[name].reason}.")
        if name in PARALLEL:
            self._sizes[PARALLEL[name]] = self._size(name, value)
        elif name in IGNORED:
            self._ignore(name, value)
        elif name == "--enable-lora" and value is None and self._bare():
            self._lora = True
        elif name == "--enable-expert-parallel":
            self._check_bare(name, value)
            self._expert_parallel = True
        elif name in RENAMED and name != "--enable-lora":
            self._rename(name, value)
        elif name in SEVERAL:
            for one in self._values(name, value):
                self._made += ["--lora-modules" if name == "--lora-modules" else name, _adapter(name, one)]
        elif name in self._switches or value is not None:
            self._made.append(name if value is None else f"{name}={value}")
        else:  # an option of its own with a value, or an unknown one, which typer refuses
            self._made += [name, *self._rest[:1]]
            del self._rest[:1]
        if name in ("--model", "--weights-dir"):
            self.checkpoint = True

    def _rename(self, name: str, value: str | None) -> None:
        known = RENAMED[name]
        if known.takes == "nothing":
            self._check_bare(name, value)
            self._made += known.words("")
        elif known.takes == "a value":
            self._made += known.words(self._value(name, value))
        else:
            for one in self._values(name, value):
                self._made += known.words(one)

    def _ignore(self, name: str, value: str | None) -> None:
        known = IGNORED[name]
        if known.takes == "nothing":
            self._check_bare(name, value)
            given = []
        else:
            given = [self._value(name, value)] if known.takes == "a value" else self._values(name, value)
        for one in given:
            if known.values is not None and one not in known.values:
                raise RequestError(
                    f"{name} {one} was given, but {known.reason}: pass {' or '.join(known.values)}, or leave it out."
                )
        if known.values is None:
            self._note(f"note: {name} has no effect: {known.reason}.")

    def _bare(self) -> bool:
        """Whether no value of `--enable-lora` follows, but nothing, another option, or the checkpoint."""
        if not self._rest or self._rest[0].startswith("-"):
            return True
        return not self.checkpoint and "=" not in self._rest[0]

    def _check_bare(self, name: str, value: str | None) -> None:
        if value is not None:
            raise RequestError(f"{name}={value} was given, but it takes no value: leave the value out.")

    def _value(self, name: str, value: str | None) -> str:
        if value is not None:
            return value
        if not self._rest:
            raise RequestError(f"{name} was given without a value: pass one.")
        return self._rest.pop(0)

    def _values(self, name: str, value: str | None) -> list[str]:
        """Return the values that follow: several only after the checkpoint, for one of them may be it."""
        found = [self._value(name, value)]
        while value is None and self.checkpoint and self._rest and not self._rest[0].startswith("-"):
            found.append(self._rest.pop(0))
        texts: list[str] = []
        for one in found:
            read = _json(one)
            texts += [json.dumps(item) if isinstance(item, dict) else str(item) for item in read] if isinstance(
                read, list
            ) else [one]
        return texts

    def _size(self, name: str, value: str | None) -> int:
        text = self._value(name, value)
        if not text.isdigit() or int(text) < 1:
            raise RequestError(f"{name} {text} was given, but a number of devices, 1 or more, is needed: correct it.")
        if name != "--tensor-parallel-size" and int(text) > 1:
            raise RequestError(
                f"{name} {text} was given, but one server is one replica without stages: start a server for each "
                "replica, or shard over tensors with --tensor-parallel-size."
            )
        return int(text)

    def _mesh(self, names: set[str]) -> list[str]:
        """Return the parallelism as one option; nothing for one device."""
        sizes = {axis: size for axis, size in self._sizes.items() if size > 1}
        if not sizes:
            return []
        if own := next((name for name in STRATEGIES if name in names), None):
            raise RequestError(f"--tensor-parallel-size and {own} were both given, two ways to say one: pass one.")
        return ["--parallelism-strategy", ",".join(f"{axis}={size}" for axis, size in sizes.items())]

    def _rules(self, names: set[str]) -> list[str]:
        """Return the rule of `--enable-expert-parallel`; nothing for one device."""
        if not self._expert_parallel:
            return []
        if own := next((name for name in ("--sharding-rules", "--plan") if name in names), None):
            raise RequestError(
                f"--enable-expert-parallel and {own} were both given, but each says how experts are sharded: pass one."
            )
        several = any(size > 1 for size in self._sizes.values()) or bool(names.intersection(STRATEGIES))
        return RENAMED["--enable-expert-parallel"].words("") if several else []


def _json(text: str) -> Any:
    try:
        return json.loads(text) if text[:1] in "[{" else None
    except ValueError:
        return None


def _adapter(name: str, text: str) -> str:
    """Return one of vLLM's adapters in JSON as NAME=PATH, and other values as they are."""
    read = _json(text) if name == "--lora-modules" else None
    if not isinstance(read, dict):
        return text
    unknown = sorted(set(read) - {"name", "path", "base_model_name"})
    if unknown or not all(isinstance(read.get(key), str) for key in ("name", "path")):
        raise RequestError(f"{name} {text} was given, but an object with name and path is needed: correct it.")
    return f"{read['name']}={read['path']}"
