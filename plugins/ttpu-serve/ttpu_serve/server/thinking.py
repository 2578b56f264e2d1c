"""How long a model thinks, in the variables of its chat template: `reasoning_effort`, switches and budgets."""

from __future__ import annotations

import re
from typing import Any

from jinja2 import Environment, TemplateError, meta, nodes

from ttpu_serve.server.errors import ApiError

SWITCHES = ("enable_thinking", "thinking")
"""Variables that turn thinking on and off."""
BUDGETS = ("thinking_budget", "thinking_token_budget", "reasoning_budget")
"""Variables that hold a maximum number of tokens of thinking."""
_GENERATION = re.compile(r"{%-?\s*(end)?generation\s*-?%}")  # transformers' own tag


def options_of(template: str) -> frozenset[str]:
    """Return the variables that a template takes from outside: those that it reads and never sets, or of which it asks
    whether they are defined. None if it cannot be parsed."""
    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", template))
        read = meta.find_undeclared_variables(parsed)
        own = {name.name for name in parsed.find_all(nodes.Name) if name.ctx == "store"}
        asked = [test.node for test in parsed.find_all(nodes.Test) if test.name in ("defined", "undefined")]
        asked += [one.node for one in parsed.find_all(nodes.Filter) if one.name in ("default", "d") and one.node]
    except (TemplateError, RecursionError):
        return frozenset()
    return frozenset(read - own | read & {node.name for node in asked if isinstance(node, nodes.Name)})


def thinking_variables(known: frozenset[str], effort: str | None, budget: int | None) -> dict[str, Any]:
    """Return the template variables for a reasoning effort and a budget of thinking tokens.

    A template without `reasoning_effort` that has a switch is told whether to think; `none` turns the switch off.

    Raises:
        ApiError: the template, which takes the variables `known`, has none for what was asked.
    """
    variables: dict[str, Any] = {}
    if effort is not None:
        switches = {name: effort != "none" for name in SWITCHES if name in known}
        if "reasoning_effort" in known and not (effort == "none" and switches):
            variables["reasoning_effort"] = effort
        variables |= switches
        if not variables and effort != "none":
            raise _refusal("reasoning_effort", effort, ("reasoning_effort", *SWITCHES))
    if budget is not None:
        name = next((name for name in BUDGETS if name in known), None)
        if name is None:
            raise _refusal("thinking_token_budget", budget, BUDGETS)
        variables[name] = budget
    return variables


def _refusal(field: str, value: Any, names: tuple[str, ...]) -> ApiError:
    return ApiError(
        f"the field {field!r} is {value!r}, but the model's chat template has none of the variables "
        f"{', '.join(names)}: leave it out.",
        param=field,
        code="unsupported_field",
    )
