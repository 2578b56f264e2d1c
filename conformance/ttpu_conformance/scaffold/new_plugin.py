"""`ttpu new-plugin` makes a package for a new architecture, with tests and a workflow, in a folder of its own. The
package builds, installs and is found as it is; its author fills in the hooks."""

from __future__ import annotations

from collections.abc import Container, Iterator
from pathlib import Path
from typing import Annotated

import typer

from ttpu_core.cli.console import note, print_json


def new_plugin(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the family is called; the package is ttpu-NAME.")],
    model_type: Annotated[
        list[str] | None,
        typer.Option("--model-type", metavar="TYPE", help="A model_type to describe, else NAME; repeat for more."),
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--directory", metavar="DIR", help="Where to write, else ./ttpu-NAME.")
    ] = None,
    author: Annotated[str | None, typer.Option(metavar="TEXT", help='As in "Ada Lovelace <ada@example.org>".')] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a new package that describes an architecture, ready to be filled in, tested and published.

    As written it describes llama's layout under the new model type.

    Examples:

      ttpu new-plugin olmo --model-type olmo2 --model-type olmo3

      ttpu new-plugin smollm3 --author "Ada Lovelace <ada@example.org>"
    """
    from ttpu_conformance.scaffold.package_files import NewPlugin, write_all

    plugin = NewPlugin.of(name, tuple(model_type or ()), author)
    target = (directory or Path(plugin.distribution)).expanduser()
    files = dict(plugin.files())
    write_all(target, files)
    steps = plugin.next_steps(target)
    if as_json:
        print_json(
            {
                "distribution": plugin.distribution,
                "package": plugin.package,
                "model_types": list(plugin.modules),
                "directory": str(target.absolute()),
                "files": sorted(files),
                "next": steps,
            }
        )
    else:
        print(f"{plugin.distribution} is in {target}: {len(files)} files. Next:\n")
        print("\n".join(f"  {step}" for step in steps))
    for sentence in _already_claimed(plugin.modules):
        note(sentence)


def _already_claimed(model_types: Container[str]) -> Iterator[str]:
    """A sentence for each model type that an installed plugin describes already. A collection's plugin would yield."""
    from ttpu_core.plugin_records import ARCHITECTURES, DENY_VARIABLE
    from ttpu_core.registry import default_registry

    for record in default_registry().plugins(ARCHITECTURES):
        if record.name in model_types and record.usable and not record.collection:
            yield (
                f"{record.distribution} {record.version} describes {record.name!r} already, so that the new package "
                f"will be in conflict with it: uninstall it, or set {DENY_VARIABLE}={record.distribution}."
            )
