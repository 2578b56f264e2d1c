"""Runs several processes as one: prefixes their lines with their labels and returns one exit status. The first
process that fails ends the others, a signal ends them all, and none outlives this process."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TextIO

from ttpu_core.errors import LaunchError
from ttpu_launch.guard import KILL, TERMINATE
from ttpu_launch.options import DEFAULT_GRACE

LAST_LINES = 20
"""Number of lines of a failed process's stderr that are repeated."""

LONGEST_LINE = 1 << 16
"""Bytes after which an unfinished line is printed in parts."""

LINGER_SECONDS = 5.0
"""Seconds for reading output and waiting for guards after all processes should have ended."""

POLL_SECONDS = 0.1
SSH_FAILED = 255
USAGE_ERROR = 2
"""The exit code of a command line or an argument that is refused: another start would be refused as well."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Task:
    """One process. `command` runs in `directory` with `environment` added to its machine's environment. `guard` is
    the argv that starts the guard, through ssh for another machine. `label` is the prefix of its lines."""

    label: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    directory: str
    guard: tuple[str, ...] = (sys.executable, "-m", "ttpu_launch.guard")
    host: str | None = None

    @property
    def name(self) -> str:
        """The name in messages: `process 1`, `process 1 on tpu-b`."""
        return f"process {self.label}" + (f" on {self.host}" if self.host else "")


@dataclass
class _Running:
    """A task that was started, and its output so far."""

    task: Task
    process: subprocess.Popen[bytes]
    code: int | None = None
    halves: dict[int, bytes] = field(default_factory=dict)
    errors: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))

    def end(self, word: bytes) -> None:
        """Send TERMINATE or KILL to the guard."""
        assert self.process.stdin is not None
        with suppress(OSError):  # it has ended already
            os.write(self.process.stdin.fileno(), word)


def supervise(tasks_of: Callable[[int], Sequence[Task]], restarts: int = 0, grace: float = DEFAULT_GRACE) -> int:
    """Run all tasks until they end. Their lines are passed on to stdout and stderr as they come. After one has failed,
    all are started again, unless its exit code is that of a wrong command line or a refused argument, 2; a signal to
    this process ends them for good.

    Args:
        tasks_of: number of the restart, 0 the first time → the tasks.
        restarts: how often they are started again.
        grace: seconds from SIGTERM to SIGKILL.

    Returns:
        0, or the exit code of the first task that failed (128 + N if signal N ended it), or 128 + N if signal N was
        sent to this process.

    Raises:
        LaunchError: a guard cannot be started, for example without ssh; processes that were started before are
            ended.
    """
    code = 0
    for number in range(restarts + 1):
        supervisor = _Supervisor(tasks_of(number), grace)
        code = supervisor.run()
        if code in (0, USAGE_ERROR) or supervisor.was_signalled or number == restarts:
            break
        _write(sys.stderr, f"ttpu launch: all processes are started again, restart {number + 1} of {restarts}\n")
    return code


class _Supervisor:
    def __init__(self, tasks: Sequence[Task], grace: float) -> None:
        self._tasks, self._grace = tasks, grace
        self._running: list[_Running] = []
        self._selector = selectors.DefaultSelector()
        self._failed: _Running | None = None
        self._signals: list[int] = []
        self._ending_since: float | None = None

    @property
    def was_signalled(self) -> bool:
        """Whether a signal was sent to this process."""
        return bool(self._signals)

    def run(self) -> int:
        with self._handling_signals():
            try:
                for task in self._tasks:
                    if not self._signals:
                        self._start(task)
                while self._open():
                    self._read(POLL_SECONDS)
                    self._look()
                self._finish_lines()
            finally:  # no process survives a bug here or a closed stdout
                self._abandon()
        if self._failed is not None:
            self._explain(self._failed)
            return self._failed.code or 1
        return 128 + self._signals[0] if self._signals else 0

    def _start(self, task: Task) -> None:
        try:
            process = subprocess.Popen(
                task.guard,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches only this process, which then ends the others in order
                bufsize=0,
            )
        except OSError as error:
            option = " or pass another by --ssh" if task.host else ""
            raise LaunchError(
                f"{task.name} was to be started by {task.guard[0]!r}, which cannot be run ({error.strerror}): install "
                f"it{option}."
            ) from error
        running = _Running(task, process)
        self._running.append(running)
        header = {
            "command": list(task.command),
            "env": dict(task.environment),
            "cwd": task.directory,
            "grace": self._grace,
        }
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        with suppress(OSError):  # it has ended; its exit code and stderr say why
            _write_all(process.stdin.fileno(), json.dumps(header).encode() + b"\n")
        for stream in (process.stdout, process.stderr):
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, running)

    def _open(self) -> bool:
        """Whether there is anything to wait for."""
        if any(running.code is None for running in self._running):
            return True
        if not self._selector.get_map():
            return False
        # A process that left its group can keep a pipe open indefinitely.
        self._ending_since = self._ending_since or time.monotonic()
        return time.monotonic() - self._ending_since < LINGER_SECONDS + self._grace

    def _read(self, seconds: float) -> None:
        if not self._selector.get_map():
            time.sleep(seconds)
            return
        for key, _ in self._selector.select(seconds):
            running: _Running = key.data
            try:
                chunk = os.read(key.fd, LONGEST_LINE)
            except BlockingIOError:
                continue
            is_error = key.fileobj is running.process.stderr
            if not chunk:
                self._selector.unregister(key.fileobj)
            self._show(running, is_error, chunk)

    def _show(self, running: _Running, is_error: bool, chunk: bytes) -> None:
        """Write whole lines. The rest is kept until its line ends; an empty chunk marks the end of the stream."""
        lines = (running.halves.pop(is_error, b"") + chunk).split(b"\n")
        rest = lines.pop()
        if rest and chunk and len(rest) < LONGEST_LINE:
            running.halves[is_error] = rest
        elif rest:
            lines.append(rest)
        if not lines:
            return
        texts = [line.decode(errors="replace").removesuffix("\r") for line in lines]
        if is_error:
            running.errors.extend(texts)
        _write(sys.stderr if is_error else sys.stdout, "".join(f"[{running.task.label}] {text}\n" for text in texts))

    def _look(self) -> None:
        """Record which processes have ended, and end the others if necessary."""
        for running in self._running:
            if running.code is None and (code := running.process.poll()) is not None:
                running.code = 128 - code if code < 0 else code
                if running.code and self._failed is None and not self._signals and self._ending_since is None:
                    self._failed = running
        if (self._failed is not None or self._signals) and self._ending_since is None:
            self._ending_since = time.monotonic()
            for running in self._running:
                running.end(TERMINATE)
        elif len(self._signals) > 1 and self._ending_since is not None:
            self._kill()
        if self._ending_since is not None and time.monotonic() - self._ending_since > self._grace + LINGER_SECONDS:
            self._kill()

    def _kill(self) -> None:
        """Kill processes that did not end: a guard that hangs, or an ssh whose other end is gone."""
        for running in self._running:
            if running.code is None:
                running.end(KILL)
                if time.monotonic() - (self._ending_since or 0.0) > self._grace + LINGER_SECONDS:
                    running.process.kill()

    def _finish_lines(self) -> None:
        for running in self._running:
            for is_error in (False, True):
                self._show(running, is_error, b"")

    def _abandon(self) -> None:
        """Close the leash of every process and wait until the guards have ended them."""
        for running in self._running:
            assert running.process.stdin is not None
            running.process.stdin.close()
        until = time.monotonic() + self._grace + LINGER_SECONDS
        for running in self._running:
            try:
                running.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                running.process.kill()
                running.process.wait()
            for stream in (running.process.stdout, running.process.stderr):
                if stream is not None:
                    stream.close()
        self._selector.close()

    def _explain(self, failed: _Running) -> None:
        others = len(self._running) - 1
        by = _signal_name(failed.code)
        end = f"was ended by {by}" if by else f"ended with exit code {failed.code}"
        if failed.task.host and failed.code == SSH_FAILED:
            end += " (ssh's own: it could not connect, or lost the connection)"
        rest = f", so the other{f' {others} were' if others > 1 else ' was'} ended too" if others else ""
        lines = [line for line in failed.errors if line.strip()]
        text = f"ttpu launch: {failed.task.name} {end}{rest}" + (":\n" if lines else ", and left nothing on stderr.\n")
        if lines:
            text += f"  the last of its stderr ({len(lines)} line{'s'[: len(lines) != 1]}):\n"
            text += "".join(f"  | {line}\n" for line in lines)
        _write(sys.stderr, text)

    @contextmanager
    def _handling_signals(self) -> Iterator[None]:
        def remember(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        before: dict[Any, Any] = {number: signal.signal(number, remember) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _write(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _signal_name(code: int | None) -> str | None:
    """The name of the signal in an exit code of 128 + N, or None."""
    try:
        return signal.Signals((code or 0) - 128).name
    except ValueError:
        return None
