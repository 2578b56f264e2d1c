"""A LoRA adapter as callers of vLLM name it."""

from __future__ import annotations

from dataclasses import dataclass


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
