"""Imports what a training file names: "package.module:name", or "file.py:name" of a file beside it."""

from __future__ import annotations

import sys
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from ttpu_core.errors import RequestError


def imported(target: str, folder: Path, what: str, wanted: str) -> Any:
    """What "package.module:name" or "file.py:name" names.

    Args:
        target: the name.
        folder: that files are relative to.
        what: for errors, what is imported.
        wanted: for errors, what it is to be.

    Raises:
        RequestError: it cannot be imported.
    """
    module, _, name = target.partition(":")
    try:
        found: Any = _of_file((folder / module).resolve()) if module.endswith(".py") else import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # a file raises whatever it likes
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise RequestError(
            f"{what} {target!r} was to be imported, but that failed ({reason}): write package.module:name, or "
            f"file.py:name of a file beside the training file, of {wanted} that Python can import."
        ) from error
    return found


def _of_file(path: Path) -> ModuleType:
    """The module in a file, which runs once. It has the file's name and its folder ends `sys.path`, so that processes
    which are started import it too and its functions can be pickled; where another module has that name, it has one
    that only this process knows."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(path.name) and Path(file).resolve() == path:
            return module
    name = path.stem
    if name in sys.modules or not name.isidentifier() or find_spec(name) is not None:
        name = f"ttpu_file_{sha256(str(path).encode()).hexdigest()[:12]}_{name}"
    elif str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
