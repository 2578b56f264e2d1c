"""Makes the files of a new plugin package from `templates/plugin`, for a name, model types and an author, and writes
them to a folder."""

from __future__ import annotations

import json
import keyword
import os
import re
import shlex
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata, resources
from pathlib import Path
from string import Template
from typing import Any

from ttpu_core.distributions import official
from ttpu_core.errors import RequestError

PREFIX = "ttpu-"
OWN = "-own"
"""What a name ends with whose beginning is another distribution's."""
LINE = 120


@dataclass(frozen=True)
class NewPlugin:
    """A package to write. `modules` has the module's name for each model type, `texts` the source of those that are
    filled in, `sizes` what their tiny models need, and `unknown` what was not recognised, a sentence each."""

    title: str
    distribution: str
    package: str
    modules: dict[str, str]
    author: str | None
    texts: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, model_types: tuple[str, ...], author: str | None) -> NewPlugin:
        """Make the package of a name.

        Raises:
            RequestError: a name or model type of which no distribution, package or module can be named.
        """
        title = name.strip()
        if title.lower().startswith(PREFIX):
            title = title[len(PREFIX) :]
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", title):
            raise RequestError(
                f"new-plugin was given the name {name!r}, but a package's name has letters, digits, '-', '_' and '.', "
                "and begins and ends with a letter or digit (PEP 508): pass one such as 'olmo'."
            )
        slug = _slug(title)
        if is_taken(slug):
            owner = "a part of TTPU itself" if PREFIX + slug in official() else "installed already"
            raise RequestError(
                f"new-plugin was given the name {name!r}, but {PREFIX}{slug} is {owner}, and a package of that name "
                f"would take its place: choose another, such as {slug}{OWN}."
            )
        types = tuple(dict.fromkeys(model_types)) or (slug.replace("-", "_"),)
        modules = {one: _module_name(one) for one in types}
        [(shared, count)] = Counter(modules.values()).most_common(1)
        if count > 1:
            both = " and ".join(repr(one) for one, module in modules.items() if module == shared)
            raise RequestError(
                f"new-plugin was given the model types {both}, but both would be described in a module {shared!r}: "
                "pass one of them, and add the other to the package by hand."
            )
        if author is not None and (not author.strip() or not author.isprintable()):
            raise RequestError(
                f"--author {author!r} was given, but a name on one line is needed: pass one such as 'Ada Lovelace "
                "<ada@example.org>', or leave it out."
            )
        return cls(title, PREFIX + slug, f"ttpu_{slug.replace('-', '_')}", modules, author)

    def filled(self, model_type: str, text: str, sizes: Mapping[str, Any], unknown: Iterable[str]) -> NewPlugin:
        """This package with the source of a type's module.

        Args:
            model_type: one of the package's.
            text: the module.
            sizes: config keys of the type's tiny model, besides the kit's.
            unknown: what its author has to write, a sentence each.
        """
        return replace(self, texts={model_type: text}, sizes={model_type: sizes}, unknown=tuple(unknown))

    def files(self) -> Iterator[tuple[str, str]]:
        """Every file by its path in the package's folder, with its text."""
        values = self._values()
        for path, template in self._layout().items():
            yield path, _filled(template, values)
        for model_type, module in self.modules.items():
            text = self.texts.get(model_type) or _filled("module.py", {"model_type": model_type})
            yield f"{self.package}/{module}.py", text

    def next_steps(self, target: Path) -> list[str]:
        """Commands and what to do between them."""
        first = next(iter(self.modules.values()))
        types = " ".join(self.modules)
        return [
            f"cd {shlex.quote(str(target))}",
            'pip install -e ".[test]"',
            "ttpu list-plugins --check",
            f"# {'correct' if self.texts else 'fill in'} {self.package}/{first}.py: the hooks in which the model "
            "differs from llama",
            f"# fill in {self.package}/conformance.toml: variants that turn every knob of its configs",
            f"ttpu conformance {types} --level quick",
            "pytest",
        ]

    def _layout(self) -> dict[str, str]:
        """Template by path."""
        return {
            "pyproject.toml": "pyproject.toml",
            "README.md": "README.md",
            "LICENSE": "LICENSE",
            ".gitignore": "gitignore",
            ".github/workflows/test.yml": "workflow.yml",
            f"{self.package}/__init__.py": "init.py",
            f"{self.package}/py.typed": "py.typed",
            f"{self.package}/conformance.toml": "conformance.toml",
            f"tests/test_{self.package.removeprefix('ttpu_')}_conformance.py": "test_conformance.py",
        }

    def _values(self) -> dict[str, str]:
        points = [f'{_toml_key(one)} = "{self.package}.{module}"' for one, module in self.modules.items()]
        sections = [
            _filled("conformance_section", {"model_type": _toml_key(one), "class_name": _class_name(one)})
            + _base(one, self.sizes.get(one, {}))
            for one in self.modules
        ]
        rows = [f"| `{one}` | | |" for one in self.modules]
        return {
            "title": self.title,
            "distribution": self.distribution,
            "package": self.package,
            "core": ".".join(metadata.version("ttpu-core").split(".")[:2]),
            "authors": _authors(self.author),
            "entry_points": "\n".join(points),
            "sections": "\n".join(sections).rstrip(),
            "table": "\n".join(rows),
            "model_types": " ".join(self.modules),
            "quoted_model_types": _arguments([f'"{one}"' for one in self.modules]),
        }


def free_name(model_type: str) -> str:
    """The name of a package for a model type: the type's, unless a distribution has it."""
    return f"{model_type}{OWN}" if is_taken(model_type) else model_type


def is_taken(name: str) -> bool:
    """Whether TTPU, or an installed distribution, has the name of the package for this one."""
    distribution = PREFIX + _slug(name)
    return distribution in official() or any(metadata.distributions(name=distribution))


def _slug(title: str) -> str:
    return re.sub(r"[-_.]+", "-", title).lower()


def write_all(target: Path, files: Mapping[str, str]) -> None:
    """Write all files at once: into a folder beside the target, which then takes the target's place.

    Raises:
        RequestError: the target is there and holds something, or nothing can be written there.
    """
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            kind = "is a directory that is not empty" if target.is_dir() else "is a file"
            raise RequestError(
                f"new-plugin was asked to write into {target}, but that {kind}: pass another --directory, or move it "
                "away."
            )
        parent = target.absolute().parent
        parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=parent))
        try:
            for path, text in files.items():
                (unfinished / path).parent.mkdir(parents=True, exist_ok=True)
                (unfinished / path).write_text(text, encoding="utf-8", newline="\n")
            mask = os.umask(0)
            os.umask(mask)
            unfinished.chmod(0o777 & ~mask)  # mkdtemp lets nobody else in
            if target.exists():
                target.rmdir()  # empty, and Windows would not replace it
            unfinished.rename(target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise RequestError(
            f"new-plugin was asked to write into {target}, but that cannot be done ({error.strerror}): pass another "
            "--directory."
        ) from error


class _PluginTemplate(Template):
    """`%{name}` is filled in, so that `$` stays what it is in shells and workflows."""

    delimiter = "%"


def _filled(template: str, values: dict[str, str]) -> str:
    text = (resources.files(__package__) / "templates" / "plugin" / f"{template}.template").read_text(encoding="utf-8")
    return _PluginTemplate(text).substitute(values)


def _module_name(model_type: str) -> str:
    """A module's name for a model type.

    Raises:
        RequestError: the model type cannot be the name of an entry point.
    """
    if not re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?", model_type):
        raise RequestError(
            f"--model-type {model_type!r} was given, but a model type has letters, digits, '_', '-' and '.': pass what "
            "the model's config.json has under 'model_type'."
        )
    name = re.sub(r"[-.]", "_", model_type).lower()
    return name if name.isidentifier() and not keyword.iskeyword(name) else f"model_{name}"


def _class_name(model_type: str) -> str:
    """A guess at how transformers calls the class."""
    return "".join(part[:1].upper() + part[1:] for part in re.split(r"[-_.]", model_type)) + "ForCausalLM"


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def _base(model_type: str, sizes: Mapping[str, Any]) -> str:
    """The section of a type's sizes, or nothing."""
    if not sizes:
        return ""
    lines = [f"{_toml_key(key)} = {_toml_value(value)}" for key, value in sizes.items()]
    return "\n".join(["", f"[{_toml_key(model_type)}.base]", *lines, ""])


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml_key(key)} = {_toml_value(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _authors(author: str | None) -> str:
    """The line of pyproject.toml with its line break, or nothing."""
    if author is None:
        return ""
    match = re.fullmatch(r"\s*(.+?)\s*<\s*([^<>\s]+@[^<>\s]+)\s*>\s*", author)
    fields: dict[str, Any] = {"name": match[1], "email": match[2]} if match else {"name": author.strip()}
    # A JSON string is a TOML string, as long as what is not printable is refused beforehand.
    inner = ", ".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in fields.items())
    return f"authors = [{{ {inner} }}]\n"


def _arguments(values: list[str]) -> str:
    """Arguments of a decorator on one line, or a line each where they are many."""
    line = ", ".join(values)
    return line if len(line) < LINE - len("@parametrize_with_checks()") else "\n    " + ",\n    ".join(values) + ",\n"
