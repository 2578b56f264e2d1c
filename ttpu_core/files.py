"""Writes files atomically: a reader sees the whole file or none."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: str | os.PathLike[str], content: str | bytes, *, mode: int = 0o666, replace: bool = True) -> None:
    """Write a file under a temporary name in the same folder, then move it to its path.

    Args:
        path: the file.
        content: bytes, or text that is encoded in UTF-8.
        mode: the file's permissions before the process's umask.
        replace: whether an existing file is replaced.

    Raises:
        FileExistsError: the file exists and may not be replaced.
        IsADirectoryError: the path is a directory.
        OSError: the file cannot be written; nothing is left behind.
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
        unfinished.chmod(mode & ~_umask())  # mkstemp gives access to the owner only
        if replace:
            unfinished.replace(target)
        else:
            os.link(unfinished, target)  # unlike a rename, fails if the target exists, without a race
    finally:
        unfinished.unlink(missing_ok=True)


def check_target(path: str | os.PathLike[str]) -> None:
    """Check early that a file can be written at this path.

    Raises:
        IsADirectoryError: the path is a directory.
        NotADirectoryError: its folder does not exist.
        PermissionError: its folder is not writable.
    """
    target = Path(path).expanduser()
    folder = target.absolute().parent
    if target.is_dir():
        raise IsADirectoryError(0, "it is a directory", str(target))
    if not folder.is_dir():
        raise NotADirectoryError(0, "its folder does not exist", str(folder))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(0, "its folder is not writable", str(folder))


def _umask() -> int:
    """The process's umask. It is read from /proc if possible, since `os.umask` changes it for a moment."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    except (OSError, ValueError):
        pass
    mask = os.umask(0)
    os.umask(mask)
    return mask
