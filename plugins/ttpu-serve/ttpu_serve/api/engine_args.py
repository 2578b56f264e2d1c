"""Arguments of `LLM` as one value, as scripts for vLLM pass them around."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ttpu_serve.api.engine_config import EngineConfig


@dataclass(frozen=True, kw_only=True)
class EngineArgs(EngineConfig):
    """Settings of an engine and of loading its model: `LLM(**dataclasses.asdict(EngineArgs(model="./llama")))`.

    Args:
        model: a checkpoint's directory or Hub id.
        dtype: "auto" (as stored), "float32", "bfloat16" or "float16".
        tensor_parallel_size: devices that share each matrix; None is one.
        enable_expert_parallel: each of these devices has some whole experts of a mixture, not a part of every expert.
        quantization: how weights are quantized while they are loaded, such as "w4a16-g128"; None leaves them.
        revision: a branch, tag or commit of a Hub repository.

    The other fields are those of `ttpu_serve.api.engine_config.EngineConfig`.

    Raises:
        RequestError: a value is out of range or unknown.
    """

    model: str
    dtype: str = "auto"
    tensor_parallel_size: int | None = None
    enable_expert_parallel: bool = False
    quantization: Any = None
    revision: str | None = None
