"""`AutoModelForTPU`: a checkpoint's directory or Hub id comes in, a model on a backend's devices goes out. The family
plugin and the backend are found by name; neither is imported before it is needed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class AutoModelForTPU:
    """Opens a checkpoint as transformers' Auto classes do; there are no instances of this class itself."""

    def __init__(self) -> None:
        raise TypeError("AutoModelForTPU has no instances: call AutoModelForTPU.from_pretrained(path_or_id).")

    @classmethod
    def from_pretrained(
        cls,
        path_or_id: str | Path,
        *,
        backend: str = "jax",
        dtype: str = "auto",
        revision: str | None = None,
        patch_packs: Sequence[str] | None = None,
        **options: Any,
    ) -> Any:
        """A model with the checkpoint's weights.

        Args:
            path_or_id: a directory with a config.json and safetensors files, or a Hub id of the form org/name.
            backend: the name of an installed backend.
            dtype: what weights are held in, such as "float32" or "bfloat16"; "auto" takes what the checkpoint says.
            revision: a branch, tag or commit of a Hub repository.
            patch_packs: names of installed patch packs, applied in order; None takes those of TTPU_PATCH_PACKS.
            options: what the backend's `load` takes besides, such as `mesh`; it refuses what it does not know.

        Raises:
            CheckpointError, ConfigError, MappingError: the checkpoint's files are missing or malformed.
            PluginError: no usable plugin describes its model type, or a patch pack is not installed.
            MissingDependencyError: the backend, or what it needs, is not installed.
            UnsupportedError: the backend cannot run this architecture, or the weights are quantized.

        Warns of keys in config.json that may matter and that no plugin reads.
        """
        from ttpu_core.checkpoint import open_checkpoint
        from ttpu_core.checkpoint.tied_head import described
        from ttpu_core.config.key_audit import refuse_ignored
        from ttpu_core.registry import default_registry

        checkpoint = open_checkpoint(path_or_id, revision=revision)
        registry = default_registry()
        checkpoint, architecture = described(registry, checkpoint, patch_packs)
        for sentence in refuse_ignored(checkpoint.config):
            warnings.warn(sentence, stacklevel=2)
        return registry.backend(backend).load(architecture, checkpoint, dtype=dtype, **options)
