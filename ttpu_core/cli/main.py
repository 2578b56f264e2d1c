"""The entry point of the console script `ttpu`. It runs a command and returns an exit status: 0, 1 if a check found
something, 2 for a usage error or an error that the user can correct, 130 for Ctrl-C."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ttpu_core.cli.chat import chat
from ttpu_core.cli.commands import CONTEXT_SETTINGS, CommandGroup
from ttpu_core.cli.doctor import doctor
from ttpu_core.cli.generate import generate
from ttpu_core.cli.info import info
from ttpu_core.cli.interrupts import repeat_lost_interrupts
from ttpu_core.cli.list_plugins import list_plugins
from ttpu_core.cli.parameters import parameters
from ttpu_core.default_device import leave_out_default_device
from ttpu_core.processes import is_one_of_several, leave_at_once

app = typer.Typer(
    cls=CommandGroup,
    context_settings=CONTEXT_SETTINGS,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a bug shows an ordinary traceback
    rich_markup_mode="rich",
)
app.command("list-plugins")(list_plugins)
app.command("info")(info)
app.command("parameters")(parameters)
app.command("generate")(generate)
app.command("chat")(chat)
app.command("doctor")(doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"ttpu {version('ttpu-core')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Hugging Face transformers models on TPUs.

    Each command has examples: [bold]ttpu COMMAND --help[/bold]
    """


def main() -> None:
    """Run the command line; ends by SystemExit with the status."""
    repeat_lost_interrupts()
    leave_out_default_device()
    # Generated text may hold characters that a terminal's encoding lacks; they are better escaped than fatal.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="ttpu")
    except SystemExit as ending:
        if ending.code and is_one_of_several():
            leave_at_once(ending.code if isinstance(ending.code, int) else 1)
        raise


if __name__ == "__main__":
    main()
