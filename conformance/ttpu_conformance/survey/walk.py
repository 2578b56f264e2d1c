"""Walks the model types, each in a process of its own with limits, so that one that crashes, hangs or takes all memory
ends its own row alone. Results are written after each type."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ttpu_conformance.survey.rows import Row, Survey
from ttpu_conformance.survey.types import is_tried, surveyed_types
from ttpu_core.errors import RequestError
from ttpu_core.files import write_whole
from ttpu_core.registry import default_registry

SECONDS = 400
MEMORY = 16 << 30
"""Limits of each process: time, and bytes of address space, of which XLA reserves several GiB that it never uses."""

LIBRARIES = ("torch", "transformers", "jax", "ttpu_any.fallback", "ttpu_jax.backend", "ttpu_jax.causal_lm")
"""Imported before processes are forked; none of them starts JAX."""

Progress = Callable[[str, int, int], None]


def walk(file: Path, only: Sequence[str] = (), progress: Progress = lambda model_type, done, total: None) -> Survey:
    """Complete the results in a file.

    Args:
        file: JSON of earlier results, which is written after each type. Rows that are there are kept, unless a plugin
            describes the type now, or does not any more.
        only: types whose rows are made anew; if there are any, no others are.
        progress: called with a model type, how many are done, and how many there are to do.

    Raises:
        RequestError: a type that transformers has no causal language model of, or a file that holds something else.
    """
    unknown = [name for name in only if name not in surveyed_types()]
    if unknown:
        raise RequestError(
            f"the survey was asked for {unknown[0]!r}, but transformers {version('transformers')} has no causal "
            "language model of that type: name types of its mapping, or none for all."
        )
    survey = Survey.read(file, versions())
    for module in LIBRARIES:
        with contextlib.suppress(ImportError):
            import_module(module)
    wanted = list(only) or [name for name in surveyed_types() if is_tried(name) and not _is_current(survey, name)]
    for done, name in enumerate(wanted):
        progress(name, done, len(wanted))
        survey = survey.with_row(row_of(name))
        write_whole(file, survey.to_json())
    progress("", len(wanted), len(wanted))
    return survey


def row_of(model_type: str, seconds: float = SECONDS) -> Row:
    """The row of one type, made in a process of its own. That process is forked, so that the libraries are imported
    once; this one imports them and computes nothing."""
    from ttpu_conformance.survey import probe

    row = Row(model_type, surveyed_types()[model_type], "refused")
    with tempfile.TemporaryDirectory() as folder:
        result, errors = Path(folder, "row.json"), Path(folder, "errors")
        process = multiprocessing.get_context("fork").Process(
            target=_probe, args=(probe.probe, model_type, result, errors)
        )
        process.start()
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
            return replace(row, reason=f"not done after {seconds:g} seconds", seconds=seconds)
        if result.exists():
            return Row(**json.loads(result.read_text(encoding="utf-8")))
        last = " ".join((errors.read_text(encoding="utf-8", errors="replace").split() or ["nothing"])[-40:])
        return replace(row, reason=f"its process ended with status {process.exitcode}: {last}")


def _probe(function: Callable[[str], Row], model_type: str, result: Path, errors: Path) -> None:
    """In the forked process: probe a type and write its row."""
    sys.stdout.flush()
    with errors.open("w", encoding="utf-8") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (min(MEMORY, hard) if hard >= 0 else MEMORY, hard))
        result.write_text(json.dumps(asdict(function(model_type))), encoding="utf-8")


def versions() -> dict[str, str]:
    """Versions of what the results depend on."""
    found = {}
    for name in ("ttpu-core", "ttpu-jax", "ttpu-any", "jax", "libtpu", "torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _is_current(survey: Survey, model_type: str) -> bool:
    row = survey.rows.get(model_type)
    return row is not None and default_registry().is_described(model_type) == (row.way == "native")
