"""`ttpu new-plugin` makes a package for a new architecture, with tests and a workflow, in a folder of its own. The
package builds, installs and is found as it is; its author fills in the hooks."""

from __future__ import annotations

from collections.abc import Container, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttpu_core.cli.console import note, print_json, stderr_console

if TYPE_CHECKING:
    from ttpu_conformance.scaffold.attempt import Attempt
    from ttpu_conformance.scaffold.package_files import NewPlugin


def new_plugin(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="What the family is called; the package is ttpu-NAME. With --from it may be left out: then it is "
            "the model type, or TYPE-own where ttpu-TYPE is another package.",
        ),
    ] = None,
    model_type: Annotated[
        list[str] | None,
        typer.Option("--model-type", metavar="TYPE", help="A model_type to describe, else NAME; repeat for more."),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="CONFIG",
            help="A config.json, a checkpoint's directory or a Hub id, of a type that transformers knows: the hooks "
            "are filled in from what its tiny model shows, and the conformance kit says how far they get.",
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="With --from: run the kit's quick level on what was written.")
    ] = True,
    directory: Annotated[
        Path | None, typer.Option("--directory", metavar="DIR", help="Where to write, else ./ttpu-NAME.")
    ] = None,
    author: Annotated[str | None, typer.Option(metavar="TEXT", help='As in "Ada Lovelace <ada@example.org>".')] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a new package that describes an architecture, ready to be filled in, tested and published.

    As written it describes llama's layout under the new model type, or with --from what transformers' model shows.

    Examples:

      ttpu new-plugin olmo --model-type olmo2 --model-type olmo3

      ttpu new-plugin smollm3 --author "Ada Lovelace <ada@example.org>"

      ttpu new-plugin --from ./checkpoint/config.json

    \f
    Raises:
        RequestError: a name that no package can have, a directory that is not empty, or neither NAME nor --from.
        UnsupportedError: --from names a type of which transformers makes no tiny model.
    """
    from ttpu_conformance.scaffold.package_files import NewPlugin, write_all
    from ttpu_core.errors import RequestError

    if source is None and name is None:
        raise RequestError("new-plugin was given no name: pass NAME, or --from with a config.json.")
    if source is not None and model_type:
        raise RequestError(
            f"new-plugin was given both --from {source} and --model-type {model_type[0]}, but the config says its "
            "type: leave --model-type out."
        )
    if source is not None:
        plugin = _prefilled(source, name, author)
    else:
        plugin = NewPlugin.of(str(name), tuple(model_type or ()), author)
    target = (directory or Path(plugin.distribution)).expanduser()
    files = dict(plugin.files())
    write_all(target, files)
    steps = plugin.next_steps(target)
    found = _tried(plugin, target) if source is not None and check else None
    if as_json:
        print_json(
            {
                "distribution": plugin.distribution,
                "package": plugin.package,
                "model_types": list(plugin.modules),
                "directory": str(target.absolute()),
                "files": sorted(files),
                "next": steps,
                **({} if source is None else {"not_recognised": list(plugin.unknown)}),
                **({} if found is None else {"conformance": _as_json(found)}),
            }
        )
    else:
        print(f"{plugin.distribution} is in {target}: {len(files)} files.")
        for sentence in plugin.unknown:
            print(f"not recognised: {sentence}")
        for sentence in found.sentences() if found else ():
            print(sentence)
        print("Next:\n")
        print("\n".join(f"  {step}" for step in steps))
    for sentence in _already_claimed(plugin.modules):
        note(sentence)


def _prefilled(source: str, name: str | None, author: str | None) -> NewPlugin:
    """The plugin of a config's type, with hooks filled in."""
    from ttpu_conformance import environment
    from ttpu_conformance.scaffold.package_files import NewPlugin, free_name
    from ttpu_conformance.scaffold.prefilled import module_text
    from ttpu_conformance.scaffold.reference_model import look_at
    from ttpu_core.checkpoint import open_config

    environment.prepare()
    config = open_config(source)
    plugin = NewPlugin.of(name or free_name(config.model_type), (config.model_type,), author)
    with stderr_console().status(f"transformers' tiny {config.model_type}"):
        seen = look_at(config)
        text = module_text(seen, config.model_type)
    return plugin.filled(config.model_type, text, seen.sizes, seen.unknown)


def _tried(plugin: NewPlugin, target: Path) -> Attempt:
    from ttpu_conformance.scaffold.attempt import attempt
    from ttpu_core.plugin_records import ARCHITECTURES
    from ttpu_core.registry import default_registry

    denied = [
        record.distribution
        for record in default_registry().plugins(ARCHITECTURES)
        if record.name in plugin.modules and record.usable and not record.collection
    ]
    points = {one: f"{plugin.package}.{module}" for one, module in plugin.modules.items()}
    with stderr_console().status(f"ttpu conformance {' '.join(points)} --level quick"):
        return attempt(plugin.distribution, plugin.package, target, points, denied)


def _as_json(found: Attempt) -> dict[str, Any]:
    return {
        "passed": found.passed,
        "failed": dict(found.failed),
        "suspected_hooks": list(found.suspects),
        "trouble": found.trouble or None,
    }


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
