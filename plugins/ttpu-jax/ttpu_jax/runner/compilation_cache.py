"""The folders that keep compiled programs between runs. They lie in the user's cache folder, or where an environment
variable says, and only the user can write to them; JAX's own compilation cache lies in one of them."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import stat
from functools import cache
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from ttpu_core.errors import RequestError
from ttpu_jax.platform import processor_features

log = logging.getLogger("ttpu.engine")

VARIABLE = "TTPU_COMPILE_CACHE"
"""`off` keeps nothing; anything else is the folder, in place of $XDG_CACHE_HOME or ~/.cache, then ttpu/programs."""
OFF = ("off", "0", "no", "false")
JAX_DIRECTORY, JAX_SECONDS = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
SHORTEST = 0.1
"""Seconds of compiling from which a program is worth a file. JAX's own limit is one second, and most programs of an
engine take less, dozens of them."""
NEVER = 1e9


def programs_folder(*parts: str, make: bool = True) -> Path | None:
    """A folder for programs, made where it is missing if so asked; None where none is wanted or there, or where others
    could write to it, which is logged.

    What lies there is code that will run as whoever reads it. So the folder has to be the user's own, or root's (an
    image in which programs were compiled ahead), and closed to others.
    """
    asked = os.environ.get(VARIABLE, "").strip()
    if asked.lower() in OFF:
        return None
    try:
        folder = Path(asked).expanduser() if asked else _cache_home() / "ttpu" / "programs"
        for part in ("", *parts):
            folder = folder / part
            if not make and not folder.is_dir():
                return None
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not is_closed(folder.stat()):
                _tell(
                    f"compiled programs are not kept in {folder}, which others may write to: make it yours alone "
                    f"(chmod 700), or set {VARIABLE} to another folder or to off"
                )
                return None
    except (OSError, RuntimeError) as error:  # the latter: there is no home
        _tell(f"compiled programs are not kept: {error}")
        return None
    return folder


@cache
def _tell(message: str) -> None:
    """Log it, once."""
    log.warning("%s", message)


def is_closed(status: os.stat_result) -> bool:
    """Whether only the user, or root, can have written the file or folder."""
    if not hasattr(os, "geteuid"):
        return False  # a system without owners
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def keep_compiled() -> Path | None:
    """Enable JAX's persistent compilation cache for this process, unless the user has set its folder or disabled it.
    Returns its folder, or None without one."""
    config: Any = jax.config  # its options are not in its type
    if not config.jax_enable_compilation_cache:
        return None
    if config.jax_compilation_cache_dir is not None:
        return Path(config.jax_compilation_cache_dir) if config.jax_compilation_cache_dir else None
    folder = programs_folder("jax", host())
    if folder is None:
        return None
    jax.config.update(JAX_DIRECTORY, str(folder))
    if not os.access(folder, os.W_OK):
        jax.config.update(JAX_SECONDS, NEVER)  # it is read all the same
    elif JAX_SECONDS.upper() not in os.environ:
        jax.config.update(JAX_SECONDS, SHORTEST)
    compilation_cache.reset_cache()  # JAX looks once in a process whether there is one
    return folder


def compiled_folder(*, ahead: bool) -> Path:
    """Return the folder of compiled programs: JAX's cache, or with `ahead` the folder of programs for other machines'
    devices.

    Raises:
        RequestError: nowhere.
    """
    folder = programs_folder("executables") if ahead else keep_compiled()
    if folder is None:
        raise RequestError(
            f"`ttpu compile` keeps programs for later, but there is no folder for them: let {VARIABLE} name one that "
            "only you may write to, and leave JAX's cache on."
        )
    return folder


class CacheCounts:
    """A context manager that counts the `hits` and the `written` programs of JAX's compilation cache."""

    def __init__(self) -> None:
        self.hits = self.written = 0
        self._on = False

    def __enter__(self) -> CacheCounts:
        self._on = True
        jax.monitoring.register_event_listener(self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        self._on = False  # listeners cannot be taken back one by one

    def _heard(self, event: str, **_: Any) -> None:
        self.hits += self._on and event == "/jax/compilation_cache/cache_hits"
        self.written += self._on and event == "/jax/compilation_cache/cache_misses"


@cache
def host() -> str:
    """The kind of this machine's processor, because machines that cannot run each other's programs may share a home
    folder."""
    described = " ".join([platform.processor(), *sorted(processor_features())])
    return f"{platform.machine() or 'any'}-{hashlib.sha256(described.encode()).hexdigest()[:8]}"


def _cache_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
