"""Makes the FastAPI application of an engine, which is running or starts with the server. Any ASGI server can run
it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from pydantic import BaseModel

from ttpu_serve.api.async_engine import AsyncEngine
from ttpu_serve.server import chat, completions, endpoints, errors, messages, openai_responses, page, scoring
from ttpu_serve.server.batches import batch_routes, file_routes
from ttpu_serve.server.batches.file_store import FileStore
from ttpu_serve.server.batches.manager import Batches
from ttpu_serve.server.events import ClientGoneError
from ttpu_serve.server.middleware import RequestMiddleware
from ttpu_serve.server.service import Service
from ttpu_serve.server.settings import ServerSettings
from ttpu_serve.server.traces import Tracer


class ErrorDetail(BaseModel):
    """The reason for a refusal; `param` names a field of the body."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorDetail


def create_app(
    engine: AsyncEngine, settings: ServerSettings | None = None, tracer: Tracer | None = None
) -> FastAPI:
    """Make an application that serves `engine`, and tells `tracer` of each request. When it shuts down, it drains and
    closes the engine.

    Raises:
        RequestError: the settings contradict the model.
    """
    settings = settings or ServerSettings()
    service = Service(engine, settings, tracer)
    store = FileStore(settings.files_dir, settings.max_files_bytes, settings.max_files)
    batches = Batches(service, store)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if not engine.alive:
            engine.start()
        try:
            yield
        finally:
            await engine.shutdown(settings.drain_timeout)
            await batches.close()
            service.close()
            store.close()

    app = FastAPI(
        title="TTPU",
        version=version("ttpu-serve"),
        description="An OpenAI-compatible server of one model.",
        lifespan=lifespan,
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}},
    )
    app.state.service, app.state.files = service, store
    errors.install(app)

    async def left(_: Request, __: Exception) -> Response:
        return Response(status_code=499)

    app.add_exception_handler(ClientGoneError, left)
    routers = (
        *(chat.router, completions.router, messages.router, openai_responses.router, scoring.router),
        *(endpoints.embeddings, endpoints.models, endpoints.tokens),
    )
    for router in routers:
        app.include_router(router(service))
    if settings.batches:
        app.include_router(file_routes.router(service, store))
        app.include_router(batch_routes.router(batches))
    app.include_router(endpoints.watching(service))
    if settings.enable_admin:
        app.include_router(endpoints.admin(service))
    if settings.page:
        app.include_router(page.router())
    app.add_middleware(RequestMiddleware, service=service)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
        )
    app.openapi = lambda: _openapi(app, settings)  # type: ignore[method-assign]
    return app


def _openapi(app: FastAPI, settings: ServerSettings) -> dict[str, Any]:
    """Return FastAPI's OpenAPI document with the API key, and open for the unknown fields that are ignored."""
    if app.openapi_schema is None:
        schema = FastAPI.openapi(app)
        if not settings.strict_fields:
            for described in schema["components"]["schemas"].values():
                described.pop("additionalProperties", None)
        if settings.api_keys:
            schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{"key": []}]
        app.openapi_schema = schema
    return app.openapi_schema
