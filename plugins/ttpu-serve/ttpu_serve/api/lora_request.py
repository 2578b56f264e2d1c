"""A LoRA adapter as callers of vLLM name it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttpu_core.errors import RequestError


@dataclass(frozen=True)
class LoRARequest:
    """An adapter for `LLM.generate(..., lora_request=...)`; it is loaded when it is first asked for.

    Args:
        lora_name: its name in the engine.
        lora_int_id: a number that vLLM needs; it has no meaning here.
        lora_path: the directory of the adapter in PEFT's format; "" if it is loaded already.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""


def adapters_of(asked: LoRARequest | Sequence[LoRARequest | None], adapter: Any) -> tuple[Any, dict[str, str]]:
    """Check vLLM's requests of adapters. Return the names of the adapters, one or one for each prompt, and for each
    name the path, which is "" for an adapter that must be loaded already.

    Raises:
        RequestError: `adapter` is given too, a request is of another class, or one name has two paths.
    """
    if adapter is not None:
        raise RequestError("adapter and lora_request were both given, two names of one setting: pass one of them.")
    several = isinstance(asked, list | tuple)
    requests: Any = asked if several else [asked]
    paths: dict[str, str] = {}
    for one in requests:
        if one is not None and not isinstance(one, LoRARequest):
            raise RequestError(f"lora_request holds {one!r}, but a LoRARequest is needed: pass one.")
        if one is not None:
            known = paths.get(one.lora_name) or one.lora_path
            paths[one.lora_name] = known
            if one.lora_path and absolute(known) != absolute(one.lora_path):
                raise RequestError(
                    f"lora_request has the adapter {one.lora_name!r} at {known!r} and at {one.lora_path!r}, but "
                    "adapters of one call are told apart by their names: give each its own lora_name."
                )
    if isinstance(asked, LoRARequest):
        return asked.lora_name, paths
    return [None if one is None else one.lora_name for one in asked], paths


def absolute(directory: str | Path) -> str:
    """Return the path by which the directories of two adapters are compared."""
    return str(Path(directory).resolve())
