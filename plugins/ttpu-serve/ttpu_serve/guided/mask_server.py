"""A process that computes masks, which starts in the background, and is given grammars there as well."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress

from ttpu_core.generation.sampling_params import GuidedDecoding
from ttpu_serve.guided.process import GuideProcess, GuideProcessError

WAITED_SECONDS = 1.0
"""That all outputs together wait, after a process took over, for grammars that it does not know yet."""


class MaskServer:
    """A `GuideProcess` for masks, and which grammars it knows. All its methods are thread-safe."""

    def __init__(self, start: Callable[[], GuideProcess]) -> None:
        """
        Args:
            start: starts the process; called in the background.
        """
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ttpu-guide-masks")
        self._process = self._thread.submit(start)
        self._lock = threading.Lock()
        self._known: set[bytes] = set()
        self._given: dict[bytes, Future[None]] = {}
        self._left = WAITED_SECONDS
        self.empty = 0
        """Bytes that the process held without grammars."""

    @property
    def process(self) -> GuideProcess:
        """The process; waits until it has started.

        Raises:
            GuideProcessError: it did not start.
            MissingDependencyError: llguidance is not installed.
            RequestError: the engine is closed, or the bytes of the tokenizer's tokens are unknown.
        """
        process = self._process.result()
        self.empty = self.empty or process.held
        return process

    @property
    def alive(self) -> bool:
        """Whether the process runs, or starts."""
        return not self._process.done() or (self._process.exception() is None and self._process.result().alive)

    @property
    def started(self) -> bool:
        """Whether the process runs."""
        return self._process.done() and self.alive

    @property
    def full(self) -> bool:
        """Whether the process holds more than it should."""
        return self.started and self.process.full

    def swollen(self, most: int) -> bool:
        """Whether the process holds more than `most` bytes beside what it held without grammars."""
        return self.started and self.process.held > self.empty + most

    def knows(self, key: bytes) -> bool:
        """Whether masks of a grammar can be computed at once."""
        return key in self._known

    def compile(self, key: bytes, guided: GuidedDecoding) -> None:
        """Let the process compile a grammar that it does not know.

        Raises:
            GuideProcessError: it cannot, although another process could.
        """
        if key in self._known:
            return
        reason = self.process.compile(key, guided)
        if reason:
            raise GuideProcessError(reason)
        self._known.add(key)

    def give(self, key: bytes, guided: GuidedDecoding) -> Future[None]:
        """Let the process compile a grammar in the background. The result is a `GuideProcessError` if it cannot."""
        with self._lock:
            if key not in self._given:
                try:
                    self._given[key] = self._thread.submit(self.compile, key, guided)
                except RuntimeError:  # it was ended
                    self._given[key] = Future()
                    self._given[key].set_exception(GuideProcessError("its process ended"))
            return self._given[key]

    def wait_for(self, key: bytes, guided: GuidedDecoding) -> None:
        """Wait until the process knows a grammar, for as long as outputs may wait.

        Raises:
            GuideProcessError: it does not by then, or cannot.
        """
        if key in self._known:
            return
        self.process  # noqa: B018 - waits until it has started, for which there is nothing else to do
        began = time.monotonic()
        try:
            self.give(key, guided).result(max(self._left, 0.0))
        except CancelledError as error:
            raise GuideProcessError("its process ended") from error
        except TimeoutError as error:
            raise GuideProcessError("another grammar ended its process, and reading it again takes long") from error
        finally:
            self._left -= time.monotonic() - began

    def retire(self) -> None:
        """End the process when it computes no mask."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self.started:
            self._process.result().retire()

    def kill(self) -> None:
        """End the process, also one that starts."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        with suppress(Exception):
            self._process.result().kill()
