"""What a schema or grammar may hold, found without compiling it: llguidance recurses along references and rules, so
that long chains of them end its process."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

MOST_BYTES = 256 * 1024
"""Of a schema or another grammar."""
MOST_DEFINITIONS = 5000
"""Of a schema. Published ones of whole APIs have a thousand or two."""
MOST_RULES = 3000
"""Rules and terminals of a grammar; that of a large programming language has several hundred."""
MOST_CHAIN = 256
"""Definitions, rules or terminals of which each leads to the next. Of short ones, about 450 fill a stack of 4 MiB."""
_DEFINITIONS = ("$defs", "definitions")
_VALUES = ("const", "enum", "default", "examples")  # hold values, in which `$ref` is a text as any
# What has no end goes to the end of its line, or of all: a search that began again behind it would take hours.
_SIGNS = re.compile(
    r'"(?:[^"\\\n]|\\.)*+"?i?|/(?![/*])(?:[^/\\\n]|\\.)*+/?[imslux]*+|(?://|#)[^\n]*+|/\*.*?(?:\*/|\Z)', re.DOTALL
)
_RULE = re.compile(r"^[ \t]*[?!]?(\w[\w-]*+)(?:\.-?\d+)?\s*+(?:\[[^\]\n]*+\]|\{[^}\n]*+\})?\s*+(?:::=|:)", re.MULTILINE)
_NAME = re.compile(r"(?<![%@\w])[A-Za-z_][\w-]*+")


def oversized_schema(schema: Any) -> str | None:
    """Return why a JSON schema is too large, as a clause; None if it is not."""
    walked: set[int] = set()  # objects and arrays, each of which is looked at once, however many references lead to it

    def follows(pointer: str) -> Iterator[str]:
        return _references(_at(schema, pointer), walked)

    chain = _too_long(follows, "#", MOST_CHAIN + 1, "definitions")  # and the schema itself
    if chain is not None:
        return chain
    count = sum(len(value) for value in _definitions(schema))
    return f"it has {count:,} definitions, and {MOST_DEFINITIONS:,} are allowed" if count > MOST_DEFINITIONS else None


def oversized_grammar(text: str) -> str | None:
    """Return why a Lark or GBNF grammar is too large, as a clause; None if it is not."""
    plain = _SIGNS.sub(" ", text)
    heads = list(_RULE.finditer(plain))
    if len(heads) > MOST_RULES:
        return f"it has {len(heads):,} rules and terminals, and {MOST_RULES:,} are allowed"
    ends = [head.start() for head in heads[1:]] + [len(plain)]
    bodies = {head[1]: plain[head.end() : end] for head, end in zip(heads, ends, strict=False)}

    def follows(name: str) -> Iterator[str]:
        return (found[0] for found in _NAME.finditer(bodies.get(name, "")) if found[0] in bodies)

    start = "root" if "start" not in bodies else "start"
    return _too_long(follows, start, MOST_CHAIN, "rules and terminals")


def _too_long(follows: Callable[[str], Iterator[str]], start: str, most: int, what: str) -> str | None:
    """Whether a search in depth, as a compiler's recursion, goes deeper than `most`."""
    seen, path = {start}, [follows(start)]
    while path:
        following = next(path[-1], None)
        if following is None:
            path.pop()
        elif following not in seen:
            seen.add(following)
            path.append(follows(following))
            if len(path) > most:
                return f"it has a chain of more than {MOST_CHAIN} {what}, of which each leads to the next"
    return None


def _parts(value: Any) -> Iterator[Any]:
    """Yield an object's or array's own values, but not those that are no schemas."""
    if isinstance(value, Mapping):
        yield from (item for name, item in value.items() if name not in _VALUES)
    elif isinstance(value, list | tuple):
        yield from value


def _definitions(schema: Any) -> Iterator[Mapping[str, Any]]:
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            yield from (value[name] for name in _DEFINITIONS if isinstance(value.get(name), Mapping))
        waiting += _parts(value)


def _references(value: Any, walked: set[int]) -> Iterator[str]:
    """Yield the local references in a schema, but not those in its definitions, nor in what was walked before."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if not isinstance(found, Mapping | list) or id(found) in walked:
            continue
        walked.add(id(found))
        if isinstance(found, Mapping):
            target = found.get("$ref")
            if isinstance(target, str) and target.startswith("#"):
                yield target
            found = {name: item for name, item in found.items() if name not in _DEFINITIONS}
        waiting += _parts(found)


def _at(schema: Any, pointer: str) -> Any:
    """Return what a local reference leads to; None if it leads nowhere."""
    found = schema
    for part in unquote(pointer[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdigit() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found
