"""Writes files atomically: a reader sees the whole file or none. Says in a sentence why a model cannot be written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ttpu_core.errors import CheckpointError, TTPUError

DISK_FULL = ("No space left on device", "Disk quota exceeded", "File too large")
"""What systems say of a full disk, deep in the words of libraries."""


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


@contextmanager
def writing_model(folder: Path) -> Iterator[None]:
    """Say in one sentence what stopped the files of a model.

    Raises:
        CheckpointError: the disk is full, one of them cannot be written, or a file from elsewhere cannot be read.
    """
    try:
        yield
    except TTPUError:
        raise
    except Exception as error:
        reason = first_line(error)
        if not isinstance(error, OSError) and reason not in DISK_FULL:  # safetensors has its own errors for a full disk
            raise
        if reason not in DISK_FULL and names_other_file(error, folder):
            raise CheckpointError(
                f"a model was to be written to {folder}, but a file that it needs cannot be read ({reason}): bring "
                "that file back, or make it readable."
            ) from error
        raise CheckpointError(
            f"a model was to be written to {folder}, but that failed ({reason}): make room, or name another folder."
        ) from error


def names_other_file(error: Exception, folder: Path) -> bool:
    """Whether an error names a file, and that is not in a folder."""
    name = error.filename if isinstance(error, OSError) else None
    return isinstance(name, str | bytes) and not Path(os.fsdecode(name)).absolute().is_relative_to(folder.absolute())


def first_line(error: Exception) -> str:
    """An error's kind and the first line of its words; of a full disk only the words that say so."""
    words = str(error).strip()
    for known in DISK_FULL:
        if known in words:
            return known
    return f"{type(error).__name__}: {words.splitlines()[0][:200] if words else ''}"


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
