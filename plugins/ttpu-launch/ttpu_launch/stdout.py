"""Keeps gloo's output on descriptor 1 apart from a program's own output."""

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
"""A line that gloo wrote. Its threads write at the same time, so a line may hold pieces of several messages. A line
without gloo's words, such as a number, is the program's."""

DRAIN_SECONDS = 1.0
"""Seconds to wait at exit for data in the pipe. A child process that is still running keeps the pipe open."""


def keep_stdout() -> None:
    """Give Python's stdout its own descriptor, because gloo writes the number of its peers to descriptor 1, into the
    middle of the program's output. All other output on descriptor 1 goes to stderr: that of C libraries, and of
    child processes that are not given `stdout=sys.stdout`."""
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
    """Make descriptor 1 stdout again, which closes the pipe, and wait for the data in it."""
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
                with suppress(OSError):  # keeps reading without a stderr, or writers would block
                    os.write(2, line)
