"""The endpoints that lines of batches may ask, each with its body and the function that answers it, which are those of
the server's own routes."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from ttpu_serve.server.chat import Chat
from ttpu_serve.server.chat_protocol import ChatRequest
from ttpu_serve.server.completions import Completion
from ttpu_serve.server.endpoints import embeddings_of
from ttpu_serve.server.errors import ApiError
from ttpu_serve.server.openai_responses import OneResponse
from ttpu_serve.server.openai_responses_protocol import ResponsesRequest
from ttpu_serve.server.protocol import Body, CompletionRequest, EmbeddingRequest
from ttpu_serve.server.respond import Generation
from ttpu_serve.server.response_store import ResponseStore
from ttpu_serve.server.scoring import RerankRequest, ScoreRequest, ranks_of, scores_of
from ttpu_serve.server.service import Service


@dataclass(frozen=True)
class Endpoint:
    """body: of its requests. answer: returns a response's body. sequences: that a request has the engine compute."""

    body: type[Body]
    answer: Callable[[Service, Any], Coroutine[Any, Any, dict[str, Any]]]
    sequences: Callable[[Any], int] = lambda body: 1


async def _generated(generation: Generation) -> dict[str, Any]:
    streams = await generation.submit()
    try:
        return await generation.whole(streams)
    finally:
        streams.close()


def _chat(service: Service, body: ChatRequest) -> Coroutine[Any, Any, dict[str, Any]]:
    return _generated(Chat(service, body))


def _completion(service: Service, body: CompletionRequest) -> Coroutine[Any, Any, dict[str, Any]]:
    return _generated(Completion(service, body))


def _response(service: Service, body: ResponsesRequest) -> Coroutine[Any, Any, dict[str, Any]]:
    if body.store:
        raise ApiError(
            "store is true, but the server's memory of responses is for clients that continue them: leave it out in "
            "batches.",
            param="store",
            code="unsupported_field",
        )
    return _generated(OneResponse(service, body.model_copy(update={"store": False}), ResponseStore(), ""))


_SCORE = Endpoint(ScoreRequest, scores_of, lambda body: len(body.text_1) + len(body.text_2))
_RERANK = Endpoint(RerankRequest, ranks_of, lambda body: 1 + len(body.documents))
ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/chat/completions": Endpoint(ChatRequest, _chat, lambda body: body.num_sequences),
    "/v1/completions": Endpoint(CompletionRequest, _completion, lambda body: len(body.prompt) * body.num_sequences),
    "/v1/embeddings": Endpoint(EmbeddingRequest, embeddings_of, lambda body: len(body.input)),
    "/v1/responses": Endpoint(ResponsesRequest, _response),
    "/v1/score": _SCORE,
    "/v1/rerank": _RERANK,
    "/score": _SCORE,
    "/rerank": _RERANK,
    "/v2/rerank": _RERANK,
}
"""Path → endpoint."""
