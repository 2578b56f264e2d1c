"""Loads a checkpoint's tokenizer by transformers, without torch: importing torch takes seconds and most of a gigabyte,
and tokenizers do not need it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from ttpu_core.checkpoint import Checkpoint

CLASS_KEYS = ("model_type", "model_name", "tokenizer_class")
"""Of config.json, which transformers chooses a tokenizer's class by."""


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """The checkpoint's tokenizer, or None where it has no tokenizer files.

    Raises:
        CheckpointError: files that transformers cannot read.
    """
    if not checkpoint.has_tokenizer:
        return None
    with _torch_on_demand():
        auto = _transformers().AutoTokenizer
    try:
        return auto.from_pretrained(str(checkpoint.path), **_without_config_class(checkpoint))
    except Exception as error:  # transformers raises many kinds for damaged files
        raise checkpoint.unreadable_tokenizer(error) from error


def _without_config_class(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Arguments of `AutoTokenizer.from_pretrained` with what it reads of the model's config, whose own class would
    import torch; none where the tokenizer's files do not name its class."""
    path = checkpoint.path / "tokenizer_config.json"
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(written, dict) or not isinstance(written.get("tokenizer_class"), str) or "auto_map" in written:
        return {}
    config = _transformers().PreTrainedConfig(name_or_path=str(checkpoint.path))
    for key in CLASS_KEYS:
        if isinstance(value := checkpoint.config.get(key), str):
            setattr(config, key, value)
    return {"config": config}


class _Torch(ModuleType):
    """Stands for torch in modules that were imported meanwhile: the first attribute that is read imports it."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get("torch") is self:
            del sys.modules["torch"]
        return getattr(import_module("torch"), name)


@contextmanager
def _torch_on_demand() -> Iterator[None]:
    """A context in which `import torch` does not import it yet, where it is installed."""
    spec = None if "torch" in sys.modules else find_spec("torch")
    if spec is None:
        yield
        return
    stand_in = _Torch("torch")
    stand_in.__spec__ = spec
    sys.modules["torch"] = stand_in
    try:
        yield
    finally:
        if sys.modules.get("torch") is stand_in:
            del sys.modules["torch"]


def _transformers() -> ModuleType:
    """transformers, imported without its advice to install torch, which tokenizers do not need."""
    silent = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(silent)
    os.environ[silent] = "1"
    try:
        return import_module("transformers")
    finally:
        if before is None:
            del os.environ[silent]
        else:
            os.environ[silent] = before
