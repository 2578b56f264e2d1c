"""Stores and loads executables for machines with the same devices. `ttpu compile` stores an executable; a later run
loads it for the same program, devices, versions and compiler flags."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from ttpu_core.files import write_whole
from ttpu_jax.compiler_flags import compiler_flags, engine_options
from ttpu_jax.runner.compilation_cache import host, is_closed, programs_folder

log = logging.getLogger("ttpu.engine")

FORMAT = "ttpu-program-3"
COMPILERS = ("jax", "jaxlib", "libtpu")


class ExecutableCache:
    """Executables for one sequence of devices, one file each.

    The files hold pickles, as JAX serializes executables: whoever can write them can run code as whoever reads them.
    They are therefore written for their owner alone, and neither read from a folder that others may write to, nor where
    they belong to someone else than the user or root. A file that is truncated, damaged or of other versions is as good
    as none.
    """

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        """`devices`: in the order of the mesh; they may be those of a slice that is not there, to save only."""
        self.devices = tuple(devices)
        kind = re.sub(r"\W+", "-", self.devices[0].device_kind).strip("-").lower()
        self._parts = ("executables", f"{kind}-{len(self.devices)}")
        self.folder = programs_folder(*self._parts, make=False)
        platform = self.devices[0].platform
        chosen = compiler_flags(platform), engine_options(platform), _effort()
        self._setting = repr((FORMAT, _described(self.devices), _versions(), chosen))
        self._failed = False

    def __bool__(self) -> bool:
        """Whether anything is stored; without, no program has to be described to be looked up."""
        return self.folder is not None and any(self.folder.glob("*.program"))

    def key(self, lowered: jax.stages.Lowered) -> str:
        """Return the key of a program. It must be computed before compiling, because the compiler changes the lowered
        program."""
        whole = hashlib.sha256(self._setting.encode())
        whole.update(lowered.as_text().encode())
        return whole.hexdigest()

    def load(self, lowered: jax.stages.Lowered) -> Any:
        """The executable (`jax.stages.Compiled`) on the store's devices; None where there is none that loads. The first
        that does not is logged."""
        found = self._read(self.key(lowered))
        if found is None:
            return None
        try:
            return deserialize_and_load(
                found[1],
                jax.tree.structure(lowered.args_info),
                lowered.out_tree,
                backend=self.devices[0].client,
                execution_devices=self.devices,
            )
        except Exception as error:  # pickle and the runtime raise whatever they like
            if not self._failed:
                log.warning("a stored program does not load, so that it is compiled: %s", str(error).partition("\n")[0])
            self._failed = True
            return None

    def facts(self, key: str) -> dict[str, Any] | None:
        """Return the facts stored with a program; None where there is no program, or a damaged one."""
        found = self._read(key)
        return None if found is None else found[0]

    def save(self, key: str, compiled: jax.stages.Compiled, facts: Mapping[str, Any] | None = None) -> Path | None:
        """Store an executable, in place of one that is there; None where none are kept.

        Args:
            compiled: by the compiler, just now. One that JAX's cache had lacks what a second writing needs: on a CPU it
                loads and then fails.
            facts: plain JSON values, which `facts` returns later.

        Raises:
            OSError: it cannot be written.
        """
        self.folder = programs_folder(*self._parts)
        if self.folder is None:
            return None
        path, content = self.folder / f"{key}.program", serialize(compiled)[0]
        head = {"format": FORMAT, "sha256": hashlib.sha256(content).hexdigest(), "facts": dict(facts or {})}
        write_whole(path, json.dumps(head).encode() + b"\n" + content, mode=0o600)
        return path

    def _read(self, key: str) -> tuple[dict[str, Any], bytes] | None:
        return None if self.folder is None else _read(self.folder / f"{key}.program")


def _effort() -> tuple[str, ...]:
    """How much the compiler is asked to optimize, by JAX's own options."""
    names = ("optimization_level", "exec_time_optimization_effort", "memory_fitting_level", "memory_fitting_effort")
    return tuple(str(getattr(jax.config, f"jax_{name}", "")) for name in names)


def _read(path: Path) -> tuple[dict[str, Any], bytes] | None:
    """Facts and content of a file that is whole and that only its owner can have written."""
    try:
        if not is_closed(path.parent.stat()):
            return None
        with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb") as file:
            if not is_closed(os.fstat(file.fileno())):
                return None
            head, content = file.readline(), file.read()
        told = json.loads(head)
        whole = told["format"] == FORMAT and told["sha256"] == hashlib.sha256(content).hexdigest()
        return (dict(told["facts"]), content) if whole else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _described(devices: Sequence[jax.Device]) -> list[tuple[Any, ...]]:
    """What a program depends on of the devices that it runs on, and of this machine where it runs here."""
    places = [
        (device.platform, device.device_kind, device.id, getattr(device, "coords", None),
         getattr(device, "core_on_chip", None)) for device in devices
    ]  # fmt: skip
    return [*places, (host(),)] if devices[0].platform == "cpu" else [*places]


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for name in COMPILERS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions
