"""Makes what several tests read once in a run, whichever of pytest-xdist's workers needs it first: a module's fixture
is made again by every worker that takes some of the module's tests."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


_made: dict[str, Any] = {}


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[], Any]) -> Any:
    """The value of `make`, which JSON must hold, made by the first worker that asks for `name`. The others wait."""
    if name not in _made:
        _made[name] = _shared(factory, name, make) if "PYTEST_XDIST_WORKER" in os.environ else make()
    return _made[name]


def _shared(factory: pytest.TempPathFactory, name: str, make: Callable[[], Any]) -> Any:
    file = factory.getbasetemp().parent / f"{name}.json"  # the folder of the whole run
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            file.write_text(json.dumps(make()))
    return json.loads(file.read_text())
