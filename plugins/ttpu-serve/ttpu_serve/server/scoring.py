"""What vLLM's server does with embeddings: /score, /rerank and /pooling; /classify is refused with the reason."""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import BeforeValidator, Field

from ttpu_serve.pair_scores import NO_CLASSES, check_embeds, cosine, paired, ranked
from ttpu_serve.server.body import UniqueKeys
from ttpu_serve.server.embedding import embedded, written
from ttpu_serve.server.errors import ApiError, JSONResponse
from ttpu_serve.server.events import until_gone
from ttpu_serve.server.protocol import Body, Prompts, Unsupported, as_list, at_most
from ttpu_serve.server.service import MAX_INPUTS, Service

TruncatePromptTokens = Annotated[int | None, Field(ge=-1, lt=2**31)]


def _as_text(value: Any) -> Any:
    return value["text"] if isinstance(value, dict) and set(value) == {"text"} else value


Texts = Annotated[
    list[Annotated[str, Field(min_length=1), BeforeValidator(_as_text)]],
    Field(min_length=1, fail_fast=True),
    at_most(MAX_INPUTS),
    BeforeValidator(as_list),
]


class Pooled(Body):
    """The fields that all these requests share."""

    harmless: ClassVar[Unsupported] = {
        "priority": ((0,), "embeddings are computed in order: leave it out"),
        "truncation_side": (("right",), "inputs are cut at their end: leave it out"),
    }
    neutral: ClassVar[Unsupported] = {
        "activation": ((False,), "scores are cosines here: leave it out"),
        "softmax": ((False,), "scores are cosines here: leave it out"),
        "use_activation": ((False,), "scores are cosines here: leave it out"),
        "chat_template": ((), "texts are embedded as they are: write what the model needs into them"),
        "max_tokens_per_doc": ((), "it is called truncate_prompt_tokens here: use that"),
        "messages": ((), "conversations are not pooled here: pass input"),
    }

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: TruncatePromptTokens = None
    pooling: Literal["last", "mean", "cls"] | None = None
    add_special_tokens: bool | None = None


class ScoreRequest(Pooled):
    """The body of /score: one text and several, or as many and as many."""

    text_1: Texts
    text_2: Texts


class RerankRequest(Pooled):
    """The body of /rerank, in the form of Jina's and Cohere's."""

    query: str = Field(min_length=1)
    documents: Texts
    top_n: int | None = Field(None, ge=0)
    return_documents: bool | None = None


class PoolingRequest(Pooled):
    """The body of /pooling."""

    neutral: ClassVar[Unsupported] = {
        **Pooled.neutral,
        "task": (("embed",), "states are pooled to one embedding here: leave it out"),
        "normalize": ((True,), "embeddings have unit length here: leave it out"),
        "dimensions": ((), "embeddings are not cut here: leave it out"),
    }

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None


class ClassifyRequest(Pooled):
    """The body of /classify."""

    input: Prompts


def router(service: Service) -> APIRouter:
    """Return the endpoints' routes."""
    routes = APIRouter(tags=["vLLM"], route_class=UniqueKeys)

    @routes.post("/v1/score")
    @routes.post("/score")
    async def score(body: ScoreRequest, request: Request) -> Response:
        """Return the cosine of the embeddings of each pair of texts."""
        return JSONResponse(await until_gone(request, scores_of(service, body)))

    @routes.post("/v2/rerank")
    @routes.post("/v1/rerank")
    @routes.post("/rerank")
    async def rerank(body: RerankRequest, request: Request) -> Response:
        """Return documents in the order of the cosines between their embeddings and the query's."""
        return JSONResponse(await until_gone(request, ranks_of(service, body)))

    @routes.post("/pooling")
    async def pooling(body: PoolingRequest, request: Request) -> Response:
        """Return embeddings in vLLM's form."""
        return JSONResponse(await until_gone(request, _pool(service, body)))

    @routes.post("/classify")
    async def classify(body: ClassifyRequest) -> Response:
        """Refuse: no classes are computed here."""
        service.adapter_of(body.model)
        raise ApiError(NO_CLASSES, code="unsupported_model")

    return routes


async def _vectors(service: Service, body: Pooled, inputs: Any, param: str) -> tuple[list[np.ndarray], int]:
    special, truncate = body.add_special_tokens is not False, body.truncate_prompt_tokens
    return await embedded(
        service, inputs, pooling=body.pooling, model=body.model, special=special, truncate=truncate, param=param
    )


async def scores_of(service: Service, body: ScoreRequest) -> dict[str, Any]:
    """Return the response of /score.

    Raises:
        TTPUError: the model makes no embeddings, or a text cannot be embedded.
    """
    check_embeds(service.engine.core, body.pooling)
    pairs = paired(len(body.text_1), len(body.text_2))
    vectors, count = await _vectors(service, body, [*body.text_1, *body.text_2], "text_2")
    scores = [cosine(vectors[first], vectors[len(body.text_1) + second]) for first, second in pairs]
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    return _envelope(service, body, "score", count) | {"data": data}


async def ranks_of(service: Service, body: RerankRequest) -> dict[str, Any]:
    """Return the response of /rerank.

    Raises:
        TTPUError: the model makes no embeddings, or a text cannot be embedded.
    """
    check_embeds(service.engine.core, body.pooling)
    vectors, count = await _vectors(service, body, [body.query, *body.documents], "documents")
    scores = [cosine(vectors[0], vector) for vector in vectors[1:]]
    results: list[dict[str, Any]] = []
    for place in ranked(scores, body.top_n):
        shown = {} if body.return_documents is False else {"document": {"text": body.documents[place]}}
        results.append({"index": place, **shown, "relevance_score": scores[place]})
    told = _envelope(service, body, "rerank", count)
    return {name: told[name] for name in ("id", "model", "usage")} | {"results": results}


async def _pool(service: Service, body: PoolingRequest) -> dict[str, Any]:
    vectors, count = await _vectors(service, body, body.input, "input")
    data = [
        {"index": index, "object": "pooling", "data": written(vector, body.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    return _envelope(service, body, "pool", count) | {"data": data}


def _envelope(service: Service, body: Pooled, kind: str, count: int) -> dict[str, Any]:
    return {
        "id": f"{kind}-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": body.model or service.names[0],
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }
