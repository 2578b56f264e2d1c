"""`ttpu list-plugins`: shows the plugins of this environment, which of them cannot be used and why, and the `pip
install` that brings what is missing."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttpu_core import distributions
from ttpu_core.cli.console import note, print_json, stdout_console
from ttpu_core.plugin_records import PARSERS

if TYPE_CHECKING:
    from ttpu_core.plugin_records import PluginRecord
    from ttpu_core.registry import Registry

KINDS = {
    "ttpu.architectures": "family",
    "ttpu.backends": "backend",
    "ttpu.patch_packs": "patch pack",
    "ttpu.commands": "command",
    "ttpu.services": "service",
    "ttpu.launches": "launch",
    "ttpu.default_backends": "default backend",
    "ttpu.fallbacks": "fallback",
    "ttpu.models_under_test": "model under test",
    "ttpu.torch_runtimes": "torch runtime",
    "ttpu.tool_parsers": "tool parser",
    "ttpu.reasoning_parsers": "reasoning parser",
}
SHARING = ("ttpu.architectures", *PARSERS)
"""Groups of which the plugins of one distribution share a row."""
STATE_STYLES = {"available": "green", "loaded": "green", "disabled": "dim", "superseded": "dim"}


def list_plugins(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per entry point, in a list.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Import each plugin; status 1 if one is broken.")] = False,
) -> None:
    """Show the installed plugins: families, backends, patch packs, commands, services, parsers and others.

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
    """Return what a model needs to run and no usable plugin provides, with the command that installs it."""
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
    columns = ("kind", "name", "distribution", "version", "model types, parsers", "state")
    for column in (*columns, *(["reason"] if reasons else [])):
        table.add_column(column, overflow="fold")
    for record, names in _rows(records):
        shares = record.group in SHARING
        cells = [
            KINDS[record.group],
            record.distribution.removeprefix("ttpu-") if shares else names[0],
            record.distribution,
            record.version,
            ", ".join(names) if shares else "",
        ]
        state = Text(record.state, STATE_STYLES.get(record.state, "red"))
        table.add_row(*map(Text, cells), state, *([Text(record.reason)] if reasons else []))
    stdout_console().print(table)


def _rows(records: tuple[PluginRecord, ...]) -> list[tuple[PluginRecord, list[str]]]:
    """The model types of one distribution share a row as long as they share a state, and so do its parsers; other
    plugins have their own."""

    def row(record: PluginRecord) -> tuple[str, ...]:
        own = "" if record.group in SHARING else record.name
        return record.group, record.distribution, record.version, own, record.state, record.reason

    rows = []
    for _, members in groupby(sorted(records, key=lambda r: (list(KINDS).index(r.group), *row(r)[1:])), key=row):
        shared = list(members)
        rows.append((shared[0], [record.name for record in shared]))
    return rows
