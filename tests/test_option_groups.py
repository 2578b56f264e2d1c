"""Commands that share options take a dataclass, of which each field is an option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from ttpu_core.cli.option_groups import with_option_groups


@dataclass(frozen=True)
class Size:
    """How large something is."""

    width: Annotated[int, typer.Option(help="In metres.")] = 1
    name: Annotated[list[str] | None, typer.Option(metavar="NAME")] = None


@with_option_groups
def build(what: str, *, size: Size, loud_voice: bool = False) -> None:
    """Build it."""
    print(what, size, loud_voice)


def build_with(*words: str) -> str:
    app = typer.Typer()
    app.command()(build)
    return CliRunner().invoke(app, words, catch_exceptions=False).stdout


def test_a_command_gets_the_dataclass_of_the_options_that_were_typed() -> None:
    assert build_with("house").strip() == f"house {Size()} False"
    typed = build_with("house", "--name", "a", "--width", "3", "--loud-voice", "--name", "b")
    assert typed.strip() == f"house {Size(3, ['a', 'b'])} True"


def test_help_shows_the_fields_between_the_commands_own_options() -> None:
    shown = build_with("--help")
    assert "Build it." in shown and "In metres." in shown
    assert shown.index("--width") < shown.index("--name") < shown.index("--loud-voice")
