"""`ttpu doctor`: shows what this environment has, what each backend says of itself, what cannot be used and why, and
the `pip install` that brings what is missing."""

from __future__ import annotations

from importlib import metadata
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttpu_core.cli.console import print_facts, print_json
from ttpu_core.cli.list_plugins import KINDS, missing_plugins

if TYPE_CHECKING:
    from ttpu_core.plugin_records import PluginRecord
    from ttpu_core.registry import Registry

VERSIONS_OF_INTEREST = ("jax", "jaxlib", "flax", "libtpu", "transformers", "tokenizers", "torch", "torch-xla")


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

    from ttpu_core.plugin_records import ARCHITECTURES, BACKENDS
    from ttpu_core.registry import default_registry

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
            if not record.usable and record.state != "superseded"
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
