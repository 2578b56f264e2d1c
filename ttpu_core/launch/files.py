"""Files that other programs read: a job's manifest or script. In: a path and a text; out: the whole file, or none."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ttpu_core.errors import LaunchError


def write_whole(path: Path, text: str, *, replace: bool, executable: bool = False, private: bool = False) -> None:
    """Write the file beside its place, then put it there. A private one can be read by its owner alone.

    Raises:
        LaunchError: it is there already and is not to be replaced, or cannot be written.
    """
    path = path.expanduser()
    try:
        if path.is_dir():
            raise LaunchError(f"{path} was to be written, but it is a directory: pass the name of a file.")
        descriptor, unfinished = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.absolute().parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            mask = os.umask(0)
            os.umask(mask)
            mode = (0o777 if executable else 0o666) & ~mask & (0o700 if private else 0o777)
            Path(unfinished).chmod(mode)  # mkstemp lets nobody else in
            if replace:
                Path(unfinished).replace(path)
            else:
                os.link(unfinished, path)  # unlike a rename, refuses what is there, even if it has just come
        finally:
            Path(unfinished).unlink(missing_ok=True)
    except FileExistsError as error:
        raise LaunchError(
            f"{path} was to be written, but it exists: pass --force to replace it, or another name."
        ) from error
    except OSError as error:
        raise LaunchError(f"{path} cannot be written ({error.strerror}): pass another place.") from error
