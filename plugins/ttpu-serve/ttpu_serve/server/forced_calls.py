"""Guides for responses that must call a tool, made from the tools' schemas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ttpu_core.generation.sampling_params import GuidedDecoding
from ttpu_serve.server.chat_protocol import Tool
from ttpu_serve.server.errors import ApiError


def forced_calls(tools: Sequence[Tool], *, most: int | None) -> GuidedDecoding:
    """Return the guide of a list of 1 to `most` calls (None: unlimited) of any of the tools.

    Raises:
        ApiError: schemas of two tools have the same `$id`, so that references to it could mean either.
    """
    _check_ids(tools)
    one_of = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                # With an id of its own, a schema's references lead to where they led before.
                "parameters": {"$id": f"tool:{number}", **_schema(tool)},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for number, tool in enumerate(tools)
    ]
    items = one_of[0] if len(one_of) == 1 else {"anyOf": one_of}
    root: dict[str, Any] = {"type": "array", "minItems": 1, "items": items}
    if most is not None:
        root["maxItems"] = most
    return GuidedDecoding(json=root)


def forced_arguments(tool: Tool) -> GuidedDecoding:
    """Return the guide of the arguments of one required tool."""
    return GuidedDecoding(json=_schema(tool))


def _check_ids(tools: Sequence[Tool]) -> None:
    owners: dict[str, str] = {}
    for number, tool in enumerate(tools):
        chosen = str(_schema(tool).get("$id", f"tool:{number}")).rstrip("#")
        if chosen in owners:
            raise ApiError(
                f"the schemas of the tools {owners[chosen]!r} and {tool.function.name!r} have the same $id "
                f"{chosen[:100]!r}, so that their references could mean either: give each its own, or leave it out.",
                param="tools",
            )
        owners[chosen] = tool.function.name


def _schema(tool: Tool) -> dict[str, Any]:
    parameters = dict(tool.function.parameters or {})
    return {"type": "object", **parameters} if parameters else {"type": "object", "additionalProperties": False}
