"""The commands of `ttpu`. Commands of other distributions (entry points of the group `ttpu.commands`) are listed from
metadata and imported only when they are run or their help is shown, so that a broken one does not affect the others.

    [project.entry-points."ttpu.commands"]
    bench = "my_package.bench:bench"        # a function with Typer-annotated parameters, or a Typer app"""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from ttpu_core import distributions
from ttpu_core.cli.console import note
from ttpu_core.errors import MissingDependencyError, PluginError, TTPUError

TRACEBACK_VARIABLE = "TTPU_TRACEBACK"
INTERRUPTED, BROKEN_PIPE = 130, 141  # 128 + SIGINT, 128 + SIGPIPE, as a shell reports them

# Underscore spellings (`--max_new_tokens`) are accepted everywhere, as transformers' scripts write them.
CONTEXT_SETTINGS: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("_", "-"),
}


class CommandGroup(TyperGroup):
    """The built-in commands, then those that plugins add, and the one place that turns errors into exit statuses."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all commands; a plugin cannot take a built-in's name."""
        own = super().list_commands(ctx)
        return [*own, *(name for name in _added() if name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The built-in command, or for an added one a stand-in that costs no import."""
        return super().get_command(ctx, cmd_name) or _added().get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command to run. A command of a plugin is imported here, not earlier.

        Raises:
            MissingDependencyError: the plugin that adds the command is not installed.
        """
        asked = args[0].replace("_", "-")
        if asked in distributions.COMMANDS and self.get_command(ctx, asked) is None:
            raise MissingDependencyError(
                f"the command {asked!r} was asked for, but the plugin that adds it is not installed: "
                f"`pip install {distributions.COMMANDS[asked]}` brings it."
            )
        name, command, rest = super().resolve_command(ctx, args)
        if isinstance(command, AddedCommand) and not ctx.resilient_parsing:
            command = imported(str(command.name))
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        """Run; end with status 2 for an error that the user can put right, 130 for Ctrl-C, 141 for a closed pipe."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # a pipe that was closed early shows itself here, not at the interpreter's exit
            return result
        except TTPUError as error:
            if os.environ.get(TRACEBACK_VARIABLE, "") not in ("", "0"):
                import traceback

                traceback.print_exc()
            note(f"error: {' '.join(str(error).split())}")
            raise typer.Exit(2) from error
        except KeyboardInterrupt as interrupt:
            raise typer.Exit(INTERRUPTED) from interrupt
        except BrokenPipeError as broken:
            # What is still buffered has nowhere to go; without this the interpreter complains when it exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(BROKEN_PIPE) from broken


class AddedCommand(TyperCommand):
    """Stands in the list for a command that is not imported yet."""


def _added() -> dict[str, AddedCommand]:
    from ttpu_core.plugin_records import COMMANDS
    from ttpu_core.registry import default_registry

    commands: dict[str, AddedCommand] = {}
    for record in default_registry().plugins(COMMANDS):
        origin = f"{record.distribution} {record.version}"
        state = "" if record.usable else f" ({record.state}: {record.reason})"
        help_text = f"Added by {origin}{state}" + ("" if state else f"; `ttpu {record.name} --help` explains it.")
        commands[record.name] = AddedCommand(name=record.name, callback=_unreachable, help=help_text)
    return commands


def imported(name: str) -> Any:
    """The command behind an entry point.

    Raises:
        PluginError: it cannot be imported, or what it names is neither a function nor a Typer app.
    """
    from ttpu_core.registry import default_registry

    target = default_registry().command(name)
    try:
        if isinstance(target, typer.Typer):
            app = target
        else:
            app = typer.Typer(add_completion=False, context_settings=CONTEXT_SETTINGS, pretty_exceptions_enable=False)
            app.command(name)(target)
        return get_command(app)
    except Exception as error:  # typer raises whatever it stumbles over in a foreign signature
        raise PluginError(
            f"the command {name!r} was asked for, but the plugin that adds it gives {target!r}, of which no command "
            f"can be made ({type(error).__name__}: {error}): it must be a function whose parameters are annotated as "
            "Typer asks."
        ) from error


def _unreachable() -> None:
    raise AssertionError("an added command is replaced by the imported one before it runs")
