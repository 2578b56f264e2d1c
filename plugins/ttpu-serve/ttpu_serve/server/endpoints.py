"""The smaller endpoints: models, embeddings, tokenization, health, metrics and administration."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field

from ttpu_serve.server.body import UniqueKeys
from ttpu_serve.server.chat_protocol import TokenizeRequest
from ttpu_serve.server.embedding import embedded, written
from ttpu_serve.server.errors import ApiError, JSONResponse
from ttpu_serve.server.events import until_gone
from ttpu_serve.server.protocol import Body, DetokenizeRequest, EmbeddingRequest
from ttpu_serve.server.service import Service

RECENT_SECONDS = 60.0


class LoadAdapter(Body):
    """The body of /v1/load_lora_adapter: a LoRA adapter in PEFT's format on the server's disk. It replaces one of the
    same name, unless `load_inplace` is false."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(max_length=4096)
    load_inplace: bool | None = None


class UnloadAdapter(Body):
    """The body of /v1/unload_lora_adapter."""

    lora_name: str


def models(service: Service) -> APIRouter:
    """Routes of /v1/models."""
    routes = APIRouter(tags=["OpenAI"])

    def card(name: str) -> dict[str, Any]:
        parent = service.names[0] if name in service.adapters else None
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "ttpu",
            "root": name if parent is None else parent,
            "parent": parent,
            "max_model_len": service.max_model_len,
        }

    @routes.get("/v1/models")
    async def list_models() -> Response:
        """List the model under each of its names, and its adapters."""
        names = [*service.names, *service.adapters]
        return JSONResponse({"object": "list", "data": [card(name) for name in names]})

    @routes.get("/v1/models/{model:path}")
    async def retrieve_model(model: str) -> Response:
        """Return one model or adapter."""
        service.adapter_of(model)
        return JSONResponse(card(model))

    return routes


def embeddings(service: Service) -> APIRouter:
    """Routes of /v1/embeddings."""
    routes = APIRouter(tags=["OpenAI"], route_class=UniqueKeys)

    @routes.post("/v1/embeddings")
    async def embed(body: EmbeddingRequest, request: Request) -> Response:
        """Return embeddings of unit length, pooled as the checkpoint declares: the hidden state of each input's last
        token, the mean of all tokens, or the first one's."""
        return JSONResponse(await until_gone(request, embeddings_of(service, body)))

    return routes


async def embeddings_of(service: Service, body: EmbeddingRequest) -> dict[str, Any]:
    """Return the response of /v1/embeddings.

    Raises:
        ApiError, RequestError: there are too many inputs, or one cannot be embedded.
    """
    if body.dimensions is not None:
        raise ApiError(
            "the field 'dimensions' was given, but this model's embeddings are not made to be cut: leave it out.",
            param="dimensions",
            code="unsupported_field",
        )
    special, truncate = body.add_special_tokens is not False, body.truncate_prompt_tokens
    vectors, count = await embedded(
        service, body.input, pooling=body.pooling, model=body.model, special=special, truncate=truncate
    )
    data = [
        {"object": "embedding", "index": number, "embedding": written(vector, body.encoding_format)}
        for number, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": data, "model": body.model or service.names[0], "usage": usage}


def tokens(service: Service) -> APIRouter:
    """Routes of /tokenize and /detokenize."""
    routes = APIRouter(tags=["Tokens"], route_class=UniqueKeys)

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Return the ids of a prompt, or of a conversation rendered with the chat template. Both may be as long as the
        context."""
        service.adapter_of(body.model)
        return await until_gone(request, _tokenize(body))

    async def _tokenize(body: TokenizeRequest) -> Response:
        most = service.most_prompt_tokens(0)
        if body.prompt is not None:
            ids = await service.tokens.encode(body.prompt, special=body.add_special_tokens is not False, most=most)
        else:
            ids = await service.chat.encode(body, most=most)
        pieces = await service.tokens.pieces(ids) if body.return_token_strs else None
        told = {"count": len(ids), "max_model_len": service.max_model_len, "tokens": ids, "token_strs": pieces}
        return JSONResponse(told)

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """Return the text of token ids, of which there may be as many as the context has."""
        service.adapter_of(body.model)
        if len(body.tokens) > service.max_model_len:
            raise ApiError(
                f"tokens has {len(body.tokens):,} ids, but this server reads at most {service.max_model_len:,}: send "
                "fewer.",
                param="tokens",
                code="context_length_exceeded",
            )
        return JSONResponse({"prompt": await until_gone(request, service.tokens.decode(body.tokens))})

    @routes.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """Return what kind of tokenizer it is, its special tokens and the chat template."""
        return JSONResponse(service.tokens.info() | {"chat_template": service.chat.text})

    return routes


def watching(service: Service) -> APIRouter:
    """Routes of /health, /ping, /load, /version, /metrics, and /stats for the page."""
    routes = APIRouter(tags=["Watching"])

    async def refresh() -> Any:
        stats = await service.engine.stats()
        service.metrics.of_engine.update(stats)
        return stats

    @routes.head("/health", include_in_schema=False)
    @routes.get("/health")
    async def health() -> Response:
        """Return status 200 while requests are accepted, 503 otherwise."""
        service.engine.check_accepting()
        return JSONResponse({"status": "ok"})

    @routes.post("/ping")
    @routes.get("/ping")
    async def ping() -> Response:
        """Return status 200 while requests are accepted, 503 otherwise, as SageMaker asks."""
        service.engine.check_accepting()
        return Response()

    @routes.get("/load")
    async def load() -> Response:
        """Return how many sequences run or wait."""
        stats = await service.engine.stats()
        return JSONResponse({"server_load": stats.running + stats.waiting})

    @routes.get("/version")
    async def show_version() -> Response:
        """Return the software's version."""
        return JSONResponse({"version": version("ttpu-serve")})

    @routes.get("/metrics")
    async def metrics() -> Response:
        """Return the metrics in Prometheus' text format."""
        await refresh()
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @routes.get("/stats")
    async def stats() -> Response:
        """Return the engine's counters and derived values as JSON."""
        found = asdict(await refresh())
        now = time.monotonic()
        recent = sorted(seconds for then, seconds in service.metrics.recent if then > now - RECENT_SECONDS)
        told = {
            "model": service.names[0],
            "adapters": list(service.adapters),
            "max_model_len": service.max_model_len,
            "chat": service.chat.text is not None,
            "needs_key": bool(service.settings.api_keys),
            "time": now,
            "ttft_p50": recent[len(recent) // 2] if recent else None,
            "tokens_per_second": service.metrics.of_engine.rate("output_tokens"),
            "engine": found,
            **service.metrics.of_engine.utilization,
        }
        return JSONResponse(told)

    return routes


def _check_query(request: Request, name: str, allowed: str, meaning: str) -> None:
    """Refuse what the URL asks for beside what is done anyway.

    Raises:
        ApiError: there is such.
    """
    for given, value in request.query_params.multi_items():
        if given != name or value != allowed:
            raise ApiError(
                f"the URL has {given}={value[:40]}, but {meaning}: leave it out.", param=given, code="unsupported_field"
            )


def admin(service: Service) -> APIRouter:
    """Routes of `--enable-admin`: sleep, wake up, prefix cache, adapters."""
    routes = APIRouter(tags=["Administration"], route_class=UniqueKeys)
    engine = service.engine

    async def done(work: Callable[[], Any]) -> Response:
        await engine.call(work)
        return JSONResponse({"status": "ok"})

    @routes.post("/sleep")
    async def sleep(request: Request) -> Response:
        """Move the weights off the devices and drop the KV cache. Requests are kept and continue after /wake_up."""
        _check_query(request, "level", "1", "weights go to the host, which is level 1 of vLLM")
        return await done(engine.core.sleep)

    @routes.post("/wake_up")
    async def wake_up(request: Request) -> Response:
        """Move the weights back to the devices."""
        _check_query(request, "tags", "", "weights and KV cache come back together")
        return await done(engine.core.wake_up)

    @routes.get("/is_sleeping")
    async def is_sleeping() -> Response:
        """Return whether the engine sleeps."""
        return JSONResponse({"is_sleeping": bool((await engine.stats()).asleep)})

    @routes.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        """Drop all cached prefixes."""
        return await done(engine.core.reset_prefix_cache)

    @routes.post("/v1/load_lora_adapter")
    async def load_lora_adapter(body: LoadAdapter) -> Response:
        """Load an adapter and serve it as a model of that name."""
        if body.lora_name in service.names:
            raise ApiError(f"{body.lora_name!r} is the model's own name: choose another.", param="lora_name")
        if body.load_inplace is False and body.lora_name in service.adapters:
            raise ApiError(
                f"the adapter {body.lora_name!r} was to be loaded with load_inplace false, but one of that name is: "
                "leave load_inplace out to replace it, or choose another name.",
                param="lora_name",
            )
        # Files are read beside the engine's steps, not between two of them.
        return await done(await asyncio.to_thread(engine.core.prepare_adapter, body.lora_name, body.lora_path))

    @routes.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(body: UnloadAdapter) -> Response:
        """Unload an adapter."""
        if body.lora_name not in service.adapters:
            loaded = f"only {', '.join(service.adapters)} can be" if service.adapters else "none is loaded"
            raise ApiError(
                f"the adapter {body.lora_name!r} was to be unloaded, but {loaded}: see /v1/models.",
                status=404,
                param="lora_name",
                code="model_not_found",
            )
        return await done(lambda: engine.core.unload_adapter(body.lora_name))

    return routes
