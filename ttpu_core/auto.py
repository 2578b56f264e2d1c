"""`AutoModelForTPU` opens a checkpoint, by its directory or Hub id, as a model on a backend's devices. The family
plugin and the backend are found by name; neither is imported before it is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class AutoModelForTPU:
    """Opens a checkpoint as transformers' Auto classes do; there are no instances of this class itself."""

    def __init__(self) -> None:
        """Refuse to make an instance.

        Raises:
            TypeError: always; call `from_pretrained`.
        """
        raise TypeError("AutoModelForTPU has no instances: call AutoModelForTPU.from_pretrained(path_or_id).")

    @classmethod
    def from_pretrained(cls, path_or_id: str | Path, *, backend: str | None = None, **options: Any) -> Any:
        """A model with the checkpoint's weights.

        Args:
            path_or_id: a directory with a config.json and safetensors files, or a Hub id of the form org/name.
            backend: the name of an installed backend; None takes the default, see `Registry.default_backend`.
            options: `ttpu_core.loading.LoadOptions`, such as dtype, revision, patch_packs and mesh, and the backend's
                own; unknown names are refused.

        Raises:
            CheckpointError, ConfigError, MappingError: the checkpoint's files are missing or malformed.
            PluginError: no usable plugin describes its model type, or a patch pack is not installed.
            MissingDependencyError: the backend, or what it needs, is not installed.
            RequestError: an option that the backend does not know, or a value that it refuses.
            UnsupportedError: the backend cannot run this architecture, or the weights are quantized.

        Warns of keys in config.json that may matter and that no plugin reads.
        """
        from ttpu_core.loading import open_model
        from ttpu_core.registry import default_registry

        runs = default_registry().backend(backend)
        return open_model(path_or_id, runs.options.read(options, runs.name), backend=runs.name)
