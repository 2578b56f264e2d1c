"""What commands that draw have in common: they check early that a picture can be written, and write it whole."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ttpu_core.errors import MissingDependencyError, RequestError
from ttpu_core.files import check_target

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999", "#f0e442")
"""Okabe and Ito's colours, which colour-blind people can tell apart."""
WITHOUT_MATPLOTLIB = (".html",)


def check_picture(path: str | Path, endings: Sequence[str] = (".png", ".svg")) -> None:
    """Check that a picture can be written, before anything is computed for it.

    Args:
        path: the file.
        endings: the formats that the drawing has.

    Raises:
        RequestError: another ending, or no file can be written there.
        MissingDependencyError: the format needs matplotlib, which is not installed.
    """
    ending = Path(path).suffix
    if ending not in endings:
        raise RequestError(
            f"the picture {str(path)!r} was asked for, but a picture is written as {' or '.join(endings)}: end its "
            "name so."
        )
    if ending not in WITHOUT_MATPLOTLIB and find_spec("matplotlib") is None:
        free = [one for one in endings if one in WITHOUT_MATPLOTLIB]
        instead = f", or name an {free[0]} file, which needs nothing" if free else ", or leave the picture out"
        raise MissingDependencyError(
            f"the picture {str(path)!r} was asked for, but it needs matplotlib, which is not installed: "
            f'`pip install "ttpu-core[plot]"`{instead}.'
        )
    try:
        check_target(path)
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: str | Path, error: OSError) -> RequestError:
    """Return the refusal of a picture whose file cannot be written."""
    return RequestError(
        f"the picture was to be saved as {str(path)!r}, but it cannot be written ({error.strerror or error}): name a "
        "file in a folder that exists and may be written to."
    )


def write_figure(figure: Any, path: str | Path) -> None:
    """Write a figure of matplotlib, in the format of the file's ending: the whole file or none.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib import rc_context

    target = Path(path).expanduser()
    with TemporaryDirectory(prefix=f".{target.name}.", dir=target.absolute().parent) as folder:
        unfinished = Path(folder) / target.name
        with rc_context({"svg.fonttype": "none"}):  # text stays text
            figure.savefig(unfinished, dpi=150)
        unfinished.replace(target)
