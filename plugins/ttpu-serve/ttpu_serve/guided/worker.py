"""A process that compiles grammars and computes their masks for `ttpu_serve.guided.isolated`:

    python -m ttpu_serve.guided.worker STACK_BYTES MEMORY_BYTES COMPILE_FD… MASK_FD

It answers on each socket in a thread of its own, so that neither masks nor quick grammars wait for a slow compilation.
It ends when its parent does."""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ttpu_core.errors import RequestError, TTPUError
from ttpu_serve.guided.grammar import refusal
from ttpu_serve.guided.matchers import Vocabulary, compiled

TRIED_TOKENS = 8
"""Of a grammar that is tried out."""


class Work:
    """The grammars that this process knows, and the matchers that are open."""

    def __init__(self) -> None:
        self._tokenizer: Any = None
        self._starts: dict[bytes, Any] = {}
        self._open: dict[int, Any] = {}

    def thread(self) -> int:
        """The number of the thread that answers on this socket."""
        return threading.get_native_id()

    # -- compilations --

    def vocabulary(self, vocabulary: Vocabulary) -> int:
        """Take the vocabulary, before anything else; return the bytes that this process holds.

        Raises:
            MissingDependencyError: llguidance is not installed.
        """
        self._tokenizer = vocabulary.compiled()
        return held_bytes()

    def compile(self, key: bytes, guided: Any) -> tuple[str, int]:
        """Compile a grammar; return why it is refused, or nothing, and the bytes that this process holds."""
        try:
            self._starts[key] = compiled(self._tokenizer, guided)
        except RequestError as error:
            return str(error), held_bytes()
        return "", held_bytes()

    def try_out(self, key: bytes, guided: Any, most_seconds: float) -> tuple[str, int]:
        """Compile a grammar, follow it for a few tokens, and forget it; return why it is refused, or nothing, and the
        bytes that this process holds. One that cannot go on, or of which a token takes longer than `most_seconds`, is
        refused."""
        reason, held = self.compile(key, guided)
        start = self._starts.pop(key, None)
        if not reason and start is not None:
            slowest, error = followed(start)
            if slowest > most_seconds:
                error = error or f"finding the next tokens takes longer than {most_seconds:g} seconds"
            reason = str(refusal(guided, error)) if error else ""
        return reason, held

    # -- masks --

    def open(self, number: int, key: bytes, tokens: list[int], dropped: list[int]) -> tuple[Any, ...]:
        """Open a matcher after some tokens. Matchers with the numbers `dropped` are closed."""
        for each in dropped:
            self._open.pop(each, None)
        start = self._starts.get(key)
        if start is None:
            return ()
        self._open[number] = start.deep_copy()
        return self.consume(number, tokens)

    def mask(self, number: int) -> tuple[Any, ...]:
        """The mask, and the matcher's state."""
        return self._state(number, self._open[number].compute_bitmask())

    def consume(self, number: int, tokens: list[int]) -> tuple[Any, ...]:
        """How many tokens were consumed, and the matcher's state."""
        return self._state(number, self._open[number].try_consume_tokens(tokens) if tokens else 0)

    def rollback(self, number: int, count: int) -> tuple[Any, ...]:
        """Take tokens back; the matcher's state."""
        return self._state(number, self._open[number].rollback(count))

    def _state(self, number: int, value: Any) -> tuple[Any, ...]:
        matcher = self._open[number]
        error = matcher.get_error() if matcher.is_error() else ""
        return value, error, matcher.is_stopped(), matcher.is_accepting()


def followed(start: Any) -> tuple[float, str]:
    """Follow a grammar for a few tokens, each drawn from its mask. Return the seconds of the processor that the slowest
    of them took, and why the grammar cannot go on after them, or nothing."""
    draw, matcher, slowest = random.Random(0), start.deep_copy(), 0.0
    for _ in range(TRIED_TOKENS):
        began = time.thread_time()
        mask = matcher.compute_bitmask()
        taken = time.thread_time() - began
        words = [(place, word) for place, word in enumerate(memoryview(mask).cast("I")) if word]
        if matcher.is_error() or matcher.is_stopped() or not words:
            break
        place, word = draw.choice(words)
        token = draw.choice([place * 32 + bit for bit in range(32) if word >> bit & 1])
        began = time.thread_time()
        consumed = matcher.try_consume_tokens([token])
        slowest = max(slowest, taken + time.thread_time() - began)
        if consumed != 1:  # an end of sequence, unless there is an error
            break
    return slowest, matcher.get_error() if matcher.is_error() else ""


def held_bytes() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def answer(channel: Connection, work: Work) -> None:
    """Answer the calls on a channel until it is closed: ("name", *arguments) → (True, result) or (False, sentence)."""
    while True:
        try:
            name, *arguments = channel.recv()
        except (EOFError, OSError):
            os._exit(0)
        function: Callable[..., Any] = getattr(work, name)
        try:
            reply = True, function(*arguments)
        except TTPUError as error:
            reply = False, str(error)
        except Exception as error:  # a mistake here must not look like a dead process
            reply = False, f"{type(error).__name__}: {error}"
        channel.send(reply)


def main() -> None:
    """Answer on the sockets whose descriptors are the arguments."""
    stack, memory, *descriptors = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory if hard < 0 else min(memory, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    threading.stack_size(stack)
    work = Work()
    threads = [threading.Thread(target=answer, args=(Connection(fd), work)) for fd in descriptors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
