"""The service "engine" (`ttpu_core.services.Engines`), through which backends use this distribution without importing
it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ttpu_serve.api.build_engine import build_engine
from ttpu_serve.api.engine_config import NAMES, EngineConfig
from ttpu_serve.execution.engine_core import EngineCore
from ttpu_serve.runner import OnProgress, ServedModel


class EngineService:
    """Builds engines. `option_names` lists the settings that `config` takes."""

    option_names = NAMES

    def config(self, options: Mapping[str, Any]) -> EngineConfig:
        """Return checked engine settings.

        Raises:
            RequestError: a value is invalid.
        """
        return EngineConfig(**options)

    def build(self, model: ServedModel, config: EngineConfig, progress: OnProgress | None = None) -> EngineCore:
        """Build an engine for a loaded model; see `build_engine`.

        Raises:
            UnsupportedError: the engine cannot serve the model or its mesh.
            RequestError: settings contradict the model or each other, or memory does not suffice.
        """
        return build_engine(model, config, progress)


ENGINE = EngineService()
