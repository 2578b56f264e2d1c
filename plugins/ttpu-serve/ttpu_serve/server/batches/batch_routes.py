"""/v1/batches: makes, lists, shows and cancels batches."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from ttpu_serve.server.batches.listing import paged
from ttpu_serve.server.batches.manager import Batches
from ttpu_serve.server.batches.protocol import BatchRequest
from ttpu_serve.server.body import UniqueKeys
from ttpu_serve.server.client_key import owner_of
from ttpu_serve.server.errors import JSONResponse

MOST_LISTED, LISTED = 100, 20


def router(batches: Batches) -> APIRouter:
    """Return the endpoints' routes."""
    routes = APIRouter(tags=["OpenAI"], route_class=UniqueKeys)

    @routes.post("/v1/batches")
    async def create(body: BatchRequest, request: Request) -> Response:
        """Have the requests of an uploaded file answered within a day, behind those whose clients wait."""
        return JSONResponse((await batches.create(body, owner_of(request))).as_json())

    @routes.get("/v1/batches")
    async def list_batches(
        request: Request, after: str | None = None, limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = LISTED
    ) -> Response:
        """List your batches, the newest first."""
        return JSONResponse(paged(batches.list(owner_of(request)), after, limit))

    @routes.get("/v1/batches/{batch_id}")
    async def retrieve(batch_id: str, request: Request) -> Response:
        """Tell how far a batch is."""
        return JSONResponse(batches.get(batch_id, owner_of(request)).as_json())

    @routes.post("/v1/batches/{batch_id}/cancel")
    async def cancel(batch_id: str, request: Request) -> Response:
        """Cancel a batch. It keeps the answers that it has."""
        return JSONResponse(batches.cancel(batch_id, owner_of(request)).as_json())

    return routes
