"""The tags under which an engine's checkpoints are saved, as DeepSpeed's, and the arguments of saving that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_train.checkpoints import MODEL, steps_in

LATEST = "latest"
"""The file that names the newest checkpoint, as DeepSpeed's."""
DEFAULTS_OF_DEEPSPEED = {
    "load_module_strict": True, "load_optimizer_states": True, "load_lr_scheduler_states": True,
    "load_module_only": False, "custom_load_fn": None, "exclude_frozen_parameters": False,
}  # fmt: skip
"""Arguments of DeepSpeed's load_checkpoint and save_checkpoint that are accepted with these values alone."""


def refuse_others(method: str, others: Mapping[str, Any]) -> None:
    """Accept what is DeepSpeed's default.

    Raises:
        UnsupportedError: anything else.
    """
    for name, value in others.items():
        if name not in DEFAULTS_OF_DEEPSPEED or value != DEFAULTS_OF_DEEPSPEED[name]:
            raise UnsupportedError(
                f"engine.{method} was given {name}={value!r}, but a checkpoint is written and read as a whole: leave "
                "it out; to begin with weights alone, give a Hugging Face checkpoint as `model`."
            )


def tag_name(tag: str | int) -> str:
    """The name of a tag's folder.

    Raises:
        RequestError: it is no name of a folder.
    """
    name = str(tag)
    if name in ("", ".", "..", LATEST, MODEL) or Path(name).name != name:
        raise RequestError(
            f"the tag {name!r} was given, but a tag is the name of a folder, and neither {LATEST!r} nor {MODEL!r}: "
            "give another, such as step_100."
        )
    return name


def tags_in(folder: Path) -> list[str]:
    """The tags of a folder that hold checkpoints."""
    return sorted(one.name for one in folder.iterdir() if one.is_dir() and steps_in(one)) if folder.is_dir() else []
