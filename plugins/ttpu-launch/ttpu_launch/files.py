"""Writes files for other programs, such as a job's manifest or script, whole or not at all."""

from __future__ import annotations

from pathlib import Path

from ttpu_core import files
from ttpu_core.errors import LaunchError


def write_whole(path: Path, text: str, *, replace: bool, executable: bool = False, private: bool = False) -> None:
    """Write the file whole or not at all.

    Args:
        path: the file.
        text: its content.
        replace: whether an existing file is replaced.
        executable: whether the file can be executed.
        private: whether only its owner can read it.

    Raises:
        LaunchError: the file exists and is not to be replaced, or cannot be written.
    """
    mode = (0o777 if executable else 0o666) & (0o700 if private else 0o777)
    try:
        files.write_whole(path, text, mode=mode, replace=replace)
    except FileExistsError as error:
        raise LaunchError(
            f"{path} was to be written, but it exists: pass --force to replace it, or another name."
        ) from error
    except IsADirectoryError as error:
        raise LaunchError(f"{path} was to be written, but it is a directory: pass the name of a file.") from error
    except OSError as error:
        raise LaunchError(f"{path} cannot be written ({error.strerror}): pass another place.") from error
