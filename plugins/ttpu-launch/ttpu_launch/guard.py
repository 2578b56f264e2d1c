"""Runs one command and ends it with its launcher, on this machine or at the far end of ssh. The first line on stdin is
JSON that describes the command. After it, stdin is a leash: when it closes, because the launcher closed it, was killed
or lost its connection, the guard ends the command's whole process group. It passes on the command's exit code.

The guard is a program of its own (`python -m ttpu_launch.guard`). It imports only the standard library, so that it
starts in a few hundredths of a second."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

TERMINATE, KILL = b"t", b"k"
"""Bytes on the leash: TERMINATE ends the command as if the leash had closed, KILL ends it without a grace period."""

CANNOT_RUN, NOT_FOUND = 126, 127  # exit codes of shells
PR_SET_PDEATHSIG = 1
POLL_SECONDS = 0.05


def main() -> int:
    """Run the command that stdin describes. Returns its exit code, or 128 + N if signal N ended it."""
    header = _read_header()
    if header is None:
        return CANNOT_RUN
    if not hasattr(os, "waitid"):
        print(f"processes cannot be watched on {os.uname().nodename}: its Python {sys.version.split()[0]} has no "
              "os.waitid, which needs 3.13 on macOS.", file=sys.stderr)  # fmt: skip
        return CANNOT_RUN
    # The guard ignores signals: it ends when the launcher ends, which closes the leash.
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    command, grace = list(header["command"]), float(header["grace"])
    try:
        child = subprocess.Popen(
            command,
            cwd=header["cwd"],
            env={**os.environ, **header["env"]},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    except OSError as error:
        where = header["cwd"] if error.filename == header["cwd"] else command[0]
        print(f"{where} cannot be {'entered' if where == header['cwd'] else 'run'} on "
              f"{os.uname().nodename}: {error.strerror}.", file=sys.stderr)  # fmt: skip
        return NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_RUN
    code = _wait(child.pid, grace)
    return 128 - code if code < 0 else code


def _read_header() -> dict[str, Any] | None:
    """The first line of stdin. It is read byte by byte, so that no later byte is consumed."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return None
        line += byte
    header: dict[str, Any] = json.loads(line)
    return header


def _die_with_parent() -> None:
    """In the child, before the command: restore default signal handling, and request SIGKILL if the guard is killed
    (Linux)."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait(pid: int, grace: float) -> int:
    """Wait for the command or for the end of the leash, and end the whole process group. Returns the exit code.

    The command is observed without being reaped, so that its group's number is not reused."""
    leash: list[int] = [0]
    kill_at: float | None = None
    while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
        if select.select(leash, [], [], POLL_SECONDS)[0]:
            word = _read_leash()
            leash = leash if word else []
            if word == KILL:
                kill_at = time.monotonic()
            elif kill_at is None:
                _signal(pid, signal.SIGTERM)
                kill_at = time.monotonic() + grace
        if kill_at is not None and time.monotonic() >= kill_at:
            _signal(pid, signal.SIGKILL)
    # Background processes of the command end with it.
    _signal(pid, signal.SIGTERM)
    ended_at = time.monotonic() + min(grace, 2.0)
    while _others(pid) and time.monotonic() < ended_at:
        time.sleep(POLL_SECONDS)
    _signal(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _read_leash() -> bytes:
    try:
        return os.read(0, 1)
    except OSError:
        return b""


def _signal(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # macOS reports "not permitted" for a group of zombies
        return


def _others(group: int) -> bool:
    """Whether the group has living members besides its ended leader. False outside Linux, where this is unknown."""
    try:
        numbers = [name for name in os.listdir("/proc") if name.isdecimal() and int(name) != group]  # noqa: PTH208
    except OSError:
        return False
    for number in numbers:
        try:
            with open(f"/proc/{number}/stat", "rb") as stat:  # noqa: PTH123
                fields = stat.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] not in (b"Z", b"X"):
            return True
    return False


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())
