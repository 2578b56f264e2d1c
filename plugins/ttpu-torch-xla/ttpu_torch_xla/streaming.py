"""Adapts the stock model to the command line: takes a prompt and transformers' arguments, and yields an event per
token, with timings."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import torch

from ttpu_core.errors import RequestError, TTPUError, UnsupportedError
from ttpu_core.generation.chat_template import chat_tokens
from ttpu_core.generation.detokenizer import TextStream
from ttpu_core.generation.events import FinishReason, StreamEvent, Timings
from ttpu_core.generation.options import stop_texts
from ttpu_torch_xla.generation.length import new_tokens
from ttpu_torch_xla.runtime import TorchRuntime

Prompt = str | list[dict[str, str]]
NOT_DONE: Mapping[str, tuple[Any, ...]] = {"logprobs": (), "presence_penalty": (0,), "frequency_penalty": (0,)}
"""Arguments that other backends' `stream` takes and transformers' `generate` does not, with values that ask for
nothing."""


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

    runtime: TorchRuntime
    timings: Timings
    began: float = field(default_factory=time.perf_counter)
    compiled_before: float = field(init=False)

    def __post_init__(self) -> None:
        self.compiled_before = self.runtime.counters().compile_seconds

    def token(self) -> None:
        """A token came."""
        timings = self.timings
        compiled = self.runtime.counters().compile_seconds - self.compiled_before
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
        timings: of loading and of the answer that began last.
    """

    def __init__(self, model: Any, load_seconds: float) -> None:
        self.model, self.tokenizer = model, model.ttpu.tokenizer
        self.timings = Timings(load_seconds=load_seconds)

    def stream(self, prompt: Prompt, **arguments: Any) -> Iterator[StreamEvent]:
        """Yield one event per new token; arguments are transformers' `generate`'s, and `seed`, which leaves torch's own
        random numbers as they were.

        Raises:
            RequestError: at once, for no tokenizer, a prompt without tokens, or one that leaves no room in the context;
                with the first event, for what transformers refuses.
            UnsupportedError: an argument that this backend does not know.
        """
        if not self.model.can_generate():
            self.model.generate()  # refused, with its reason
        given = {name: value for name, value in arguments.items() if value is not None}
        for name, neutral in NOT_DONE.items():
            if name in given and given.pop(name) not in neutral:
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
        stops = stop_texts(given.pop("stop_strings", ()))
        context = self.model.ttpu.architecture.spec.context
        given["max_new_tokens"] = new_tokens(len(ids), given, self.model.generation_config, context)
        given["max_length"] = None  # which the checkpoint may have, and transformers would warn of
        return self._events(ids, stops, given)

    def _ids(self, prompt: Prompt) -> list[int]:
        ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else chat_tokens(self.tokenizer, prompt)
        if not ids:
            raise RequestError("the prompt has no tokens: pass some text.")
        return [int(token) for token in ids]

    def _events(self, ids: Sequence[int], stops: tuple[str, ...], given: dict[str, Any]) -> Iterator[StreamEvent]:
        timings = Timings(load_seconds=self.timings.load_seconds, prefill_tokens=len(ids))
        self.timings = timings
        tokens, text = _Tokens(), TextStream(self.tokenizer, ids, stops)
        thread = Thread(target=self._run, args=(ids, tokens, given), daemon=True)
        ends = self._end_ids(given)
        clock = _Clock(self.model.ttpu.runtime, timings)
        thread.start()
        held: StreamEvent | None = None  # the last event says why it ended, so that one is always held back
        try:
            while (token := tokens.queue.get()) is not None:
                if isinstance(token, BaseException):
                    raise _refusal(token, given) if held is None else token
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
            token = None  # an error that was raised would otherwise hold this frame, and the frame the error
            tokens.cancelled.set()
            thread.join()

    def _run(self, ids: Sequence[int], tokens: _Tokens, given: Mapping[str, Any]) -> None:
        arguments = {name: value for name, value in given.items() if name != "seed"}
        try:
            with _seeded(given.get("seed")):
                self.model.generate(torch.tensor([list(ids)]), streamer=tokens, **arguments)
            tokens.queue.put(None)
        except _Stopped:
            pass
        except BaseException as error:
            tokens.queue.put(error)

    def _end_ids(self, given: dict[str, Any]) -> frozenset[int]:
        ends = getattr(given.get("generation_config"), "eos_token_id", None)
        ends = given.get("eos_token_id", self.model.generation_config.eos_token_id if ends is None else ends)
        return frozenset(() if ends is None else (ends,) if isinstance(ends, int) else ends)


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """With random numbers of this seed inside, and as if none had been drawn behind it."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _refusal(error: BaseException, given: Mapping[str, Any]) -> BaseException:
    """What `generate` raised before its first token, in one sentence where it is of the arguments."""
    if isinstance(error, TTPUError) or not isinstance(error, ValueError | TypeError):
        return error
    asked = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
    reason = " ".join(str(error).split()).partition(". ")[0].rstrip(".:")
    refused = RequestError(f"generate was given {asked}, but transformers refuses that ({reason}): correct it.")
    refused.__cause__ = error
    return refused
