"""Converts exceptions to errors in OpenAI's form: a status and the body `{"error": {"message", "type", "param",
"code"}}`."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from ttpu_core.errors import BusyError, RequestError, TTPUError
from ttpu_serve.api.output_queue import EngineClosingError, EngineDeadError, RequestFailedError, RequestTimeoutError
from ttpu_serve.execution.errors import QueueFullError

LOG = logging.getLogger(__name__)
INVALID = "invalid_request_error"
RETRY_SECONDS = 1
_JSON_TYPE = re.compile(r"application/([\w.+-]+\+)?json\s*(;|$)", re.IGNORECASE)

_KINDS: tuple[tuple[type[TTPUError], int, str, str | None], ...] = (
    (QueueFullError, 429, "rate_limit_error", "rate_limit_exceeded"),
    (BusyError, 409, "conflict_error", "busy"),
    (RequestTimeoutError, 408, "timeout_error", "request_timeout"),
    (EngineClosingError, 503, "service_unavailable_error", "shutting_down"),
    (EngineDeadError, 503, "service_unavailable_error", "engine_dead"),
    (RequestFailedError, 500, "server_error", None),
    (RequestError, 400, INVALID, None),
    (TTPUError, 400, INVALID, None),
)
_NOT_AGAIN = {status: {"x-should-retry": "false"} for status in (408, 500)}
"""OpenAI's clients ask again after these, which would fail again in the same way and cost as much."""
_ANTHROPIC_PATHS = ("/v1/messages", "/v1/messages/count_tokens")
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_CODES = {401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


class ApiError(TTPUError):
    """A refusal with its HTTP status.

    Args:
        message: the sentence that the client reads.
        status: the HTTP status.
        kind: OpenAI's error type.
        param: the field that the error is about.
        code: OpenAI's error code.
        headers: further HTTP headers of the response.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class JSONResponse(Response):
    """A JSON response. Unpaired surrogates, which a client may have sent, are escaped instead of causing an error."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode as UTF-8; NaN and infinities are refused."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def as_api_error(error: Exception) -> ApiError:
    """Convert any exception to the error that the client sees. Bugs show only their exception type."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _of_validation(error.errors())
    if isinstance(error, ValidationError):  # of a body that was made of another API's
        return _of_validation([{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors()])
    if isinstance(error, HTTPException):
        return _of_http(error)
    for kind, status, name, code in _KINDS:
        if isinstance(error, kind):
            headers = {"Retry-After": str(RETRY_SECONDS)} if status == 429 else _NOT_AGAIN.get(status)
            message = str(error)
            param = getattr(error, "param", None) or (_param_of(message) if status == 400 else None)
            return ApiError(
                message,
                status=status,
                kind=name,
                param=param,
                code=getattr(error, "code", None) or code,
                headers=headers,
            )
    LOG.error("a request failed", exc_info=error)
    message = f"the server failed ({type(error).__name__}): its log says more."
    return ApiError(message, status=500, kind="server_error", headers=_NOT_AGAIN[500])


@contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """Name fields as another API does in errors about a chat that was made of its request.

    Args:
        names: field of a chat → what the other API calls it. A place within the field, such as `messages[2].content`,
            is left out, for requests of the other API have none such.

    Raises:
        ApiError: a refusal that is about one of these fields.
    """
    try:
        yield
    except (TTPUError, ValidationError) as error:
        told = as_api_error(error)
        given = told.body["error"]
        param, message = str(given["param"]), str(given["message"])
        ours = re.split(r"\W", param, maxsplit=1)[0]
        if ours not in names:
            raise
        theirs = names[ours]
        if isinstance(error, ValidationError) and param != ours:  # the other API's request has no such place
            param, message = theirs, message.replace(param, f"a value of {theirs}", 1)
        else:
            param = theirs + param.removeprefix(ours)
            message = re.sub(_NAMED.format(ours), lambda found: f"{found[1]}{theirs}", message, count=1)
        kind, code = str(given["type"]), given["code"]
        raise ApiError(message, status=told.status, kind=kind, param=param, code=code, headers=told.headers) from error


def respond(error: Exception, path: str = "") -> JSONResponse:
    """Return the response for any exception, in the form of the API that the request's path belongs to."""
    told = as_api_error(error)
    body = anthropic_body(told) if path.endswith(_ANTHROPIC_PATHS) else told.body
    return JSONResponse(body, told.status, told.headers)


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """Return an error's body in the form of Anthropic's API."""
    kind = _ANTHROPIC_KINDS.get(error.status, INVALID if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.body["error"]["message"]}}


def install(app: FastAPI) -> None:
    """Install handlers that give all errors of an application this form, including the framework's own."""

    async def handle(request: Request, error: Exception) -> Response:
        kind = request.headers.get("content-type", "")
        if isinstance(error, RequestValidationError) and not _JSON_TYPE.match(kind) and await request.body():
            found = f"is {kind!r}" if kind else "is missing"
            error = ApiError(
                f"the header Content-Type {found}, but bodies are JSON: send 'Content-Type: application/json'.",
                status=415,
                code="unsupported_media_type",
            )
        return respond(error, request.url.path)

    for kind in (RequestValidationError, HTTPException, TTPUError, Exception):
        app.add_exception_handler(kind, handle)


def _of_http(error: HTTPException) -> ApiError:
    status = error.status_code
    phrases = {
        400: "the body cannot be read as JSON: correct its encoding, or nest it less deep.",
        404: "there is nothing at this path: see /openapi.json for what there is.",
        405: "this path does not take this method: see /openapi.json for what it takes.",
    }
    message = phrases.get(status) or (error.detail if isinstance(error.detail, str) else HTTPStatus(status).phrase)
    kind = INVALID if status < 500 else "server_error"
    return ApiError(message, status=status, kind=kind, code=_CODES.get(status), headers=error.headers)


def _of_validation(problems: Sequence[Any]) -> ApiError:
    """Return the first of pydantic's errors as one sentence."""
    first = problems[0]
    where = first["loc"]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return ApiError(f"the body is not JSON ({reason} at character {where[-1]}): correct it.", code="invalid_json")
    param = _path(where[1:]) or None
    if first["type"] in ("unsupported_field", "unknown_field"):
        given = first["ctx"]
        param = _path((*where[1:], given["name"])) or given["name"][:80]
        message = f"the field {param!r} was given, but {given['reason']}."
        return ApiError(message, param=param, code=first["type"])
    if first["type"] == "missing":
        subject = f"the field {param!r} is missing" if param else "the body is missing"
        return ApiError(f"{subject}, but this path needs it: pass it.", param=param, code="missing_field")
    reason = re.sub(r"^(Value error|Assertion failed), | after validation, not \d+$", "", first["msg"])
    subject = f"{param} is {_short(first.get('input'))}" if param else "the body cannot be used"
    return ApiError(f"{subject}: {reason[:1].lower()}{reason[1:]}.", param=param)


def _path(parts: Sequence[Any]) -> str:
    """Return a path such as `messages[0].content`. pydantic's names of a union's types are left out."""
    text = ""
    for part in parts:
        if isinstance(part, str) and not _FIELD.fullmatch(part):
            continue
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _short(value: Any) -> str:
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError):
        return "nested too deep"
    return text if len(text) <= 60 else text[:57] + "..."


def _param_of(message: str) -> str | None:
    """Return the parameter with which a message begins, as in `top_p is 2: it must be ...`."""
    found = re.match(r"([a-z]+(?:_[a-z]+)*) (?:is|has|names|holds|forbids) ", message)
    return found[1] if found and ("_" in found[1] or found[1] in _PLAIN_NAMES) else None


_NAMED = r"^((?:[^(]*?['\"`])?){0}(?![\w-])"
"""Where a message names a field: at its start or in quotes, but not in what it tells in brackets."""
_FIELD = re.compile(r"(?!(?:str|int|float|bool|list|dict|none|tuple)$)[a-z_][A-Za-z0-9_$]*|\$\w+")
_PLAIN_NAMES = {"temperature", "n", "stop", "seed", "logprobs", "prompt", "messages", "input"}
