"""TTPU's public names: `from ttpu import AutoModelForTPU`. Each is imported when it is first asked for, so that
`import ttpu` costs nothing."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttpu_core.auto import AutoModelForTPU

_EXPORTS = {
    "AutoModelForTPU": "ttpu_core.auto",
}

__all__ = ["AutoModelForTPU"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'ttpu' has no attribute {name!r}; it has {', '.join(_EXPORTS)}.")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value  # asked once
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
