"""/v1/files: uploads, lists, shows and deletes the files of batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import IO, Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from starlette.types import Receive, Scope, Send

from ttpu_core.errors import TTPUError
from ttpu_serve.server.batches.file_store import EXPIRY, FileStore, StoredFile
from ttpu_serve.server.batches.listing import paged
from ttpu_serve.server.batches.upload import Upload
from ttpu_serve.server.client_key import owner_of
from ttpu_serve.server.errors import ApiError, JSONResponse
from ttpu_serve.server.given_fields import given_fields
from ttpu_serve.server.service import Service

MOST_LISTED = 10_000
SENT = 2**18
"""Bytes of a file that are read and sent at once."""
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS = ("purpose", "file", _ANCHOR, _SECONDS)
_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary", "description": "Requests, one a line (JSONL)."},
                        "purpose": {"type": "string", "enum": ["batch"]},
                        _ANCHOR: {"type": "string", "enum": ["created_at"]},
                        _SECONDS: {"type": "integer", "minimum": EXPIRY[0], "maximum": EXPIRY[1]},
                    },
                }
            }
        },
    }
}


class FileResponse(Response):
    """Sends a file piece by piece, and leaves a client that does not read.

    Args:
        file: open for reading; it is closed at the end.
        stored: its description.
        write_timeout: seconds in which the client must read a piece; None is any number.
    """

    media_type = "application/jsonl"

    def __init__(self, file: IO[bytes], stored: StoredFile, write_timeout: float | None) -> None:
        headers = {
            "content-length": str(stored.bytes),
            "content-disposition": f'attachment; filename="{stored.id}.jsonl"',
            "x-content-type-options": "nosniff",
        }
        super().__init__(headers=headers)
        self._file, self._write_timeout = file, write_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file."""
        with self._file:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while piece := await asyncio.to_thread(self._file.read, SENT):
                try:
                    async with asyncio.timeout(self._write_timeout):
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                except TimeoutError:
                    return
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def router(service: Service, store: FileStore) -> APIRouter:
    """Return the endpoints' routes."""
    routes = APIRouter(tags=["OpenAI"])

    @routes.post("/v1/files", openapi_extra=_FORM)
    async def upload(request: Request) -> Response:
        """Store a file of requests for a batch, with `purpose` "batch"."""
        body, form = request.stream(), None
        try:
            service.engine.check_accepting()
            most = service.settings.max_file_bytes
            form = Upload(request.headers.get("content-type", ""), store, owner_of(request), most)
            await form.read(body)
            stored = await asyncio.to_thread(_finished, form)
        except TTPUError:
            await _read_on(body)
            raise
        finally:
            if form is not None and form.file is not None:
                form.file.discard()
        return JSONResponse(stored.as_json())

    @routes.get("/v1/files")
    async def list_files(
        request: Request,
        purpose: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = MOST_LISTED,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """List your files, the newest first."""
        files = [file for file in store.list(owner_of(request)) if purpose in (None, file.purpose)]
        return JSONResponse(paged(files if order == "asc" else files[::-1], after, limit))

    @routes.get("/v1/files/{file_id}")
    async def retrieve(file_id: str, request: Request) -> Response:
        """Describe a file."""
        return JSONResponse(store.get(file_id, owner_of(request)).as_json())

    @routes.get("/v1/files/{file_id}/content")
    async def content(file_id: str, request: Request) -> Response:
        """Return what a file holds."""
        stored = store.get(file_id, owner_of(request))
        return FileResponse(store.open(stored), stored, service.settings.write_timeout)

    @routes.delete("/v1/files/{file_id}")
    async def delete(file_id: str, request: Request) -> Response:
        """Delete a file. A batch that reads it goes on."""
        store.delete(file_id, owner_of(request))
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    return routes


def _finished(form: Upload) -> StoredFile:
    """Return the file of a form that was read.

    Raises:
        ApiError: a field is missing or wrong.
    """
    for name in form.fields:
        if name not in _FIELDS and (why := given_fields().refusal_of(name, "", _FIELDS)) is not None:
            raise ApiError(f"the field {name[:80]!r} was given, but {why}.", param=name[:80], code="unknown_field")
    if form.file is None:
        raise _missing("file")
    if "purpose" not in form.fields:
        raise _missing("purpose")
    if (purpose := form.fields["purpose"]) != "batch":
        raise ApiError(
            f"purpose is {purpose[:40]!r}, but this server keeps files for batches alone: pass 'batch'.",
            param="purpose",
            code="unsupported_field",
        )
    if not form.file.size:
        raise ApiError("the file is empty, but a batch has one request or more: send some.", param="file")
    return form.file.finish(form.filename, "batch", _expiry(form.fields))


def _expiry(fields: dict[str, str]) -> int | None:
    """Return the seconds after which a file expires."""
    anchor, seconds = fields.get(_ANCHOR), fields.get(_SECONDS)
    if anchor is None and seconds is None:
        return None
    low, high = EXPIRY
    if anchor != "created_at" or seconds is None or not seconds.isdecimal() or not low <= int(seconds) <= high:
        raise ApiError(
            f"expires_after is {anchor!r} and {(seconds or '')[:20]!r}, but the anchor is 'created_at', and seconds "
            f"are {low:,} to {high:,}: correct it.",
            param="expires_after",
        )
    return int(seconds)


def _missing(name: str) -> ApiError:
    message = f"the field {name!r} is missing, but this path needs it: pass it."
    return ApiError(message, param=name, code="missing_field")


async def _read_on(body: AsyncIterator[bytes]) -> None:
    """Read the rest of a body that is refused, for a client that still sends reads no response."""
    with suppress(ApiError):
        async for _ in body:
            pass
