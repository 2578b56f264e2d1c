"""TTPU's public names: `from ttpu import AutoModelForTPU`. Each is imported when it is first asked for, so that
`import ttpu` costs nothing."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttpu_core.auto import AutoModelForTPU
    from ttpu_core.generation.sampling_params import GuidedDecoding, SamplingParams, StructuredOutputsParams
    from ttpu_serve.api.async_engine import AsyncEngine
    from ttpu_serve.api.beam_search import BeamSearchParams
    from ttpu_serve.api.collector import PromptsFailedError
    from ttpu_serve.api.engine_args import EngineArgs
    from ttpu_serve.api.llm import LLM
    from ttpu_serve.api.lora_request import LoRARequest
    from ttpu_torch_xla.auto import AutoXLAModelForCausalLM
    from ttpu_train.arguments import TrainingArguments
    from ttpu_train.callbacks import TrainerCallback
    from ttpu_train.initialize import initialize
    from ttpu_train.trainer import Trainer

_EXPORTS = {
    "AsyncEngine": "ttpu_serve.api.async_engine",
    "AutoModelForTPU": "ttpu_core.auto",
    "AutoXLAModelForCausalLM": "ttpu_torch_xla.auto",
    "BeamSearchParams": "ttpu_serve.api.beam_search",
    "EngineArgs": "ttpu_serve.api.engine_args",
    "GuidedDecoding": "ttpu_core.generation.sampling_params",
    "LLM": "ttpu_serve.api.llm",
    "LoRARequest": "ttpu_serve.api.lora_request",
    "PromptsFailedError": "ttpu_serve.api.collector",
    "SamplingParams": "ttpu_core.generation.sampling_params",
    "StructuredOutputsParams": "ttpu_core.generation.sampling_params",
    "Trainer": "ttpu_train.trainer",
    "TrainerCallback": "ttpu_train.callbacks",
    "TrainingArguments": "ttpu_train.arguments",
    "initialize": "ttpu_train.initialize",
}
__all__ = [
    "LLM",
    "AsyncEngine",
    "AutoModelForTPU",
    "AutoXLAModelForCausalLM",
    "BeamSearchParams",
    "EngineArgs",
    "GuidedDecoding",
    "LoRARequest",
    "PromptsFailedError",
    "SamplingParams",
    "StructuredOutputsParams",
    "Trainer",
    "TrainerCallback",
    "TrainingArguments",
    "initialize",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'ttpu' has no attribute {name!r}; it has {', '.join(_EXPORTS)}.")
    module = _EXPORTS[name]
    try:
        value = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        from ttpu_core.distributions import PACKAGES
        from ttpu_core.errors import MissingDependencyError

        raise MissingDependencyError(
            f"ttpu.{name} was asked for, but {package} is not installed: `pip install {PACKAGES[package]}` brings it."
        ) from error
    globals()[name] = value  # asked once
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
