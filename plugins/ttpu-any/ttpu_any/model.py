"""A loaded stock model on JAX: `ttpu_jax.causal_lm.JaxCausalLM` without an architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ttpu_any.programs import StockPrograms, StockSpec
from ttpu_core.checkpoint import Checkpoint
from ttpu_core.config import ModelConfig
from ttpu_core.errors import RequestError
from ttpu_jax.causal_lm import JaxCausalLM

if TYPE_CHECKING:
    from ttpu_serve.api.engine_config import EngineConfig
    from ttpu_serve.runner import AdapterWeights


@dataclass(frozen=True)
class StockArchitecture:
    """What is known of a model that no plugin describes.

    Attributes:
        spec: what generation asks of it.
        config: the config.json.
        family: what stands for a plugin.
    """

    spec: StockSpec
    config: ModelConfig
    family: str = "none: transformers' own code, traced"


class StockCausalLM(JaxCausalLM):
    """A causal language model that no plugin describes.

    Args:
        architecture: what is known of it.
        checkpoint: that it was loaded from.
        programs: compiles and runs the model's programs.
        params: transformers' name → `jax.Array`.
        dtype: of the parameters.
        tokenizer: the checkpoint's transformers tokenizer, or None.
        load_seconds: how long loading took.
    """

    def __init__(
        self,
        architecture: StockArchitecture,
        checkpoint: Checkpoint,
        programs: StockPrograms,
        params: dict[str, Any],
        dtype: np.dtype[Any],
        tokenizer: Any = None,
        load_seconds: float = 0.0,
    ) -> None:
        super().__init__(cast(Any, architecture), checkpoint, programs, params, dtype, tokenizer, load_seconds)

    @property
    def module(self) -> Any:
        """Refused: there is no Flax module.

        Raises:
            RequestError: always.
        """
        raise RequestError(
            f"the Flax module of {self.name} was asked for, but no plugin describes this model, so that it is "
            "transformers' PyTorch code: call it, or its generate()."
        )

    def engine_runner(self, config: EngineConfig, adapters: Mapping[str, AdapterWeights] | None = None) -> Any:
        """What serves this model in an engine: see `ttpu_any.runner.StockRunner`.

        Raises:
            UnsupportedError: the model cannot be padded.
            RequestError: settings that need pages, or that contradict the model or each other.
        """
        from ttpu_any.runner import StockRunner

        assert isinstance(self.programs, StockPrograms)
        return StockRunner(self.programs, self.params, config)

    def save_pretrained(self, directory: str | Path) -> Path:
        """Refused: the weights are those of the checkpoint.

        Raises:
            RequestError: always.
        """
        raise RequestError(
            f"save_pretrained was called on {self.name}, which no plugin describes: its weights are still those of "
            f"{self.source}; copy that folder."
        )

    def saved_config(self, dtype: np.dtype[Any]) -> dict[str, Any]:
        """The content of config.json for weights in a dtype."""
        return {**self.architecture.config.to_dict(), "dtype": dtype.name}
