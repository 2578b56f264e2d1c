"""/v1/completions: whole or streamed text completions of one or several prompts."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from ttpu_serve.api.outputs import OutputDelta
from ttpu_serve.server import sampling
from ttpu_serve.server.body import UniqueKeys
from ttpu_serve.server.errors import ApiError
from ttpu_serve.server.protocol import CompletionRequest
from ttpu_serve.server.respond import respond
from ttpu_serve.server.responses import CompletionLogprobs, TokenLogprobs, joined, prompt_logprobs
from ttpu_serve.server.service import OutputStreams, Service

_NEWS = ("text", "logprobs", "finish_reason", "token_ids", "prompt_token_ids", "prompt_logprobs")


def router(service: Service) -> APIRouter:
    """Return the endpoint's routes."""
    routes = APIRouter(route_class=UniqueKeys)

    @routes.post("/v1/completions", tags=["OpenAI"])
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Complete prompts."""
        timeout = service.settings.write_timeout
        return await respond(request, Completion(service, body), stream=bool(body.stream), write_timeout=timeout)

    return routes


class Completion:
    """One completion request."""

    def __init__(self, service: Service, request: CompletionRequest) -> None:
        self._service, self._request = service, request
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._prompts: list[list[int]] = []
        self._texts: list[str] = []
        self._each = request.num_sequences
        number = len(request.prompt) * self._each
        specials, as_ids = request.skip_special_tokens is False, bool(request.return_tokens_as_token_ids)
        self._logprobs = [
            CompletionLogprobs(service.tokens, request.logprobs or 0, specials, as_ids=as_ids) for _ in range(number)
        ]
        self._began = [False] * number
        self._scores: dict[int, Sequence[TokenLogprobs | None] | None] = {}
        """Log-probabilities of the prompts; the engine gives them with the first sequence of each."""
        self._held: list[tuple[int, OutputDelta]] = []

    async def submit(self) -> OutputStreams:
        """Check the request and submit it to the engine.

        Raises:
            ApiError: the request cannot be served.
        """
        service, request = self._service, self._request
        adapter = service.adapter_of(request.model)
        service.check_choices(len(request.prompt), self._each, "best_of" if request.ranks else "n")
        if request.max_tokens == 0 and not request.echo:
            raise ApiError("max_tokens is 0, but without echo nothing would be said: raise it.", param="max_tokens")
        params = sampling.of_completion(request, service.settings.default_sampling)
        special = request.add_special_tokens is not False
        for prompt in request.prompt:
            cut = request.truncate_prompt_tokens
            self._prompts.append(await service.ids_of(prompt, special=special, param="prompt", truncate=cut))
            if request.echo:
                whole = isinstance(prompt, str) and cut is None
                text = str(prompt) if whole else await service.tokens.decode(self._prompts[-1])
                self._texts.append(text)
        return await service.submit(self._prompts, params, request, adapter=adapter)

    async def whole(self, streams: OutputStreams) -> dict[str, Any]:
        """Return the whole response."""
        outputs: list[list[OutputDelta]] = [[] for _ in self._logprobs]
        async with aclosing(streams.deltas()) as deltas:
            async for number, delta in deltas:
                self._score(number, delta)
                outputs[number].append(delta)
        told = self._envelope()
        told["choices"] = [
            {**_joined([self._piece(number, delta) for delta in outputs[number]]), "index": index}
            for index, number in enumerate(self._returned(outputs))
        ]
        told["usage"] = self._usage(streams)
        return told

    def _returned(self, outputs: list[list[OutputDelta]]) -> list[int]:
        """Return the numbers of the sequences that are returned, in their order."""
        chosen: list[int] = []
        for begin in range(0, len(outputs), self._each):
            numbers = range(begin, begin + self._each)
            ranked = sorted(numbers, key=lambda one: -_logprob(outputs[one])) if self._request.ranks else numbers
            chosen += ranked[: self._request.num_choices]
        return chosen

    async def chunks(self, streams: OutputStreams) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the response's chunks as they come."""
        counted: dict[str, Any] = {"usage": None} if self._request.includes_usage else {}
        async with aclosing(streams.deltas()) as deltas:
            async for given in deltas:
                for number, delta in self._tellable(*given):
                    piece = self._piece(number, delta)
                    # text may be held back, but ids and the prompt's values come once
                    if any(piece.get(name) for name in _NEWS):
                        if self._request.continuous_usage:
                            counted = {"usage": self._usage(streams)}
                        yield {**self._envelope(), "choices": [piece], **counted}
        if self._request.includes_usage:
            yield {**self._envelope(), "choices": [], "usage": self._usage(streams)}

    def _score(self, number: int, delta: OutputDelta) -> None:
        """Note the log-probabilities of a prompt, if this is the first delta of its first sequence."""
        if number % self._each == 0:
            self._scores.setdefault(number // self._each, delta.prompt_logprobs)

    def _tellable(self, number: int, delta: OutputDelta) -> list[tuple[int, OutputDelta]]:
        """Return the deltas of a stream that can be told now. Where log-probabilities of prompts are told, other
        sequences of a prompt wait until its first one has brought them."""
        self._score(number, delta)
        if not self._scored:
            return [(number, delta)]
        waiting = [*self._held, (number, delta)]
        self._held = [one for one in waiting if one[0] // self._each not in self._scores]
        return [one for one in waiting if one[0] // self._each in self._scores]

    @property
    def _scored(self) -> bool:
        """Whether log-probabilities of prompts are told."""
        request = self._request
        return request.prompt_logprobs is not None or bool(request.echo and request.logprobs is not None)

    def _piece(self, number: int, delta: OutputDelta) -> dict[str, Any]:
        """Return a delta as a choice; with echo, the first one of a sequence includes the prompt."""
        request = self._request
        text, ids = delta.text, delta.token_ids
        told: list[dict[str, Any]] = []
        piece: dict[str, Any] = {"index": number, "text": text, "logprobs": None}
        if request.max_tokens == 0:
            text, ids = "", []
        if not self._began[number]:
            self._began[number] = True
            prompt = number // self._each
            scores = self._scores.get(prompt)
            if request.echo:
                text = self._texts[prompt] + text
                if request.logprobs is not None and scores is not None:
                    told.append(self._logprobs[number].of(scores, self._prompts[prompt], echoed=self._texts[prompt]))
            if request.prompt_logprobs is not None:
                piece["prompt_logprobs"] = prompt_logprobs(scores, request.prompt_logprobs, self._service.tokens)
            if request.return_token_ids:
                piece["prompt_token_ids"] = self._prompts[prompt]
        if request.logprobs is not None and ids:
            told.append(self._logprobs[number].of(delta.logprobs or [], ids))
        if request.return_token_ids:
            piece["token_ids"] = ids
        piece["text"] = text
        piece["logprobs"] = joined(told) if told else None
        piece["finish_reason"] = delta.finish_reason
        if delta.stop_reason is not None:
            piece["stop_reason"] = delta.stop_reason
        return piece

    def _usage(self, streams: OutputStreams) -> dict[str, Any]:
        if self._request.max_tokens == 0:
            streams.usage.completion = 0
        return streams.usage.as_json()

    def _envelope(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._request.model or self._service.names[0],
            "system_fingerprint": None,
        }


def _logprob(deltas: list[OutputDelta]) -> float:
    """Return the sum of the log-probabilities of a sequence's tokens."""
    return sum(
        told[token].logprob
        for delta in deltas
        for token, told in zip(delta.token_ids, delta.logprobs or (), strict=True)
    )


def _joined(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the choices of one sequence."""
    told = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
    whole = {**pieces[0], **pieces[-1]}
    whole["text"] = "".join(piece["text"] for piece in pieces)
    whole["logprobs"] = joined(told) if told else None
    if "token_ids" in whole:
        whole["token_ids"] = [token for piece in pieces for token in piece["token_ids"]]
    return whole
