"""The service "engine" (`ttpu_core.services.Engines`), by which backends reach this distribution without importing
it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ttpu_serve.api.build_engine import build_engine
from ttpu_serve.api.engine_config import NAMES, EngineConfig
from ttpu_serve.execution.engine_core import EngineCore
from ttpu_serve.runner import OnProgress, ServedModel


class EngineService:
    """Builds engines. `option_names` are the settings that `config` takes."""

    option_names = NAMES

    def config(self, options: Mapping[str, Any]) -> EngineConfig:
        """Checked settings of an engine.

        Raises:
            RequestError: a value that cannot be served.
        """
        return EngineConfig(**options)

    def build(self, model: ServedModel, config: EngineConfig, progress: OnProgress | None = None) -> EngineCore:
        """An engine for a loaded model; see `build_engine`.

        Raises:
            UnsupportedError, RequestError: what cannot be served, and why.
        """
        return build_engine(model, config, progress)


ENGINE = EngineService()
