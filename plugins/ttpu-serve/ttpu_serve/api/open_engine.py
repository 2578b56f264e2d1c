"""From a checkpoint's name to an engine. In: what a caller of `LLM`, or of `ttpu serve`, passes; out: an
`EngineCore`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ttpu_core.errors import RequestError
from ttpu_core.loading import LoadOptions, open_model, refuse_unknown
from ttpu_core.sharding.request import engine_plan
from ttpu_serve.api.build_engine import build_engine, serving_backend
from ttpu_serve.api.engine_config import NAMES, EngineConfig
from ttpu_serve.execution.engine_core import EngineCore

ALIASES = {
    "speculative_config": "speculative",
    "gpu_memory_utilization": None,
    "swap_space": None,
    "enforce_eager": None,
}
"""Names that vLLM's callers know: what they are here, None for what has no meaning on these devices."""

LOADING = frozenset(LoadOptions.names()) - {"progress"}
"""What callers may say of loading a checkpoint; progress has an argument of its own."""


def open_engine(
    model: Any, *, backend: str | None = None, progress: Any = True, served_name: str = "", **options: Any
) -> EngineCore:
    """An engine over a checkpoint's directory or Hub id, or over a loaded model.

    `options` are those of `AutoModelForTPU.from_pretrained` and of `EngineConfig`; `backend` loads a
    checkpoint, None being the default one; `progress` is a function, True for bars on a terminal, or None.

    Raises:
        TTPUError: something of it does not do, and why.
    """
    engine_options, load_options = split_options(options)
    config = EngineConfig(**engine_options)
    if load_options.get("plan") is not None:
        load_options["plan"] = engine_plan(load_options["plan"])
    with _reported(progress) as report:
        if not isinstance(model, str | Path):
            given = {name: value for name, value in load_options.items() if value not in (None, "auto")}
            if given:
                raise RequestError(
                    f"a loaded model was given with {', '.join(given)}, but these say how to load one: leave them "
                    "out, or pass the checkpoint's directory."
                )
            loaded: Any = model
        else:
            loader = serving_backend(backend)
            loader.keep_compiled()  # before the first program of loading
            loaded = open_model(model, LoadOptions(progress=report, **load_options), backend=loader.name)
        return build_engine(loaded, config, report, name=served_name)


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of the engine, and those of loading.

    Raises:
        RequestError: a name that nobody knows, or that vLLM knows and that means nothing here.
    """
    refuse_unknown(options, (*NAMES, *LOADING, *ALIASES), "an engine", "it")
    engine: dict[str, Any] = {}
    load: dict[str, Any] = {}
    for name, value in options.items():
        if name in ALIASES:
            own = ALIASES[name]
            if own is None:
                raise RequestError(
                    f"{name} was given, but this engine measures the memory that is free and always compiles: leave it "
                    "out, or set kv_cache_memory (bytes)."
                )
            if own in options:
                raise RequestError(f"{name} and {own} were both given, two names of one setting: pass one of them.")
            engine[own] = value
        elif name in NAMES:
            engine[name] = value
        else:
            load[name] = value
    return engine, load


@contextmanager
def _reported(progress: Any) -> Iterator[Any]:
    if progress is not True:
        yield progress or None
        return
    from ttpu_core.cli.console import LoadProgress

    bars = LoadProgress(quiet=False)
    try:
        yield bars
    finally:
        bars.close()
