"""The engine as all endpoints use it: checks of requests, output streams with metrics, and the names of served
models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from ttpu_core.errors import RequestError
from ttpu_core.generation.sampling_params import SamplingParams
from ttpu_serve.api.async_engine import AsyncEngine
from ttpu_serve.api.client_pace import ProcessorPace
from ttpu_serve.api.fair_executor import FairExecutor
from ttpu_serve.api.output_queue import RequestTimeoutError
from ttpu_serve.api.outputs import OutputDelta
from ttpu_serve.reasoning_parsers.installed import parser_for as reasoning_parser_for
from ttpu_serve.scheduling.request import AskedPooling
from ttpu_serve.server.beams import begin_beams
from ttpu_serve.server.errors import ApiError
from ttpu_serve.server.events import ARRIVAL, BACKGROUND, CLIENT
from ttpu_serve.server.metrics import Metrics, RequestWatch
from ttpu_serve.server.protocol import Generation, Prompt
from ttpu_serve.server.responses import Usage
from ttpu_serve.server.settings import MIB, ServerSettings
from ttpu_serve.server.template import ChatTemplate
from ttpu_serve.server.tokens import Tokens, kept
from ttpu_serve.server.traces import Tracer
from ttpu_serve.tool_parsers.installed import parser_for as tool_parser_for

MAX_INPUTS = 2048
"""Texts that one request may have embedded: OpenAI's limit."""
TRUNCATED = 16
"""Times the context that a text may have which is cut to fit it: all of it has to be tokenized."""
BACKGROUND_PRIORITY = 240
"""Of lines of batches, above that of requests whose client waits: with the engine's default of 15 s a level, a line
that has waited for an hour comes before what arrives then."""
BODY_BYTES, BODY_BYTES_PER_TOKEN = 2 * MIB, 32
BODY_VALUES, BODY_VALUES_PER_TOKEN = 400_000, 4
"""A batch of inputs for embeddings may have 300,000 tokens with OpenAI."""


class Service:
    """One engine behind one server.

    Raises:
        RequestError: an adapter has the model's name, or a setting does not fit the model.
    """

    def __init__(self, engine: AsyncEngine, settings: ServerSettings, tracer: Tracer | None = None) -> None:
        self.engine, self.settings, self.tracer = engine, settings, tracer
        self.names = settings.model_names or (engine.core.model_name,)
        if taken := [name for name in self.adapters if name in self.names]:
            raise RequestError(
                f"the adapter {taken[0]!r} has the model's own name, so that nobody could ask for it: rename it, or "
                "serve the model under another name."
            )
        self.created = int(time.time())
        self._compiling = asyncio.Semaphore()  # guides of lines of batches
        self.bodies = FairExecutor("ttpu-bodies", ProcessorPace())
        self.tokens = Tokens(engine.core.tokenizer)
        self.chat = ChatTemplate(self.tokens, settings.chat_template, settings.chat_template_kwargs)
        self.metrics = Metrics(self.names[0], settings.metrics_prefix)
        self.tool_parser = tool_parser_for(settings.tool_call_parser, self.chat.text)
        self.reasoning_parser = reasoning_parser_for(settings.reasoning_parser, self.chat.text)

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a prompt and its output."""
        return self.engine.core.max_model_len

    @property
    def max_num_seqs(self) -> int:
        """Maximum sequences that run at once."""
        return int(self.engine.core.scheduler.config.max_num_seqs)

    def most_prompt_tokens(self, room: int = 1) -> int:
        """Maximum tokens of a prompt that leaves `room` tokens of the context for an answer."""
        most = self.max_model_len - room
        return most if self.settings.max_prompt_tokens is None else min(most, self.settings.max_prompt_tokens)

    @property
    def most_body_bytes(self) -> int:
        """Maximum bytes of a request's body: unless it is set, what a prompt that fills the context can take, and some
        for tools, schemas and batches of inputs."""
        return self.settings.max_body_bytes or BODY_BYTES + BODY_BYTES_PER_TOKEN * self.max_model_len

    @property
    def most_values(self) -> int:
        """Maximum values, such as token ids, of a request's body."""
        return BODY_VALUES + BODY_VALUES_PER_TOKEN * self.max_model_len

    @property
    def adapters(self) -> dict[str, int]:
        """Names of the loaded LoRA adapters, each with its number."""
        return self.engine.core.adapters

    def adapter_of(self, model: str | None) -> str | None:
        """Return the adapter that a model name selects; None for the model itself.

        Raises:
            ApiError: no model or adapter has this name.
        """
        if model is None or model in self.names:
            return None
        if model in self.adapters:
            return model
        served = ", ".join([*self.names, *self.adapters])
        raise ApiError(
            f"the model {model[:100]!r} was asked for, but this server has {served}: name one of those.",
            status=404,
            param="model",
            code="model_not_found",
        )

    async def ids_of(
        self,
        prompt: Prompt,
        *,
        special: bool,
        param: str,
        room: int = 1,
        truncate: int | None = None,
        keep: Literal["first", "last"] = "last",
    ) -> list[int]:
        """Return a prompt's token ids, checked for their number.

        Args:
            prompt: a text or token ids.
            special: add the special tokens that the checkpoint puts around texts.
            param: the field that holds the prompt.
            room: tokens of the context that are left for an answer.
            truncate: cut a longer prompt to so many tokens; -1 is as many as fit; None cuts nothing.
            keep: which of its tokens a cut prompt keeps.

        Raises:
            ApiError, RequestError: the prompt is empty or too long.
        """
        most = self.most_prompt_tokens(room)
        wanted = most if truncate in (None, -1) else truncate
        assert wanted is not None
        if not isinstance(prompt, str):
            ids = prompt if truncate is None else kept(prompt, wanted, keep)
        elif truncate is None:
            ids = await self.tokens.encode(prompt, special=special, most=most, param=param)
        else:
            read = TRUNCATED * most
            ids = await self.tokens.encode_cut(prompt, wanted, keep, special=special, most=read, param=param)
        self.check_length(ids, param, room)
        return ids

    def check_length(self, ids: Sequence[int], param: str, room: int = 1) -> None:
        """Check a prompt's length: `room` tokens of the context are left for an answer.

        Raises:
            ApiError: the prompt is empty or too long.
        """
        if not ids:
            raise ApiError(f"{param} has no tokens, but the model needs at least one: pass some text.", param=param)
        most = self.most_prompt_tokens(room)
        if len(ids) > most:
            raise ApiError(
                f"{param} has {len(ids):,} tokens, but this server reads at most {most:,} of its context of "
                f"{self.max_model_len:,}: shorten it.",
                param=param,
                code="context_length_exceeded",
            )

    def check_choices(self, prompts: int, sequences: int, name: str = "n") -> None:
        """Check the number of sequences of one request.

        Args:
            prompts: number of prompts.
            sequences: of each prompt.
            name: the field that asks for these.

        Raises:
            ApiError: there are more than `max_choices`.
        """
        most = self.settings.max_choices
        if prompts * sequences > most:
            raise ApiError(
                f"{name} is {sequences} with {prompts} prompts, which is {prompts * sequences} sequences, but one "
                f"request may have {most}: ask for fewer.",
                param=name if sequences > 1 else "prompt",
            )

    def check_inputs(self, count: int) -> None:
        """Check the number of embeddings of one request.

        Raises:
            ApiError: there are too many inputs.
        """
        if count > MAX_INPUTS:
            raise ApiError(
                f"input holds {count:,} texts, but one request may have {MAX_INPUTS:,}: send several requests.",
                param="input",
            )

    def priority_of(self, asked: int | None) -> int:
        """Return a request's priority, which is behind all others for lines of batches. Clients may set it only if the
        settings allow it.

        Raises:
            ApiError: a priority was set but is not allowed.
        """
        if asked and not self.settings.allow_priority:
            raise ApiError(
                f"priority is {asked}, but this server treats all clients alike: leave it out, or start the server "
                "with --allow-priority.",
                param="priority",
                code="unsupported_field",
            )
        return max(asked or 0, 0) + BACKGROUND_PRIORITY if BACKGROUND.get() else asked or 0

    async def submit(
        self, prompts: Sequence[list[int]], params: SamplingParams, request: Generation, *, adapter: str | None
    ) -> OutputStreams:
        """Submit a request's prompts to the engine: either all of them or none."""
        priority = self.priority_of(request.priority)
        if request.use_beam_search:
            arrival, options = ARRIVAL.get(time.monotonic()), {"adapter": adapter, "priority": priority}
            left = partial(self._left, arrival)
            begun = await begin_beams(self.engine, self.tokens, prompts, params, request, options, left)
            return self._watched(begun, params.n, arrival)
        if params.bad_words:
            params = replace(params, bad_words=await self.tokens.bad_words(params.bad_words))
        return await self._submit(prompts, params, adapter=adapter, priority=priority, cache_salt=request.cache_salt)

    async def embed(self, prompts: Sequence[list[int]], pooling: AskedPooling, *, adapter: str | None) -> OutputStreams:
        """Submit prompts for embedding."""
        params, priority = SamplingParams(max_tokens=1), self.priority_of(None)
        return await self._submit(prompts, params, adapter=adapter, priority=priority, pooling=pooling)

    async def _submit(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        adapter: str | None,
        priority: int = 0,
        cache_salt: str | None = None,
        pooling: AskedPooling | None = None,
    ) -> OutputStreams:
        arrival, background = ARRIVAL.get(time.monotonic()), BACKGROUND.get()
        if background and params.guided is not None and not self.engine.core.guides.is_compiled(params.guided):
            self.engine.check_accepting()
            async with self._compiling:  # one, so that requests whose client waits find a compiler free
                await self.engine.compile_guide(params.guided)
        submitted = await self.engine.submit_all(
            prompts,
            params,
            priority=priority,
            adapter=adapter,
            pooling=pooling,
            cache_salt=cache_salt,
            timeout=self._left(arrival),
            client=CLIENT.get()[0],
        )
        return self._watched(submitted, params.n, arrival)

    def _watched(self, submitted: Iterable[Any], each: int, arrival: float) -> OutputStreams:
        """Return submitted streams, with metrics, as those of a request; each has `each` sequences."""
        background = BACKGROUND.get()
        streams = OutputStreams([], each, None if background else self.settings.request_timeout)
        for stream in submitted:
            streams.add(stream, self.metrics.watch(arrival, each, timed=not background))
        return streams

    def _left(self, arrival: float) -> float | None:
        """Return the seconds that remain of the request's time limit; reading its prompt took part of it."""
        most = None if BACKGROUND.get() else self.settings.request_timeout
        return None if most is None else max(most - (time.monotonic() - arrival), 0.001)

    def close(self) -> None:
        """Stop the threads of long bodies and of the tokenizer."""
        self.bodies.close()
        self.tokens.close()


class OutputStreams:
    """The output streams of one HTTP request: one per prompt, with `each` sequences. Sequence j of prompt i has number
    i × `each` + j."""

    def __init__(self, streams: list[Any], each: int, timeout: float | None = None) -> None:
        self._streams = streams
        self._watches: list[RequestWatch] = []
        self.each, self._timeout = each, timeout
        self.usage = Usage()

    def add(self, stream: Any, watch: RequestWatch) -> None:
        """Add a prompt's stream."""
        self._streams.append(stream)
        self._watches.append(watch)

    async def deltas(self) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        """Yield (sequence number, delta) pairs as they come. Leaving the loop early aborts the unfinished requests.

        Raises:
            RequestTimeoutError: the request exceeded its time limit.
        """
        try:
            if len(self._streams) == 1:
                async for pair in self._of(0):
                    yield pair
            else:
                async with aclosing(_interleaved([self._of(i) for i in range(len(self._streams))])) as pairs:
                    async for pair in pairs:
                        yield pair
        except RequestTimeoutError as error:
            self._end("timeout")
            if self._timeout is None:
                raise
            raise RequestTimeoutError(  # the engine knows of what was left of it alone
                f"the request ran for {self._timeout:g} s, which is as long as one may: ask for fewer tokens, or try "
                "again when there is less to do."
            ) from error
        except (GeneratorExit, asyncio.CancelledError):
            self._end("abort")
            raise
        except BaseException:
            self._end("error")
            raise
        finally:
            self.close()

    async def _of(self, prompt: int) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        began = False
        async for delta in self._streams[prompt]:
            self._watches[prompt].see(delta)
            if not began:
                began = True
                self.usage.prompt += delta.num_prompt_tokens
                self.usage.cached += delta.num_cached_tokens
            self.usage.completion += len(delta.token_ids)
            yield prompt * self.each + delta.index, delta

    def _end(self, reason: str) -> None:
        for watch in self._watches:
            watch.end(reason)

    def close(self) -> None:
        """Abort unfinished requests."""
        self._end("abort")
        for stream in self._streams:
            stream.close()


async def _interleaved(
    sources: Sequence[AsyncGenerator[tuple[int, OutputDelta], None]],
) -> AsyncGenerator[tuple[int, OutputDelta], None]:
    """Yield the items of several iterators as they come; an error of one ends all."""
    running = {asyncio.ensure_future(anext(source)): source for source in sources}
    try:
        while running:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                source = running.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                running[asyncio.ensure_future(anext(source))] = source
                yield item
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for source in sources:
            await source.aclose()
