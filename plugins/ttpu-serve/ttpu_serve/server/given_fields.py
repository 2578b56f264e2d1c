"""What happens to fields of a request's body that this server does not know: they are refused, or accepted and named in
the header `X-TTPU-Warning` of the response."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from difflib import get_close_matches
from urllib.parse import quote

WARNING_HEADER = "X-TTPU-Warning"
MAX_UNKNOWN = 64
"""Different names of one request: each is compared with all known names."""
SHOWN = 8
SIMILAR = 0.85
"""From which ratio of `difflib` on an unknown name counts as a known one that was misspelt."""


@dataclass
class GivenFields:
    """The unknown fields of one request. strict: each of them is refused. ignored: their paths, each once."""

    strict: bool = True
    ignored: dict[str, None] = field(default_factory=dict)

    def refusal_of(self, name: str, place: str, known: Iterable[str]) -> str | None:
        """Return why a field that is not known must be refused, or None if it was noted as ignored.

        Args:
            name: the field's name.
            place: the path of the object that has it; "" is the body.
            known: the names that this object may have.
        """
        if self.strict:
            return "this server does not know it: leave it out, or correct its name"
        path = f"{place}.{name}" if place else name
        if path in self.ignored:
            return None
        if len(self.ignored) >= MAX_UNKNOWN:
            return f"this server does not know it, nor {MAX_UNKNOWN} other fields of the request: leave them out"
        spelt = {_letters(one): one for one in known}
        if similar := get_close_matches(_letters(name[:64]), spelt, 1, SIMILAR):
            return f"this server does not know it, only {spelt[similar[0]]!r}: correct its name, or leave it out"
        self.ignored[path] = None
        return None

    @property
    def warning(self) -> str | None:
        """The sentence of the header, in visible ASCII; None if nothing was ignored."""
        if not self.ignored:
            return None
        names = [_printable(path) for path in list(self.ignored)[:SHOWN]]
        more = len(self.ignored) - len(names)
        rest = f" and {more} more" if more else ""
        return f"fields without effect on this server were ignored: {', '.join(names)}{rest}"


def _printable(path: str) -> str:
    """Return a path as headers may have it: other letters as URLs write them, and quotes where nothing is left."""
    return quote(path[:80], safe="._-[]", errors="replace") or "''"


def _letters(name: str) -> str:
    """Return a name as topP, top-p and top_p are one."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


GIVEN_FIELDS: ContextVar[GivenFields | None] = ContextVar("GIVEN_FIELDS", default=None)
"""Of the running request; None refuses every unknown field."""


def given_fields() -> GivenFields:
    """Return the unknown fields of the running request, to which more may be added."""
    return GIVEN_FIELDS.get() or GivenFields()
