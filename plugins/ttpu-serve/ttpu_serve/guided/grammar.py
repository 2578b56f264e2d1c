"""Converts a request's `GuidedDecoding` into llguidance's grammar text, or refuses it with a sentence that names the
problem."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from ttpu_core.errors import RequestError
from ttpu_core.generation.sampling_params import GuidedDecoding
from ttpu_serve.guided.grammar_size import MOST_BYTES, oversized_grammar, oversized_schema

# llguidance would otherwise allow, where the text is forced, only the tokens that the tokenizer itself would choose.
# Every token that keeps to the grammar is allowed here, so that a mask depends on the text so far and nothing else.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
# A model that likes none of the words that may follow spends its tokens on blanks where there may be many; a schema's
# own x-guidance wins.
_BLANKS = {"whitespace_pattern": " "}
_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)  # as llama.cpp and xgrammar write grammars
_UNUSUAL = re.compile(r"[^0-9A-Za-z ]")  # letters that may mean something in a regular expression
_ATTRIBUTE = re.compile(r"^\s*[\w-]+\s*\[[^\]\n]*\b(temperature|stop)\s*=", re.MULTILINE)


def kind_of(guided: GuidedDecoding) -> str:
    """Return which of json, regex, choice and grammar is set."""
    return next(name for name in ("json", "regex", "choice", "grammar") if getattr(guided, name) not in (None, False))


@dataclass(frozen=True)
class WrittenGuide(GuidedDecoding):
    """A guide whose schema is a text. Writing a large one takes a millisecond, in which no other thread runs, so that
    it is done once for each request.

    Attributes:
        length: bytes of the text that determines the grammar: equal guides have equal texts.
        key: a short key of that text.
    """

    length: int = 0
    key: bytes = b""


def written(guided: GuidedDecoding) -> WrittenGuide:
    """Return a guide with the length of its text and its key.

    Raises:
        RequestError: the schema is not JSON, is nested too deeply or is too long.
    """
    if isinstance(guided, WrittenGuide):
        return guided
    kind = kind_of(guided)
    try:
        text = json.dumps(_schema(guided) if kind == "json" else getattr(guided, kind))
    except RequestError:
        raise
    except (TypeError, ValueError) as error:
        raise refusal(guided, f"it is not JSON: {error}") from error
    except RecursionError as error:
        raise refusal(guided, "it is nested too deeply") from error
    content = f"{kind} {text}" if guided.prelude is None else f"{kind} {text} {guided.prelude}"
    encoded = content.encode("utf-8", "surrogatepass")
    if len(encoded) > MOST_BYTES:
        raise refusal(guided, f"it has {len(encoded):,} bytes, and {MOST_BYTES:,} are allowed")
    key = hashlib.blake2b(encoded, digest_size=16).digest()
    schema = text if kind == "json" else None
    return WrittenGuide(schema, guided.regex, guided.choice, guided.grammar, guided.prelude, len(encoded), key)


def key_of(guided: GuidedDecoding) -> bytes:
    """Return a short key of what determines the grammar.

    Raises:
        RequestError: the schema is not JSON, is nested too deeply or is too long.
    """
    return written(guided).key


def grammar_of(guided: GuidedDecoding) -> str:
    """Return a grammar for llguidance whose start rule matches the whole output. llguidance has not checked it yet.

    Raises:
        RequestError: a schema or grammar is not valid JSON where JSON is needed, is too large, or uses attributes that
            would be ignored.
    """
    kind = kind_of(guided)
    if kind == "grammar":
        return _grammar(guided.grammar or "")
    if kind == "json":
        text = _lark_of_schema(guided, _schema(guided))
    elif kind == "regex":
        text = _lark_of_regex(guided, guided.regex or "")
    else:
        text = _lark_of_regex(guided, "|".join(map(_literal, guided.choice or ())))
    return text if guided.prelude is None else f"{guided.prelude}\nanswer:{text.removeprefix('start:')}"


def refusal(guided: GuidedDecoding, reason: str) -> RequestError:
    """Return the error for a grammar that llguidance refuses for `reason`."""
    kind = kind_of(guided)
    subject = {"json": "JSON schema", "regex": "regular expression", "choice": "choice", "grammar": "grammar"}[kind]
    advice = {
        "json": "correct it, or use only what llguidance's JSON schema supports",
        "regex": "correct it, or use only what Rust's regex crate supports",
        "choice": "correct it",
        "grammar": "correct it, or see llguidance's Lark syntax",
    }[kind]
    return RequestError(f"guided decoding cannot follow this {subject} ({summary(reason)}): {advice}.")


def summary(message: str) -> str:
    """Return the first sentence of llguidance's report, which may be long, as one line."""
    lines = message.split("<state>")[0].splitlines()
    nested = [line.strip() for line in lines if line.startswith("error: ")]  # of the regex crate, below a picture
    first = next((line.strip() for line in lines if line.strip()), "no reason given")
    place = re.match(r"(at )?(\d+\(\d+\)): ", first)
    text = nested[-1].removeprefix("error: ") if nested else first[place.end() :] if place else first
    text = text.removeprefix("failed to compile JSON schema: ").rstrip(".:")
    return text if len(text) <= 200 else text[:200] + "…"


def _schema(guided: GuidedDecoding) -> Any:
    schema: Any = guided.json
    if schema is True:
        return {"type": "object"}
    if isinstance(schema, str):
        if len(schema) > 2 * MOST_BYTES:  # blanks may be left out of it
            raise refusal(guided, f"it has {len(schema):,} characters, and {MOST_BYTES:,} bytes are allowed")
        schema = json.loads(schema)
    if not isinstance(schema, dict | bool):
        schema = dict(schema) if hasattr(schema, "keys") else schema
    if not isinstance(schema, dict | bool):
        raise refusal(guided, f"it is a {type(schema).__name__}, not an object")
    return schema


def _check(guided: GuidedDecoding, oversized: str | None) -> None:
    if oversized is not None:
        raise refusal(guided, oversized)


def _lark_of_schema(guided: GuidedDecoding, schema: Any) -> str:
    _check(guided, oversized_schema(schema))
    if isinstance(schema, dict):
        own = schema.get("x-guidance", {})
        if isinstance(own, dict) and "whitespace_flexible" not in own:
            schema = {**schema, "x-guidance": {**_BLANKS, **own}}
    return f"start: %json {json.dumps(schema)}{_OPTIONS}"


def _lark_of_regex(guided: GuidedDecoding, regex: str) -> str:
    from llguidance import regex_to_lark

    if (len(regex) - len(regex.rstrip("\\"))) % 2:  # which llguidance would drop
        raise refusal(guided, "it ends in a backslash that escapes nothing")
    # `//` would begin a comment
    return f"start: /{regex_to_lark(regex) or '()'}/{_OPTIONS}"


def _literal(text: str) -> str:
    return _UNUSUAL.sub(lambda found: rf"\x{{{ord(found[0]):x}}}", text)


def _grammar(text: str) -> str:
    if text.lstrip().startswith("{"):
        return _grammar_list(text)
    _check(GuidedDecoding(grammar=text), oversized_grammar(text))
    if _GBNF.search(text):
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            text = any_to_lark(text)
        except Exception as error:  # a hand-written parser, which raises all kinds
            raise refusal(GuidedDecoding(grammar=text), f"it cannot be read as GBNF: {error}") from error
    ignored = _ATTRIBUTE.search(text)
    if ignored is not None:
        raise refusal(
            GuidedDecoding(grammar=text), f"{ignored[1]}= needs an engine that changes what it has sampled, or how"
        )
    return text + _OPTIONS


def _grammar_list(text: str) -> str:
    """Convert llguidance's own form, {"grammars": [{"lark_grammar": …} or {"json_schema": …}, …]}."""
    guided = GuidedDecoding(grammar=text)
    try:
        grammars = json.loads(text)
        first = grammars["grammars"][0]
    except (ValueError, RecursionError) as error:
        raise refusal(guided, f"it is not JSON: {error}") from error
    except (KeyError, IndexError, TypeError) as error:
        raise refusal(guided, 'it starts with a brace, but is no {"grammars": […]}') from error
    if first.get("lark_grammar"):
        first["lark_grammar"] = _grammar(first["lark_grammar"])
    elif "json_schema" in first:
        first["lark_grammar"] = _lark_of_schema(guided, first.pop("json_schema"))
    return json.dumps(grammars)
