"""Compiles programs ahead of time in a thread pool, by name and shape, or loads executables that were compiled before.
Once the engine serves, a missing program is an error in strict mode; otherwise it is compiled and counted."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from ttpu_core.errors import TTPUError
from ttpu_jax.compiler_flags import compiler_options
from ttpu_jax.runner.buckets import StepShape

if TYPE_CHECKING:
    from ttpu_jax.runner.executable_cache import ExecutableCache

log = logging.getLogger("ttpu.engine")
SOURCES, FOLDERS_OF_SOURCES = "jax_hlo_source_file_canonicalization_regex", r".*/(?=(?:jax|ttpu_jax)/)"
OnProgress = Callable[[str, float, float], None]


class RecompileError(TTPUError):
    """A program that was not compiled ahead was needed while serving, in strict mode."""


@dataclass(frozen=True)
class Program:
    """A function to compile. `arguments` are abstract (`jax.ShapeDtypeStruct`) or arrays."""

    key: Hashable
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()
    out_shardings: Any = None

    def lower(self) -> jax.stages.Lowered:
        """Traced; the compiler has yet to run."""
        with without_folders():
            return self.jitted.lower(*self.arguments)

    @property
    def jitted(self) -> Any:
        """The function under `jax.jit`."""
        return jax.jit(self.function, donate_argnums=self.donated, out_shardings=self.out_shardings)


@dataclass(frozen=True)
class CompileStats:
    """Programs that are there, those of them that were compiled while serving, and the time that compiling took."""

    programs: int
    recompiles: int
    seconds: float


@dataclass(frozen=True)
class ProgramStats:
    """One compiled program; `peak_bytes` is None where the compiler does not say."""

    name: str
    peak_bytes: int | None
    seconds: float


@contextmanager
def without_folders() -> Iterator[None]:
    """Let what is traced meanwhile not say where Python packages lie on this machine: Pallas kernels carry the names of
    their source files, and programs would be other ones in another virtual environment."""
    config: Any = jax.config  # its options are not in its type
    if getattr(config, SOURCES) is not None:
        yield
        return
    jax.config.update(SOURCES, FOLDERS_OF_SOURCES)
    try:
        yield
    finally:
        jax.config.update(SOURCES, None)


class ProgramPool:
    """Keeps what is compiled. `recompiles` counts the programs that were compiled while serving, `loaded` those that a
    store had; `seconds` says how long each took."""

    def __init__(
        self,
        *,
        strict: bool = False,
        workers: int | None = None,
        store: ExecutableCache | None = None,
        platform: str | None = None,
    ) -> None:
        self.strict = strict
        self.options = compiler_options(platform)
        self.serving = False
        self.recompiles = 0
        self.loaded = 0
        self.seconds: dict[Hashable, float] = {}
        self.store = store
        self.compile_seconds = 0.0
        self._workers = workers or max(1, min(8, os.cpu_count() or 1))
        self._compiled: dict[Hashable, Any] = {}
        self._lock = threading.Lock()

    def compile(self, programs: Iterable[Program], progress: OnProgress | None = None) -> None:
        """Compile all of them: traced here, one after another, since tracing holds the interpreter's lock; compiled in
        threads meanwhile. `progress("compile", done, total)` after each."""
        wanted = [program for program in programs if program.key not in self._compiled]
        began, done = time.perf_counter(), 0
        if progress is not None and wanted:
            progress("compile", 0, len(wanted))
        with ThreadPoolExecutor(self._workers, thread_name_prefix="ttpu-compile") as pool:
            futures = {pool.submit(self._built, program.lower()): program.key for program in wanted}
            for future in as_completed(futures):
                key = futures[future]
                self._compiled[key], self.seconds[key], loaded = future.result()
                self.loaded += loaded
                done += 1
                if progress is not None:
                    progress("compile", done, len(wanted))
        self.compile_seconds += time.perf_counter() - began

    def executable(self, key: Hashable) -> Any:
        """What was compiled under a key; KeyError where nothing was."""
        return self._compiled[key]

    def get(self, key: Hashable, program: Callable[[], Program]) -> Any:
        """The executable of a key; `program` makes what is compiled where it is missing.

        Raises:
            RecompileError: it is missing while serving, in strict mode.
        """
        found = self._compiled.get(key)
        if found is not None:
            return found
        with self._lock:
            if self.serving:
                self.recompiles += 1
                if self.strict:
                    raise RecompileError(
                        f"the program {key} was needed while serving, but was not compiled ahead, and strict_compile "
                        "is on: add its shape to the buckets, or turn strict_compile off."
                    )
                log.warning("compiling %s while serving: requests wait meanwhile", key)
            self.compile([program()])
        return self._compiled[key]

    def stats(self) -> CompileStats:
        """What was compiled so far."""
        return CompileStats(len(self._compiled), self.recompiles, self.compile_seconds)

    def build(self, program: Program) -> Any:
        """An executable that is not kept."""
        return self._built(program.lower())[0]

    def _built(self, lowered: jax.stages.Lowered) -> tuple[Any, float, bool]:
        """The executable, how long it took, and whether a store had it."""
        began = time.perf_counter()
        found = self.store.load(lowered) if self.store else None
        compiled = lowered.compile(compiler_options=self.options) if found is None else found
        return compiled, time.perf_counter() - began, found is not None

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """What is compiled."""
        return tuple(self._compiled)


def program_stats(pool: ProgramPool, keys: Sequence[Hashable]) -> list[ProgramStats]:
    """What the compiler says of the programs of some keys."""
    found = []
    for key in keys:
        peak = getattr(pool.executable(key).memory_analysis(), "peak_memory_in_bytes", None)
        found.append(ProgramStats(name_of(key), peak, pool.seconds[key]))
    return found


def name_of(key: Any) -> str:
    """What tables call the program of a key."""
    if isinstance(key, str):
        return key
    kind, *rest = key
    return str(rest[0]) if isinstance(rest[0], StepShape) else " ".join([str(kind), *(_word(each) for each in rest)])


def _word(part: Any) -> str:
    return part.name.lower() if hasattr(part, "name") else str(part)
