"""`ttpu list-plugins` and `ttpu doctor`. In: the entry points of this environment and what each backend says of itself;
out: what is installed, what cannot be used and why, and the `pip install` that brings what is missing."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from importlib import metadata
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttpu_core import distributions
from ttpu_core.cli.console import note, print_facts, print_json, stdout_console

if TYPE_CHECKING:
    from ttpu_core.registry import PluginRecord, Registry

KINDS = {
    "ttpu.architectures": "family",
    "ttpu.backends": "backend",
    "ttpu.patch_packs": "patch pack",
    "ttpu.commands": "command",
    "ttpu.services": "service",
    "ttpu.launches": "launch",
    "ttpu.default_backends": "default backend",
}
STATE_STYLES = {"available": "green", "loaded": "green", "disabled": "dim"}

VERSIONS_OF_INTEREST = ("jax", "jaxlib", "flax", "libtpu", "transformers", "tokenizers", "torch", "torch-xla")


def list_plugins(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per entry point, in a list.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Import each plugin; status 1 if one is broken.")] = False,
) -> None:
    """Show the installed plugins: families, backends, patch packs and commands.

    Nothing is imported unless --check is given, so "available" means installed and built for this core.

    Examples:

      ttpu list-plugins
      ttpu list-plugins --check
      ttpu list-plugins --json
      TTPU_DISABLE_PLUGINS=ttpu-llama ttpu list-plugins
    """
    from ttpu_core.registry import default_registry

    built_in = getattr(context.parent.command, "commands", {}) if context.parent else {}
    records = tuple(_hidden_by(built_in, record) for record in default_registry().plugins(check=check))
    if as_json:
        print_json([_as_json(record) for record in records])
    elif records:
        _print_table(records)
    if not as_json:
        for what, command in missing_plugins(default_registry()).items():
            note(f"{what}: {command}")
    if check and any(record.state in ("broken", "incompatible") for record in records):
        raise typer.Exit(1)


def _hidden_by(built_in: Container[str], record: PluginRecord) -> PluginRecord:
    """A plugin's command of a built-in's name is never run, which its record cannot know."""
    if record.group != "ttpu.commands" or record.name not in built_in or not record.usable:
        return record
    return replace(record, state="conflict", reason=f"ttpu's own command {record.name!r} comes first; rename this one.")


def missing_plugins(registry: Registry) -> dict[str, str]:
    """What is needed before a model can run and no usable plugin brings, with the command that installs it."""
    usable = {record.group for record in registry.plugins() if record.usable}
    missing = {}
    if "ttpu.architectures" not in usable:
        missing["no model family is installed"] = f"pip install {distributions.A_FAMILY}"
    if "ttpu.backends" not in usable:
        missing["no backend is installed"] = f"pip install {distributions.A_BACKEND}"
    return missing


def _as_json(record: PluginRecord) -> dict[str, Any]:
    return {
        "kind": KINDS[record.group],
        "name": record.name,
        "distribution": record.distribution,
        "version": record.version,
        "model_types": [record.name] if record.group == "ttpu.architectures" else [],
        "object": record.value,
        "state": record.state,
        "reason": record.reason,
    }


def _print_table(records: tuple[PluginRecord, ...]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    reasons = any(record.reason for record in records)
    for column in ("kind", "name", "distribution", "version", "model types", "state", *(["reason"] if reasons else [])):
        table.add_column(column, overflow="fold")
    for record, names in _rows(records):
        family = record.group == "ttpu.architectures"
        cells = [
            KINDS[record.group],
            record.distribution.removeprefix("ttpu-") if family else names[0],
            record.distribution,
            record.version,
            ", ".join(names) if family else "",
        ]
        state = Text(record.state, STATE_STYLES.get(record.state, "red"))
        table.add_row(*map(Text, cells), state, *([Text(record.reason)] if reasons else []))
    stdout_console().print(table)


def _rows(records: tuple[PluginRecord, ...]) -> list[tuple[PluginRecord, list[str]]]:
    """The model types of one distribution share a row, as long as they share a state; other plugins have their own."""

    def row(record: PluginRecord) -> tuple[str, ...]:
        own = "" if record.group == "ttpu.architectures" else record.name
        return record.group, record.distribution, record.version, own, record.state, record.reason

    rows = []
    for _, members in groupby(sorted(records, key=lambda r: (list(KINDS).index(r.group), *row(r)[1:])), key=row):
        shared = list(members)
        rows.append((shared[0], [record.name for record in shared]))
    return rows


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what this environment has, what it lacks, and the command that installs it.

    Imports every backend and lets it look for devices, which takes some seconds.

    Examples:

      ttpu doctor
      ttpu doctor --json
    """
    report = _examine()
    if as_json:
        print_json(report)
    else:
        print_facts(_sections(report))


def _examine() -> dict[str, Any]:
    import platform
    import sys

    from ttpu_core.registry import ARCHITECTURES, BACKENDS, default_registry

    registry = default_registry()
    backends = {}
    for record in registry.plugins(BACKENDS):
        backends[record.name] = _ask_backend(record)
    families = [record for record in registry.plugins(ARCHITECTURES) if record.usable]
    versions = {name: installed_version(name) for name in VERSIONS_OF_INTEREST}
    return {
        "python": {"version": platform.python_version(), "executable": sys.executable, "platform": platform.platform()},
        "ttpu-core": metadata.version("ttpu-core"),
        "versions": versions,
        "families": {
            distribution: [record.name for record in members]
            for distribution, members in groupby(families, key=lambda record: record.distribution)
        },
        "backends": backends,
        "problems": [
            f"{KINDS[record.group]} {record.name!r} of {record.distribution} is {record.state}: {record.reason}"
            for record in registry.plugins()
            if not record.usable
        ],
        "missing": _missing(registry, backends),
    }


def _missing(registry: Registry, backends: dict[str, Any]) -> dict[str, str]:
    missing = missing_plugins(registry)
    for name, answer in backends.items():
        wanted = answer.pop("missing", None) or {}
        missing |= {f"{what}, for the backend {name}, is not installed": command for what, command in wanted.items()}
    if installed_version("huggingface-hub") is None:
        missing["huggingface-hub is not installed, so only local checkpoints open"] = 'pip install "ttpu-core[hub]"'
    return missing


def _ask_backend(record: PluginRecord) -> dict[str, Any]:
    """What a backend says of itself, or the sentence that says why it says nothing; one backend never hides another."""
    from ttpu_core.errors import TTPUError
    from ttpu_core.registry import default_registry

    answer: dict[str, Any] = {"distribution": record.distribution, "version": record.version}
    try:
        return answer | dict(default_registry().backend(record.name).doctor())
    except TTPUError as error:
        return answer | {"error": str(error)}
    except Exception as error:  # a driver or a device may fail in any way, and that is what the user came to learn
        return answer | {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, without importing it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _sections(report: dict[str, Any]) -> list[tuple[str, list[str]]]:
    python = report["python"]
    missing = [f"{what}: {command}" for what, command in report["missing"].items()]
    return [
        ("Python", [f"{python['version']} ({python['executable']}, {python['platform']})"]),
        ("ttpu-core", [report["ttpu-core"]]),
        ("libraries", [", ".join(f"{name} {v}" for name, v in report["versions"].items() if v) or "none"]),
        ("families", [f"{dist} ({', '.join(names)})" for dist, names in report["families"].items()] or ["none"]),
        *(
            (f"backend {name}", [f"{key.replace('_', ' ')}: {_in_words(value)}" for key, value in answer.items()])
            for name, answer in report["backends"].items()
        ),
        *([] if report["backends"] else [("backends", ["none"])]),
        ("problems", report["problems"] or ["none"]),
        ("missing", missing or ["nothing"]),
    ]


def _in_words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_in_words(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_in_words, value)) or "none"
    return "none" if value is None else str(value)
