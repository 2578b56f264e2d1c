"""Turns the words after `--` on the command line into an argv that works without an activated environment."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ttpu_core.errors import LaunchError

TTPU = "ttpu"


def argv_of(words: Sequence[str], python: str = sys.executable) -> tuple[str, ...]:
    """The argv of a command: `ttpu …` and scripts ending in `.py` are run by `python`, other commands are unchanged.

    Raises:
        LaunchError: there is no command, or several processes cannot run it.
    """
    check_command(words)
    if words[0] == TTPU:
        return (python, "-m", "ttpu_core.cli.main", *words[1:])
    if words[0].endswith(".py"):
        return (python, "-m", "ttpu_launch.script", *words)
    return tuple(words)


def check_command(words: Sequence[str]) -> None:
    """Refuse commands that cannot be launched.

    Raises:
        LaunchError: there is no command, or several processes cannot run it.
    """
    if not words:
        raise LaunchError(
            "no command was given: write what each process runs after `--`, as in "
            "`ttpu launch --nproc-per-node 2 -- ttpu generate ./llama --prompt Hi --mesh tensor=2`."
        )
    if words[0] == TTPU and len(words) > 1 and words[1] in ("chat", "launch"):
        why = "a conversation needs one terminal: use `ttpu generate --chat --prompt TEXT`"
        why = why if words[1] == "chat" else "one launch starts all processes: leave the second out"
        raise LaunchError(f"`ttpu {words[1]}` was to be launched in several processes, but {why}.")
