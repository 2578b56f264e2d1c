"""A command that reads the file of options of `ttpu serve`, and leaves out those that it does not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.main import get_command

from ttpu_serve.cli.vllm_command import VllmCommand


class SharedFileCommand(VllmCommand):
    """The command; its options are typer's."""

    def others(self) -> Sequence[Any]:
        """Return the parameters of `ttpu serve`."""
        from ttpu_serve.cli.serve import app as serve

        return tuple(get_command(serve).params)
