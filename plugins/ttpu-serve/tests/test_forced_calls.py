"""Guides of responses that must call a tool."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ttpu_serve.guided.matchers import InlineMatchers, Vocabulary
from ttpu_serve.server.chat_protocol import Tool
from ttpu_serve.server.errors import ApiError
from ttpu_serve.server.forced_calls import forced_arguments, forced_calls

TREE = {
    "type": "object", "properties": {"a": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["a"], "additionalProperties": False,
}  # fmt: skip


def test_a_tool_without_parameters_is_called_without_arguments() -> None:
    tool = Tool.model_validate({"type": "function", "function": {"name": "clock"}})
    schema: Any = forced_arguments(tool).json
    assert schema == {"type": "object", "additionalProperties": False}


@pytest.mark.parametrize(
    ("parameters", "valid", "invalid"),
    [
        ({"properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": "integer"}}}, {"x": 1}, {"x": "1"}),
        (TREE, {"a": 1, "kids": [{"a": 2}]}, {"a": 1, "kids": [{"name": "f", "parameters": {"a": 1}}]}),
        ({"properties": {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}}}, {"b": 1}, {"b": "1"}),
        ({"properties": {"a": {"const": {"$ref": "#/$defs/X"}}}}, {"a": {"$ref": "#/$defs/X"}}, {"a": {"$ref": "X"}}),
    ],
    ids=["definitions", "itself", "a property", "a constant"],
)
def test_forced_calls_keep_what_a_tools_references_mean(parameters: Any, valid: Any, invalid: Any) -> None:
    """Beside another tool with a definition of the same name."""
    pytest.importorskip("llguidance")
    other = {"properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": "string"}}}
    tools = [
        Tool.model_validate({"type": "function", "function": {"name": name, "parameters": each}})
        for name, each in (("other", other), ("f", parameters))
    ]
    start = InlineMatchers(Vocabulary([bytes([value]) for value in range(256)] + [b""] * 32, [], [256])).start(
        forced_calls(tools, most=2)
    )
    for arguments, matches in ((valid, True), (invalid, False)):
        matcher = start.deep_copy()
        text = json.dumps([{"name": "f", "parameters": arguments}]).encode()
        assert (matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()) == matches


def test_tools_whose_schemas_have_the_same_id_are_refused() -> None:
    """For references in one could lead into the other."""

    def tool(name: str, **more: Any) -> Tool:
        return Tool.model_validate(
            {"type": "function", "function": {"name": name, "parameters": {"type": "object", **more}}}
        )

    url = "https://example.com/schema.json"
    for tools in (
        [tool("f", **{"$id": url}), tool("g", **{"$id": url + "#"})],
        [tool("f", **{"$id": "tool:1"}), tool("g")],
    ):
        with pytest.raises(ApiError, match=r"the tools 'f' and 'g' have the same \$id"):
            forced_calls(tools, most=None)
    forced_calls([tool("f", **{"$id": url}), tool("g")], most=None)
