"""Keeps what gloo writes to descriptor 1 apart from what a program prints."""

from __future__ import annotations

import atexit
import io
import os
import re
import sys
import threading
from contextlib import suppress

_WORDS = rb"\[Gloo\] Rank|is connected to|peer ranks\.|Expected number of connected peer ranks is :"
GLOO_PEERS = re.compile(rb"[\d\s]*((" + _WORDS + rb")[\d\s]*)+")
"""A line of gloo's; threads write several at once, so that pieces of them stand in one. A line without its words, such
as a number, is somebody else's."""

DRAIN_SECONDS = 1.0
"""How long the end waits for what stands in the pipe; a child that is still running holds it open."""


def keep_stdout() -> None:
    """Give Python's stdout a descriptor of its own, because gloo writes to descriptor 1 how many peers it found, in the
    middle of what a user asked for. What else is written there goes to stderr: that of C libraries, and of a child
    process unless it is given `stdout=sys.stdout`."""
    stream = sys.stdout
    try:
        if not isinstance(stream, io.TextIOWrapper) or stream.fileno() != 1:
            return
        stream.flush()
        own = os.dup(1)
        reading, writing = os.pipe()
        os.dup2(writing, 1)
        os.close(writing)
    except (OSError, ValueError):  # closed, or replaced by something without a descriptor
        return
    reader = threading.Thread(target=_pass_on, args=(reading,), name="descriptor 1", daemon=True)
    reader.start()
    raw = os.fdopen(own, "wb", 0 if stream.write_through else -1)
    sys.stdout = kept = io.TextIOWrapper(
        raw,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    atexit.register(_give_back, kept, reader)


def _give_back(kept: io.TextIOWrapper, reader: threading.Thread) -> None:
    """Let descriptor 1 be stdout again, which closes the pipe, and wait for what still stands in it."""
    try:
        kept.flush()
        os.dup2(kept.fileno(), 1)
    except (OSError, ValueError):  # stdout was closed
        with suppress(OSError):
            os.close(1)
    reader.join(DRAIN_SECONDS)


def _pass_on(reading: int) -> None:
    with os.fdopen(reading, "rb") as lines:
        for line in lines:
            if GLOO_PEERS.fullmatch(line) is None:
                with suppress(OSError):  # without a stderr it still reads, or whoever writes would wait for ever
                    os.write(2, line)
