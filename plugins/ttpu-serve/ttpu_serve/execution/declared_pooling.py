"""Which hidden states a checkpoint's embeddings are pooled from, as the files beside it say that sentence-transformers
writes: `modules.json`, and `config.json` in the folder of its pooling module."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttpu_core.errors import CheckpointError
from ttpu_serve.scheduling.request import Pooling

MODES: dict[str, Pooling | None] = {
    "lasttoken": "last",
    "mean": "mean",
    "cls": "cls",
    "max": None,
    "mean_sqrt_len_tokens": None,
    "weightedmean": None,
}
"""sentence-transformers' names, and what they are here; None for what is not computed."""
OLD_NAMES = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""Flags of files by older versions."""
TAKEN = ("Transformer", "Pooling", "Normalize")
"""Modules whose work the engine does."""


@dataclass(frozen=True)
class DeclaredPooling:
    """What a checkpoint says of its embeddings.

    Attributes:
        mode: how states are pooled where a request does not say; None if what is declared is not computed.
        reason: why, if `mode` is None.
        of_embeddings: whether the model is made for embeddings, and not for text.
    """

    mode: Pooling | None = "last"
    reason: str = ""
    of_embeddings: bool = True


LAST = DeclaredPooling(of_embeddings=False)
"""What holds for decoders where nothing is declared."""
MEAN = DeclaredPooling("mean")
"""What holds for encoders where nothing is declared, as in sentence-transformers."""


def declared_pooling(folder: Path | None, default: DeclaredPooling = LAST) -> DeclaredPooling:
    """The pooling that the files of a checkpoint declare.

    Args:
        folder: of the checkpoint, or None.
        default: what holds where there are no files.

    Raises:
        CheckpointError: a file is malformed, or its pooling module has none.
    """
    if folder is None or not (folder / "modules.json").is_file():
        return default
    modules = _read(folder / "modules.json")
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise _malformed(folder / "modules.json", "a list of modules")
    kinds = [str(each.get("type", "")).rpartition(".")[2] for each in modules]
    beyond = [kind for kind in kinds if kind not in TAKEN]
    if beyond:
        return _not_computed(folder, f"a module {beyond[0]!r}")
    if "Pooling" not in kinds:
        return default
    module = modules[kinds.index("Pooling")]
    file = (folder / str(module.get("path", "")) / "config.json").resolve()
    if not file.is_relative_to(folder.resolve()):
        raise _malformed(folder / "modules.json", "a path inside of the checkpoint's folder")
    config = _read(file)
    if not isinstance(config, dict):
        raise _malformed(file, "an object")
    chosen = config.get("pooling_mode")
    names = [chosen] if isinstance(chosen, str) else list(chosen or ())
    names = names or [name for flag, name in OLD_NAMES.items() if config.get(flag)]
    if not names or any(name not in MODES for name in names):
        raise _malformed(file, f"a pooling mode ({', '.join(MODES)})")
    mode = MODES[names[0]] if len(names) == 1 else None
    return _not_computed(folder, f"pooling by {' and '.join(names)}") if mode is None else DeclaredPooling(mode)


def _not_computed(folder: Path, what: str) -> DeclaredPooling:
    return DeclaredPooling(
        None,
        f"an embedding was asked for, but {folder.name} declares {what}, and this engine pools by last, mean or cls: "
        "pass `pooling` to have one of these.",
    )


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} was to say how embeddings are pooled, but it cannot be read ({type(error).__name__}): copy the "
            "checkpoint again, or remove modules.json."
        ) from error


def _malformed(file: Path, needed: str) -> CheckpointError:
    return CheckpointError(
        f"{file} was to say how embeddings are pooled, but it does not hold {needed}: copy the checkpoint again, or "
        "remove modules.json."
    )
