"""How many tokens a program is made for: as many as are asked for, up to what the model has positions for."""

from __future__ import annotations

import warnings

from ttpu_core.errors import RequestError
from ttpu_core.spec.architecture_spec import ArchitectureSpec

USUAL_CONTEXT = 2048
"""Tokens where no number is named and the model does not have fewer."""


def usual_context(spec: ArchitectureSpec, tokens: int = USUAL_CONTEXT) -> int:
    """The context where none is named: `tokens`, or the model's if that is shorter."""
    return tokens if spec.longest is None else min(tokens, spec.longest)


def check_context(spec: ArchitectureSpec, context: int, *, trains: bool, name: str = "context") -> None:
    """Refuse a context that the model cannot be run with. Warn of one to train with, as `ttpu train` does: training so
    is how contexts are extended. Positions that are learned cannot be.

    Args:
        spec: the architecture.
        context: tokens of a sequence that were asked for.
        trains: whether the model is trained with them.
        name: of the option.

    Raises:
        RequestError: it is longer than the model's.
    """
    longest = spec.longest
    if longest is None or context <= longest:
        return
    if not trains:
        raise RequestError(f"{name} is {context:,}, but this model's context holds {longest:,}: lower it.")
    learned = spec.embedding.positions
    if learned is not None and context > learned:
        raise RequestError(
            f"{name} is {context:,}, but this model has learned {learned:,} positions, and training adds none: lower "
            "it."
        )
    warnings.warn(
        f"{name}={context:,} was given, but the model's config names {longest:,} positions: pass {name}={longest}, "
        "unless its context is to be extended",
        stacklevel=3,
    )
