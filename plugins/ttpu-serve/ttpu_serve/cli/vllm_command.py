"""A command that takes vLLM's flags and the file of `--config` beside its own options."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from typer.core import TyperCommand

from ttpu_core.cli.console import note
from ttpu_serve.cli.vllm_arguments import rewritten


class VllmCommand(TyperCommand):
    """The command; its options are typer's."""

    def others(self) -> Sequence[Any]:
        """Return the parameters of another command, whose options a file may have as well."""
        return ()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line, without vLLM's flags and the file."""
        if not ctx.resilient_parsing:
            own, others = _names(self.params), _names(self.others())
            switches = _names(one for one in (*self.params, *self.others()) if getattr(one, "is_flag", False))
            switches |= set(self.get_help_option_names(ctx))
            known = frozenset(own | others)
            args = rewritten(args, frozenset(switches), note, left_out=frozenset(others - own), known=known)
        return super().parse_args(ctx, args)


def _names(parameters: Iterable[Any]) -> set[str]:
    return {name for one in parameters for name in (*one.opts, *one.secondary_opts)}
