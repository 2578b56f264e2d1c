"""Opens an engine from the name of a checkpoint and the options that `LLM` and `ttpu serve` take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ttpu_core.checkpoint import open_checkpoint
from ttpu_core.errors import CheckpointError, RequestError, UnsupportedError
from ttpu_core.loading import LoadOptions, open_model, refuse_unknown
from ttpu_core.quantization import QuantizationConfig
from ttpu_serve.api.build_engine import build_engine, serving_backend
from ttpu_serve.api.engine_config import NAMES, EngineConfig
from ttpu_serve.execution.engine_core import EngineCore

ALIASES = {
    "speculative_config": "speculative",
    "gpu_memory_utilization": "memory_utilization",
    "max_loras": "max_adapters",
    "block_size": "page_size",
}
"""Names that vLLM's callers know, and what they are here."""
REFUSED = {
    "trust_remote_code": "code from checkpoints is never run here: install a plugin of the model type, or see ttpu-any",
    "enforce_eager": "programs are always compiled: leave it out",
    "swap_space": "preempted requests are computed again: leave it out",
    "seed": "each request without a seed draws its own: leave it out, and pass seed in SamplingParams",
    "disable_log_stats": "no statistics are logged: leave it out",
}
"""Options of vLLM that are refused with a reason, unless they are None or False."""


def open_engine(
    model: Any,
    load: LoadOptions | None = None,
    config: EngineConfig | None = None,
    *,
    backend: str | None = None,
    progress: Any = True,
    served_name: str = "",
    tokenizer: str | None = None,
) -> EngineCore:
    """Open an engine over a checkpoint's directory, a Hub id, or a loaded model.

    Args:
        model: the directory or id, or the loaded model.
        load: options of loading a checkpoint; None uses the defaults.
        config: the engine's settings; None uses the defaults.
        backend: name of the backend that loads a checkpoint; None is the default one.
        progress: a function, True for bars on a terminal, or None.
        served_name: the model's name in responses; "" uses the name of the checkpoint's directory.
        tokenizer: the directory or id of another checkpoint, whose tokenizer is used.

    Raises:
        TTPUError: the checkpoint or its plugin is invalid, or memory does not suffice.
        RequestError: a setting is invalid, or options of loading are given with a loaded model.
    """
    load = load or LoadOptions()
    config = with_quantized_cache(config, load)
    with _reported(progress) as report:
        if isinstance(model, str | Path):
            loader = serving_backend(backend)
            loader.keep_compiled()  # before the first program of loading
            other = None if tokenizer is None else _tokenizer(loader, tokenizer)
            loaded: Any = open_model(model, replace(load, purpose="serve", progress=report), backend=loader.name)
            if other is not None:
                loaded.tokenizer = other
        else:
            _refuse_loading(load, backend)
            loaded = model
        return build_engine(loaded, config, report, name=served_name)


def _tokenizer(backend: Any, name: str) -> Any:
    """Return the tokenizer of a checkpoint.

    Raises:
        UnsupportedError: the backend reads no tokenizers by themselves.
        CheckpointError: there is no such checkpoint, or it has no tokenizer.
    """
    if not hasattr(backend, "tokenizer"):
        raise UnsupportedError(
            f"the tokenizer of {name} was asked for, but the backend {backend.name!r} reads none by itself: put the "
            "tokenizer's files into the checkpoint."
        )
    found = backend.tokenizer(open_checkpoint(name))
    if found is None:
        raise CheckpointError(f"the tokenizer of {name} was asked for, but it has none: name another checkpoint.")
    return found


def with_quantized_cache(config: EngineConfig | None, load: LoadOptions) -> EngineConfig | None:
    """The settings with the cache's dtype of `load.quantization`, unless they name one themselves."""
    kept = None if load.quantization is None else QuantizationConfig.read(load.quantization).kv_cache
    if kept is None or (config is not None and config.kv_cache_dtype != "auto"):
        return config
    return replace(config or EngineConfig(), kv_cache_dtype=kept)


def read_options(model: Any, given: Mapping[str, Any], backend: str | None = None) -> tuple[LoadOptions, EngineConfig]:
    """Split options given by name into those of loading, as the backend's class, and those of the engine.

    Args:
        model: a checkpoint's directory or Hub id, or a loaded model.
        given: option name → value.
        backend: name of the backend that loads a checkpoint; None is the default one.

    Raises:
        RequestError: an option is unknown, is given under two names, has an invalid value, or is an option of vLLM
            without effect here.
        MissingDependencyError, PluginError: the backend is not installed or cannot be used.
        UnsupportedError: the backend's models cannot be served.
    """
    for name, reason in REFUSED.items():
        if (value := given.get(name)) is not None and value is not False:
            raise RequestError(f"{name} was given, but {reason}.")
    given = {name: value for name, value in given.items() if name not in REFUSED}
    kind = serving_backend(backend).options if isinstance(model, str | Path) else LoadOptions
    loading = set(kind.names_for_engines())
    refuse_unknown(given, (*NAMES, *loading, *ALIASES), "an engine", "it")
    engine: dict[str, Any] = {}
    load: dict[str, Any] = {}
    for name, value in given.items():
        if name in ALIASES:
            own = ALIASES[name]
            if own in given:
                raise RequestError(f"{name} and {own} were both given, two names of one setting: pass one of them.")
            engine[own] = value
        elif name in NAMES:
            engine[name] = value
        else:
            load[name] = value
    return kind(**load), EngineConfig(**engine)


def _refuse_loading(load: LoadOptions, backend: str | None) -> None:
    """Refuse whatever says how a checkpoint is loaded, because a loaded model was given."""
    asked = {name: getattr(load, name) for name in load.names_for_engines()} | {"backend": backend}
    given = [
        name for name, value in asked.items() if value is not None and not (isinstance(value, str) and value == "auto")
    ]
    if given:
        raise RequestError(
            f"a loaded model was given with {', '.join(sorted(given))}, but these say how to load one: leave them "
            "out, or pass the checkpoint's directory."
        )


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
