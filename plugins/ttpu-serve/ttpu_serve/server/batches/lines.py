"""The lines of a batch's file: each is a JSON object with `custom_id`, `method`, `url` and the `body` of a request."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import IO, Any

from ttpu_serve.server.body import parsed
from ttpu_serve.server.errors import ApiError

FIELDS = ("custom_id", "method", "url", "body")
MOST_ID = 512
"""Characters of a `custom_id`."""
MOST_PROBLEMS = 20
"""That are told of one file."""
TURN_SECONDS = 0.1
"""For which lines are checked at once."""


@dataclass(frozen=True)
class Line:
    """One request. number: of the line in its file, from 1. size: bytes of the line."""

    number: int
    size: int
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True)
class RawLine:
    """A line as it stands in the file."""

    number: int
    content: bytes


class LineReader:
    """Reads the lines of a file that are not blank, one after another.

    number: of the line that was read last, from 1.
    """

    def __init__(self, file: IO[bytes], most_bytes: int) -> None:
        self._file, self._most = file, most_bytes
        self.number = 0

    def next(self) -> RawLine | None:
        """Return the next line, or None at the end.

        Raises:
            ApiError: it has too many bytes.
        """
        while content := self._file.readline(self._most + 1):
            self.number += 1
            if len(content) > self._most:
                raise ApiError(
                    f"the line has more than {self._most:,} bytes, which is as many as a request may have: send less.",
                    code="line_too_long",
                )
            if not content.isspace() and content:
                return RawLine(self.number, content)
        return None

    def rewind(self) -> None:
        """Begin again."""
        self._file.seek(0)
        self.number = 0


def read_line(raw: RawLine, urls: Collection[str], most_values: int) -> Line:
    """Return a line's request. Its body is not checked.

    Args:
        raw: the line.
        urls: the endpoints that it may name.
        most_values: the most values that it may have.

    Raises:
        ApiError: it is no request for one of these.
    """
    try:
        raw.content.decode()
        value = parsed(raw.content, most_values)
    except UnicodeDecodeError as error:
        message = f"the line is not UTF-8 (byte {error.start + 1}): write the file in UTF-8."
        raise ApiError(message, code="invalid_json_line") from error
    except ValueError as error:
        raise ApiError(f"the line is not JSON ({error}): correct it.", code="invalid_json_line") from error
    if not isinstance(value, dict):
        message = "the line is not a JSON object: write custom_id, method, url and body into one."
        raise ApiError(message, code="invalid_json_line")
    if unknown := next((name for name in value if name not in FIELDS), None):
        message = f"the line has the field {unknown[:40]!r}, but may have {', '.join(FIELDS)}: leave it out."
        raise ApiError(message, param=unknown[:40], code="unknown_field")
    for name, kind in zip(FIELDS, (str, str, str, dict), strict=True):
        if not isinstance(value.get(name), kind):
            what = "text" if kind is str else "an object"
            state = "missing" if value.get(name) is None else f"not {what}"
            code = "missing_required_parameter" if state == "missing" else "invalid_type"
            raise ApiError(f"the field {name!r} of the line is {state}: pass {what}.", param=name, code=code)
    if not 0 < len(value["custom_id"]) <= MOST_ID:
        length = len(value["custom_id"])
        message = f"custom_id has {length:,} characters, but 1 to {MOST_ID} are allowed: choose another."
        raise ApiError(message, param="custom_id", code="invalid_custom_id")
    if value["method"] != "POST":
        message = f"method is {value['method'][:20]!r}, but requests of batches are POST: write that."
        raise ApiError(message, param="method", code="invalid_method")
    if value["url"] not in urls:
        message = f"url is {value['url'][:80]!r}, but this batch asks {' or '.join(urls)}: write that."
        raise ApiError(message, param="url", code="mismatched_url")
    return Line(raw.number, len(raw.content), value["custom_id"], value["url"], value["body"])


class LineCheck:
    """Checks a file's lines, apart from their bodies, some at a time.

    count: lines so far. problems: what is wrong, as OpenAI's batches tell it; the file is read no further when there
    are `MOST_PROBLEMS`.
    """

    def __init__(
        self,
        reader: LineReader,
        urls: Collection[str],
        *,
        most_values: int,
        most_lines: int | None,
        on_line: Callable[[Line], None] = lambda line: None,
    ) -> None:
        """
        Args:
            reader: of the file.
            urls: the endpoints that lines may name.
            most_values: the most values of a line.
            most_lines: of the file; None is any number.
            on_line: called with each line that is right.
        """
        self._reader, self._urls, self._most_values, self._most_lines = reader, urls, most_values, most_lines
        self._on_line = on_line
        self._seen: set[bytes] = set()
        self.count = 0
        self.problems: list[dict[str, Any]] = []

    def some(self) -> bool:
        """Check lines for a while; return whether more are left."""
        until = time.monotonic() + TURN_SECONDS
        while time.monotonic() < until:
            try:
                raw = self._reader.next()
            except ApiError as error:  # what follows cannot be told apart from its rest
                self._note(error)
                return False
            if raw is None:
                if not self.count and not self.problems:
                    self._note(ApiError("the file has no lines: write one request or more into it.", code="empty_file"))
                return False
            self._check(raw)
            if len(self.problems) >= MOST_PROBLEMS or self.count == self._most_lines:
                return self._too_many()
        return True

    def _check(self, raw: RawLine) -> None:
        try:
            line = read_line(raw, self._urls, self._most_values)
            digest = digest_of(line.custom_id)
            if digest in self._seen:
                raise ApiError(
                    f"the custom_id {line.custom_id[:80]!r} is that of an earlier line: choose another.",
                    param="custom_id",
                    code="duplicate_custom_id",
                )
            self._seen.add(digest)
            self.count += 1
            self._on_line(line)
        except ApiError as error:
            self._note(error)

    def _too_many(self) -> bool:
        """Whether to go on, when there are as many lines as may be, or as many problems as are told."""
        if self.count != self._most_lines or len(self.problems) >= MOST_PROBLEMS:
            return False
        try:
            if self._reader.next() is None:
                return False
        except ApiError:
            pass
        self._note(
            ApiError(
                f"the file has more than {self._most_lines:,} lines, which is as many as one may have: make several.",
                code="too_many_lines",
            )
        )
        return False

    def _note(self, error: ApiError) -> None:
        told = error.body["error"]
        line = self._reader.number or None
        self.problems.append({"code": told["code"], "line": line, "message": told["message"], "param": told["param"]})


def digest_of(custom_id: str) -> bytes:
    """Return a short stand-in for an id, as many are kept."""
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
