"""One JSON object as bytes, and JSON values in words."""

from __future__ import annotations

import json
from typing import Any

_LARGEST_REPR = 60  # characters of a refused value that an error message shows


def parse_json_object(raw: bytes) -> dict[str, Any]:
    """Parse UTF-8 `raw` as one JSON object. A key that is written twice is refused, because Python would silently
    drop the first one.

    Raises:
        ValueError: the bytes are not one JSON object. Its message completes the sentence "the file ...".
    """
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except _DuplicateKey:
        raise
    except RecursionError:
        raise ValueError("is nested too deeply to be read") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise ValueError(f"is not valid JSON ({where}: {error.msg})") from None
    except ValueError:  # an integer with thousands of digits
        raise ValueError("is not valid JSON (a number has too many digits)") from None
    if not isinstance(value, dict):
        raise ValueError(f"holds {describe(value)} where a JSON object is needed")
    return value


def describe(value: Any) -> str:
    """The value as config.json writes it, with its kind, for example: the string "4096", the number 0, null. Lists may
    hold objects that have `to_dict`."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    kinds = ((str, "string"), (int | float, "number"), (list | tuple, "list"), (dict, "object"))
    kind = next((noun for types, noun in kinds if isinstance(value, types)), None)
    if kind is None:
        return f"a {type(value).__module__}.{type(value).__qualname__}"
    return f"the {kind} {_short(value)}"


class _DuplicateKey(ValueError):
    pass


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _DuplicateKey(f"writes the key {_short(twice)} twice in one object")
    return values


def _short(value: Any) -> str:
    text = json.dumps(value, default=lambda inner: inner.to_dict())
    return text if len(text) <= _LARGEST_REPR else text[: _LARGEST_REPR - 3] + "..."
