"""Keeps the number of pages the same across restarts. Programs are compiled for a number of pages, while the free
memory differs a little each time, so the number of an earlier start is used again where it still fits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from ttpu_core.files import write_whole
from ttpu_jax.runner.compilation_cache import programs_folder

if TYPE_CHECKING:
    from ttpu_jax.runner.programs import EnginePrograms

MORE = {"cpu": 2.0}
"""How many times as many pages have to fit before a number is given up for the larger one. On a CPU what pages may take
is a guess, which what else runs there changes."""
A_LITTLE_MORE = 1.1


def steady_pages(measured: tuple[int, ...], runner: EnginePrograms, page_bytes: Sequence[int]) -> tuple[int, ...]:
    """Return the pages per group: those of an earlier start of the same engine, where they fit and are not much fewer.
    """
    path = _file(runner, page_bytes)
    before = _read(path)
    factor = MORE.get(runner.runtime.placement.platform, A_LITTLE_MORE)
    if len(before) == len(measured) and all(
        old <= new <= max(old * factor, old + 1) for old, new in zip(before, measured, strict=True)
    ):
        return before
    remember_pages(measured, runner, page_bytes)
    return measured


def remember_pages(pages: tuple[int, ...], runner: EnginePrograms, page_bytes: Sequence[int]) -> None:
    """Store the number of pages for the next start, if the folder can be written."""
    path = _file(runner, page_bytes)
    if path is None:
        return
    try:
        write_whole(path, json.dumps(pages))
    except OSError:
        return


def _file(runner: EnginePrograms, page_bytes: Sequence[int]) -> Path | None:
    """Named by what memory depends on: weights, devices, and what steps and pages are like."""
    folder = programs_folder("pages")
    if folder is None:
        return None
    placement, config = runner.runtime.placement, runner.config
    mesh = {} if placement.mesh is None else dict(placement.mesh.shape)
    leaves = jax.tree_util.tree_leaves_with_path(runner.params)
    weights = [(jax.tree_util.keystr(path), tuple(array.shape), str(array.dtype)) for path, array in leaves]
    steps = (config.max_model_len, config.page_size, config.penalties, runner.buckets, runner.has_adapters)
    pages = (tuple(page_bytes), str(runner.cache_dtype))
    share = () if config.memory_utilization is None else (config.memory_utilization,)
    described = repr((placement.devices[0].device_kind, mesh, weights, pages, steps, *share))
    return folder / f"{hashlib.sha256(described.encode()).hexdigest()[:32]}.json"


def _read(path: Path | None) -> tuple[int, ...]:
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path is not None else []
    except (OSError, ValueError):
        return ()
    if not isinstance(found, list) or not all(isinstance(count, int) and count > 1 for count in found):
        return ()
    return tuple(found)
