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
        ApiError: a tool's definitions are not an object.
    """
    definitions: dict[str, Any] = {}
    one_of = []
    for number, tool in enumerate(tools):
        schema = _renamed(_schema(tool), f"{number}.")
        for key in _DEFINITIONS:
            defined = schema.pop(key, {})
            if not isinstance(defined, dict):
                raise ApiError(
                    f"the parameters of the tool {tool.function.name!r} have {key!r} that is no object: correct it.",
                    param=f"tools[{number}].function.parameters",
                )
            definitions |= {f"{number}.{name}": value for name, value in defined.items()}
        one_of.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "parameters": schema},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    items = one_of[0] if len(one_of) == 1 else {"anyOf": one_of}
    root: dict[str, Any] = {"type": "array", "minItems": 1, "items": items}
    if most is not None:
        root["maxItems"] = most
    if definitions:
        root["$defs"] = definitions
    return GuidedDecoding(json=root)


def forced_arguments(tool: Tool) -> GuidedDecoding:
    """Return the guide of the arguments of one required tool."""
    return GuidedDecoding(json=_schema(tool))


_DEFINITIONS = ("$defs", "definitions")


def _schema(tool: Tool) -> dict[str, Any]:
    parameters = dict(tool.function.parameters or {})
    return {"type": "object", **parameters} if parameters else {"type": "object", "additionalProperties": False}


def _renamed(schema: Any, prefix: str) -> Any:
    """Return a schema whose references to definitions have a prefix, because the definitions move to the root of a
    larger schema."""
    if isinstance(schema, list):
        return [_renamed(one, prefix) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _renamed(value, prefix) for key, value in schema.items()}
    reference = schema.get("$ref")
    for key in _DEFINITIONS:
        if isinstance(reference, str) and reference.startswith(f"#/{key}/"):
            moved["$ref"] = f"#/$defs/{prefix}{reference.removeprefix(f'#/{key}/')}"
    return moved
