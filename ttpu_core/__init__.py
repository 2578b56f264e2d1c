"""The core of TTPU: hook specs, the architecture description, the plugin registry, checkpoints on disk, and the command
line. It imports no torch, jax, flax or transformers, and everything below is imported when it is first used."""

from importlib import import_module
from typing import Any

_EXPORTS = {
    "hookimpl": "ttpu_core.hookspecs",
    "ModelConfig": "ttpu_core.config",
    "Architecture": "ttpu_core.architecture",
    "Registry": "ttpu_core.registry",
    "default_registry": "ttpu_core.registry",
    "Checkpoint": "ttpu_core.checkpoint",
    "open_checkpoint": "ttpu_core.checkpoint",
    "FlaxMapping": "ttpu_core.mapping",
    "Tensor": "ttpu_core.mapping",
    "Concat": "ttpu_core.mapping",
    "Stack": "ttpu_core.mapping",
    "TTPUError": "ttpu_core.errors",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("ttpu-core")
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'ttpu_core' has no attribute {name!r}")
