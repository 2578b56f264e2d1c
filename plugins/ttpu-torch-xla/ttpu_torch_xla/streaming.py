"""The stock model as the command line needs it. In: a prompt and transformers' arguments; out: an event per token, as
`generate` hands tokens to its streamer, and timings."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import torch

from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_core.generated import FinishReason, StreamEvent, Timings
from ttpu_core.text_stream import TextStream
from ttpu_torch_xla.adapter import Adapter

Prompt = str | list[dict[str, str]]
DEFAULT_MAX_NEW_TOKENS = 128
NOT_DONE = ("logprobs", "presence_penalty", "frequency_penalty")
"""Arguments that other backends' `stream` takes and transformers' `generate` does not."""


class _Stopped(Exception):
    """Nobody wants the next token."""


@dataclass
class _Tokens:
    """What `generate` calls a streamer: tokens go from its thread to whoever iterates."""

    queue: SimpleQueue[int | BaseException | None] = field(default_factory=SimpleQueue)
    cancelled: Event = field(default_factory=Event)
    prompt_seen: bool = False

    def put(self, value: Any) -> None:
        if self.cancelled.is_set():
            raise _Stopped
        if not self.prompt_seen:  # the first call hands over the prompt
            self.prompt_seen = True
            return
        for token in torch.as_tensor(value).reshape(-1).tolist():
            self.queue.put(int(token))

    def end(self) -> None:
        """Nothing: the thread's end says that no more comes."""


@dataclass
class _Clock:
    """Seconds of prefill (up to the first token), of decoding, and of compiling, which is part of neither."""

    adapter: Adapter
    timings: Timings
    began: float = field(default_factory=time.perf_counter)
    compiled_before: float = field(init=False)

    def __post_init__(self) -> None:
        self.compiled_before = self.adapter.counters().compile_seconds

    def token(self) -> None:
        """A token came."""
        timings = self.timings
        compiled = self.adapter.counters().compile_seconds - self.compiled_before
        busy = time.perf_counter() - self.began - compiled
        timings.compile_seconds = compiled
        if timings.prefill_seconds:
            timings.decode_tokens += 1
            timings.decode_seconds = max(0.0, busy - timings.prefill_seconds)
        else:
            timings.prefill_seconds = max(1e-9, busy)


class StreamingModel:
    """A prepared transformers model that streams its answers.

    Attributes:
        model: the transformers model, with `generate` of this backend.
        tokenizer: the checkpoint's, or None.
        timings: of loading and of the last answer.
    """

    def __init__(self, model: Any, load_seconds: float) -> None:
        self.model, self.tokenizer = model, model.ttpu.tokenizer
        self.timings = Timings(load_seconds=load_seconds)

    def stream(self, prompt: Prompt, **arguments: Any) -> Iterator[StreamEvent]:
        """Yield one event per new token; arguments are transformers' `generate`'s, and `seed`.

        Raises:
            RequestError: no tokenizer, or a prompt without tokens.
            UnsupportedError: an argument that this backend does not know.
        """
        given = {name: value for name, value in arguments.items() if value is not None}
        for name in NOT_DONE:
            if given.pop(name, None):
                raise UnsupportedError(
                    f"{name} was asked for, but the torch_xla backend's generate is transformers', which has no such "
                    "argument: leave it out, or use backend='jax'."
                )
        if self.tokenizer is None:
            raise RequestError(
                f"{'a chat' if isinstance(prompt, list) else 'text'} was given, but the checkpoint has no tokenizer: "
                "copy its tokenizer files beside the weights."
            )
        ids = self._ids(prompt)
        seed = given.pop("seed", None)
        if seed is not None:
            torch.manual_seed(seed)
        stops = tuple(given.pop("stop_strings", None) or ())
        if "max_length" not in given and self.model.generation_config.max_new_tokens is None:
            given.setdefault("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
        return self._events(ids, stops, given)

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            ids = self.tokenizer(prompt)["input_ids"]
        else:
            ids = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
        if not ids:
            raise RequestError("the prompt has no tokens: pass some text.")
        return [int(token) for token in ids]

    def _events(self, ids: Sequence[int], stops: tuple[str, ...], given: dict[str, Any]) -> Iterator[StreamEvent]:
        self.timings = Timings(load_seconds=self.timings.load_seconds, prefill_tokens=len(ids))
        tokens, text = _Tokens(), TextStream(self.tokenizer, ids, stops)
        thread = Thread(target=self._run, args=(ids, tokens, given), daemon=True)
        ends = self._end_ids(given)
        clock = _Clock(self.model.ttpu.adapter, self.timings)
        thread.start()
        held: StreamEvent | None = None  # the last event says why it ended, so that one is always held back
        try:
            while (token := tokens.queue.get()) is not None:
                if isinstance(token, BaseException):
                    raise token
                clock.token()
                if held is not None:
                    yield held
                reason: FinishReason | None = "stop" if token in ends else None
                written = text.finish() if reason else text.push(token)
                held = StreamEvent(written, token, finish_reason="stop" if text.stopped else reason)
                if held.finish_reason:
                    break
            if held is not None:
                last = held if held.finish_reason else StreamEvent(held.text + text.finish(), held.token_id)
                yield last if last.finish_reason else StreamEvent(last.text, last.token_id, finish_reason="length")
        finally:
            tokens.cancelled.set()
            thread.join()

    def _run(self, ids: Sequence[int], tokens: _Tokens, given: dict[str, Any]) -> None:
        try:
            self.model.generate(torch.tensor([list(ids)]), streamer=tokens, **given)
            tokens.queue.put(None)
        except _Stopped:
            pass
        except BaseException as error:
            tokens.queue.put(error)

    def _end_ids(self, given: dict[str, Any]) -> frozenset[int]:
        ends = given.get("eos_token_id", self.model.generation_config.eos_token_id)
        return frozenset(() if ends is None else (ends,) if isinstance(ends, int) else ends)
