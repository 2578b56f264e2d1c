"""Beam search for requests (`use_beam_search`): which other fields go with it, and the search of one prompt as a stream
of deltas."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from ttpu_core.generation.prompt import Prompt
from ttpu_core.generation.sampling_params import SamplingParams
from ttpu_serve.api.async_engine import AsyncEngine
from ttpu_serve.api.beam_search import BeamSearchOutput, BeamSearchParams, search, step_params
from ttpu_serve.api.output_queue import EngineClosingError, RequestFailedError, Stream
from ttpu_serve.api.outputs import Logprob, OutputDelta
from ttpu_serve.server.errors import ApiError
from ttpu_serve.server.given_fields import given_fields
from ttpu_serve.server.protocol import Generation
from ttpu_serve.server.tokens import Tokens

MOST_CONTEXTS = 16
"""Times the context that all beams of a request may hold together: the host looks up all of their pages at each step,
which takes about 1 ms for 1,000 pages of 16 tokens, and other requests wait for that."""
_REFUSED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("stop", ([],)),
    ("stop_token_ids", ([],)),
    ("min_tokens", (0,)),
    ("presence_penalty", (0,)),
    ("frequency_penalty", (0,)),
    ("repetition_penalty", (1,)),
    ("logit_bias", ({},)),
    ("allowed_token_ids", ()),
    ("bad_words", ([],)),
    ("prompt_logprobs", ()),
)
"""Fields that would change which tokens are chosen, or need a pass over the prompt → their values without effect."""
_OF_DRAWS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("temperature", (0,)),
    ("top_p", (1,)),
    ("top_k", (0, -1)),
    ("min_p", (0,)),
)
"""Fields that say how tokens are drawn, and beams are not → their values that say nothing."""


class Submit(Protocol):
    """Submits sequences for a token each, either all or none."""

    async def __call__(self, sequences: Sequence[list[int] | Prompt], *, goes_on: bool) -> list[Stream]:
        """`goes_on`: they belong to a search that has begun."""
        ...


def beam_params(request: Generation, params: SamplingParams, max_tokens: int) -> BeamSearchParams:
    """Return how a request's beams are searched.

    Fields that say how tokens are drawn have no effect and are named in the response's header, as ignored fields are.

    Args:
        request: it asks for beams.
        params: what the request would be sampled with.
        max_tokens: the most new tokens of a beam.

    Raises:
        ApiError: it has another field that beam search does not follow.
    """
    for name, neutral in _REFUSED:
        value = getattr(request, name, None)
        if value is not None and value not in neutral:
            raise ApiError(
                f"{name} was given with use_beam_search, but beams are ranked by the model's own distribution alone: "
                "leave one of them out.",
                param=name,
            )
    best_of = getattr(request, "best_of", None)
    if best_of not in (None, request.num_choices):
        raise ApiError(
            f"best_of is {best_of} and n {request.num_choices} with use_beam_search, which returns the n beams that "
            "it searches: leave best_of out.",
            param="best_of",
        )
    if params.guided is not None:
        raise ApiError(
            "use_beam_search was given with a prescribed form of the output, which beams do not follow: leave one of "
            "them out.",
            param="use_beam_search",
        )
    if params.prompt_logprobs is not None:
        raise ApiError(
            "echo was given with logprobs and use_beam_search, but beam search computes no log-probabilities of "
            "prompts: leave one of them out.",
            param="echo",
        )
    fields = given_fields()
    for name, neutral in _OF_DRAWS:
        value = getattr(request, name)
        if value is None or value in neutral:
            continue
        if fields.strict:
            raise ApiError(
                f"{name} was given with use_beam_search, but beams are not drawn, so that it has no effect: leave it "
                "out.",
                param=name,
            )
        fields.ignored[name] = None
    return BeamSearchParams(
        beam_width=params.n,
        max_tokens=max_tokens,
        ignore_eos=params.ignore_eos,
        length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
        early_stopping=request.early_stopping or False,
    )


async def begin_beams(
    engine: AsyncEngine,
    tokens: Tokens,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    request: Generation,
    options: Mapping[str, Any],
    time_left: Callable[[], float | None],
) -> list[BeamStream]:
    """Begin a search for each prompt of a request, either of all or of none.

    Args:
        engine: the engine.
        tokens: writes the beams' texts.
        prompts: token ids.
        params: what the request would be sampled with.
        request: it asks for beams.
        options: of `AsyncEngine.submit_all`.
        time_left: returns the seconds that the request has left, None if any number.

    Raises:
        ApiError: the request has fields that do not go with beams, its beams are too long together, or the engine keeps
            no prefixes.
        RequestError: there are more beams than run and wait at once, or than the engine reports tokens for, or a prompt
            cannot be served.
    """
    core = engine.core
    if not core.scheduler.config.caches_prefixes:
        raise ApiError(
            "use_beam_search was given, but this server keeps no prefixes, so that each token of a beam would read the "
            "whole prompt again: leave it out, or ask a server with prefix caching.",
            param="use_beam_search",
        )
    rooms = [core.max_model_len - len(prompt) for prompt in prompts]
    searches = [beam_params(request, params, min(params.max_tokens or room, room)) for room in rooms]
    lengths = [len(prompt) + own.max_tokens for prompt, own in zip(prompts, searches, strict=True)]
    total = params.n * sum(lengths)
    if total > MOST_CONTEXTS * core.max_model_len:
        raise ApiError(
            f"these beams may have {total:,} tokens, prompts included, but those of one request may have "
            f"{MOST_CONTEXTS * core.max_model_len:,}, {MOST_CONTEXTS} times the context: lower n or max_tokens, or "
            "send fewer prompts.",
            param="n",
        )
    # A step has the beams of all prompts; the first one, which is submitted here, has one sequence for each prompt.
    engine.check_places(sum(own.beam_width if own.max_tokens > 1 else 1 for own in searches))
    asked = step_params(searches[0], core.runner.limits.max_logprobs, logprobs=params.logprobs or 0)
    given = {**options, "cache_salt": request.cache_salt}

    async def submit(sequences: Sequence[list[int] | Prompt], *, goes_on: bool) -> list[Stream]:
        return await engine.submit_all(sequences, asked, timeout=time_left(), goes_on=goes_on, **given)

    async def text_of(prompt: list[int], new: list[int]) -> str:
        if not params.detokenize:
            return ""
        return await tokens.continued(prompt, new, skip_special=params.skip_special_tokens)

    reported = params.logprobs is not None
    return [
        BeamStream(engine, prompt, own, first, submit, text_of, reported)
        for prompt, own, first in zip(prompts, searches, await submit(prompts, goes_on=False), strict=True)
    ]


class BeamStream:
    """The beams of one prompt as a stream of deltas. Each beam is one delta, the best first, and all come at the end.

    Args:
        engine: the engine, which waits for the search when it drains.
        prompt: token ids.
        params: how beams are searched.
        first: the stream of the prompt itself, which has been submitted for its next token.
        submit: submits sequences for a token each.
        text_of: called with the prompt and new tokens, returns the text of these.
        logprobs: whether the deltas have log-probabilities.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        prompt: list[int],
        params: BeamSearchParams,
        first: Stream,
        submit: Submit,
        text_of: Callable[[list[int], list[int]], Awaitable[str]],
        logprobs: bool,
    ) -> None:
        self._engine, self._prompt, self._params = engine, prompt, params
        self._submit, self._text_of, self._logprobs = submit, text_of, logprobs
        self._request_id = first.request_id
        self._running, self._closed = [first], False
        engine.ongoing.add(self)

    def close(self) -> None:
        """Abort the search, unless it has finished."""
        self._closed = True
        self._engine.ongoing.discard(self)
        for stream in self._running:
            stream.close()

    async def __aiter__(self) -> AsyncIterator[OutputDelta]:
        prompt = self._prompt
        try:
            found, cached = await self._search()
            for index, beam in enumerate(found.sequences):
                new = beam.tokens[len(prompt) :]
                text = await self._text_of(prompt, new[:-1] if beam.finish_reason == "stop" else new)
                yield OutputDelta(
                    self._request_id,
                    index,
                    text,
                    new,
                    beam.logprobs if self._logprobs else None,
                    beam.finish_reason,
                    num_prompt_tokens=len(prompt),
                    num_cached_tokens=cached,
                    num_output_tokens=len(new),
                )
        finally:
            self.close()

    async def _search(self) -> tuple[BeamSearchOutput, int]:
        """Return the beams, and the number of the prompt's tokens that the prefix cache had."""
        searching = search(self._prompt, self._params, self._engine.core.input_processor.stop_ids)
        next(searching)
        told = [await _token(stream) for stream in self._running]
        cached = told[0].num_cached_tokens
        while True:
            try:
                sequences = searching.send([_logprobs(delta) for delta in told])
            except StopIteration as done:
                found: BeamSearchOutput = done.value
                return found, cached
            self._running = await self._submit([Prompt(tuple(tokens)) for tokens in sequences], goes_on=True)
            if self._closed:  # while they were submitted
                self.close()
                raise EngineClosingError("the search was closed before it was done: ask again.")
            told = [await _token(stream) for stream in self._running]


async def _token(stream: Stream) -> OutputDelta:
    """Return the delta of a stream's only token."""
    found: OutputDelta | None = None
    async for delta in stream:
        found = delta
    if found is None:
        raise RequestFailedError("a beam ended without a token: ask again.")
    return found


def _logprobs(delta: OutputDelta) -> dict[int, Logprob]:
    if not delta.logprobs:
        raise RequestFailedError(f"a beam ended without a token ({delta.finish_reason}): ask again.")
    return delta.logprobs[0]
