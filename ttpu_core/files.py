"""Files that are whole or not there. In: a path and a text, or bytes; out: the file, which a reader never sees half
written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: str | os.PathLike[str], content: str | bytes, *, mode: int = 0o666, replace: bool = True) -> None:
    """Write a file beside its place, then put it there.

    Args:
        content: bytes as they are, a text in UTF-8.
        mode: its permissions, less those that the process's umask takes away.
        replace: whether a file that is there already makes room.

    Raises:
        FileExistsError: there is one, and it may not be replaced.
        OSError: it cannot be written; nothing is left behind.
    """
    target = Path(path).expanduser()
    if target.is_dir():
        raise IsADirectoryError(0, "it is a directory", str(target))
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.absolute().parent)
    unfinished = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.chmod(mode & ~_umask())  # mkstemp lets nobody else in
        if replace:
            unfinished.replace(target)
        else:
            os.link(unfinished, target)  # unlike a rename, refuses what is there, even if it has just come
    finally:
        unfinished.unlink(missing_ok=True)


def check_target(path: str | os.PathLike[str]) -> None:
    """That a file can be written there, as far as that can be told before there is anything to write.

    Raises:
        OSError: it is a directory, or its folder is missing or may not be written to.
    """
    target = Path(path).expanduser()
    folder = target.absolute().parent
    if target.is_dir():
        raise IsADirectoryError(0, "it is a directory", str(target))
    if not folder.is_dir():
        raise NotADirectoryError(0, "its folder is not there", str(folder))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(0, "its folder may not be written to", str(folder))


def _umask() -> int:
    """The process's umask, without changing it for a moment where the system can say it."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    except (OSError, ValueError):
        pass
    mask = os.umask(0)
    os.umask(mask)
    return mask
