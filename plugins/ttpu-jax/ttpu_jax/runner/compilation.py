"""Compiles programs ahead of time in a thread pool, by name and shape, or loads executables that were compiled before.
Some may be compiled while the engine serves, with others in their place. Once it serves, a program that was not asked
for is an error in strict mode; otherwise it is compiled and counted."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import jax

from ttpu_core.errors import TTPUError
from ttpu_jax.compiler_flags import engine_options
from ttpu_jax.compiling import compiled_with, lower
from ttpu_jax.runner.buckets import StepShape

if TYPE_CHECKING:
    from ttpu_jax.runner.executable_cache import ExecutableCache

log = logging.getLogger("ttpu.engine")
SOURCES, FOLDERS_OF_SOURCES = "jax_hlo_source_file_canonicalization_regex", r".*/(?=(?:jax|ttpu_jax)/)"
OnProgress = Callable[[str, float, float], None]


class RecompileError(TTPUError):
    """In strict mode, serving needed a program that was not compiled ahead."""


@dataclass(frozen=True)
class Program:
    """A function to compile. `arguments` are abstract (`jax.ShapeDtypeStruct`) or arrays."""

    key: Hashable
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()
    out_shardings: Any = None

    def lower(self) -> jax.stages.Lowered:
        """Trace the function without compiling it."""
        with without_folders():
            return lower(self.jitted, *self.arguments)

    @property
    def jitted(self) -> Any:
        """The function under `jax.jit`."""
        return jax.jit(self.function, donate_argnums=self.donated, out_shardings=self.out_shardings)


@dataclass(frozen=True)
class CompileStats:
    """Compilations so far.

    Attributes:
        programs: the number of compiled programs.
        recompiles: of those, how many were compiled while serving without having been asked for before.
        seconds: that compiling took before serving.
        pending: programs that are compiled while the engine serves, and are not there yet.
        cached: programs that were in a cache.
    """

    programs: int
    recompiles: int
    seconds: float
    pending: int = 0
    cached: int = 0


@dataclass(frozen=True)
class ProgramStats:
    """One compiled program; `peak_bytes` is None where the compiler does not say."""

    name: str
    peak_bytes: int | None
    seconds: float


@contextmanager
def without_folders() -> Iterator[None]:
    """Trace without the folders of Python packages on this machine. Pallas kernels carry the names of their source
    files, so that programs would otherwise differ between virtual environments."""
    config: Any = jax.config  # its options are not in its type
    if getattr(config, SOURCES) is not None:
        yield
        return
    jax.config.update(SOURCES, FOLDERS_OF_SOURCES)
    try:
        yield
    finally:
        jax.config.update(SOURCES, None)


_HITS = threading.local()


def _note(event: str, **_: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits" and (hits := getattr(_HITS, "seen", None)) is not None:
        hits.append(event)


@contextmanager
def cache_hits() -> Iterator[list[str]]:
    """Collect what JAX's compilation cache finds for this thread."""
    _listen()
    hits: list[str] = []
    _HITS.seen = hits
    try:
        yield hits
    finally:
        _HITS.seen = None


@cache
def _listen() -> None:
    jax.monitoring.register_event_listener(_note)


class ProgramPool:
    """Holds compiled programs. `recompiles` counts those compiled while serving, `loaded` those that a store or JAX's
    cache had; `seconds` has the time that each took."""

    def __init__(
        self,
        *,
        strict: bool = False,
        workers: int | None = None,
        store: ExecutableCache | None = None,
        platform: str | None = None,
    ) -> None:
        self.strict = strict
        self.options = engine_options(platform)
        self.serving = False
        self.recompiles = 0
        self.loaded = 0
        self.seconds: dict[Hashable, float] = {}
        self.store = store
        self.compile_seconds = 0.0
        self._workers = workers or max(1, min(8, os.cpu_count() or 1))
        self._compiled: dict[Hashable, Any] = {}
        self._lock, self._missing = threading.Lock(), threading.Lock()
        self._waiting: dict[Hashable, Program] = {}  # compiled meanwhile, in this order
        self._in_work: dict[Hashable, threading.Event] = {}
        self._meanwhile: ThreadPoolExecutor | None = None

    def compile(self, programs: Iterable[Program], progress: OnProgress | None = None) -> None:
        """Compile all programs. They are traced here, one after another, because tracing holds the interpreter's lock,
        and compiled in threads meanwhile. `progress("compile", done, total)` is called after each."""
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

    def compile_meanwhile(self, programs: Iterable[Program]) -> None:
        """Compile programs one after another in a thread, while others serve."""
        with self._lock:
            self._waiting.update({each.key: each for each in programs if each.key not in self._compiled})
        self._meanwhile = ThreadPoolExecutor(1, thread_name_prefix="ttpu-compile-meanwhile")
        self._go_on()

    def _go_on(self) -> None:
        """Compile the next program in the thread; a process that ends takes no more."""
        if self._meanwhile is not None and self._waiting:
            with suppress(RuntimeError):
                self._meanwhile.submit(self._compile_next)

    def _compile_next(self) -> None:
        with self._lock:
            key = next(iter(self._waiting), None)
        if key is None:
            return
        try:
            self._compile_waiting(key)
        except Exception:
            log.exception("the program %s could not be compiled; a step that needs it will try again", name_of(key))
        self._go_on()

    def _compile_waiting(self, key: Hashable) -> None:
        """Compile one of the waiting programs in this thread, unless another thread does; then wait for it."""
        with self._lock:
            program = self._waiting.pop(key, None)
            event = self._in_work.setdefault(key, threading.Event()) if program else self._in_work.get(key)
        if program is None:
            if event is not None:
                event.wait()
            return
        assert event is not None
        try:
            self._compiled[key], self.seconds[key], loaded = self._built(program.lower())
            self.loaded += loaded
        finally:
            with self._lock:
                del self._in_work[key]
            event.set()

    def has(self, key: Hashable) -> bool:
        """Whether a program is compiled."""
        return key in self._compiled

    def close(self) -> None:
        """Compile nothing more."""
        with self._lock:
            self._waiting.clear()
        if self._meanwhile is not None:
            self._meanwhile.shutdown(wait=True, cancel_futures=True)

    def executable(self, key: Hashable) -> Any:
        """Return the executable of a key; KeyError if there is none."""
        return self._compiled[key]

    def get(self, key: Hashable, program: Callable[[], Program]) -> Any:
        """Return the executable of a key; where it is missing, `program` makes the program to compile. One that is to
        be compiled meanwhile is compiled now.

        Raises:
            RecompileError: it is missing while serving, in strict mode.
        """
        found = self._compiled.get(key)
        if found is None:
            self._compile_waiting(key)
            found = self._compiled.get(key)
        if found is not None:
            return found
        with self._missing:
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
        """Return the statistics of all compilations so far."""
        pending = len(self._waiting) + len(self._in_work)
        return CompileStats(len(self._compiled), self.recompiles, self.compile_seconds, pending, self.loaded)

    def build(self, program: Program) -> Any:
        """Compile a program without keeping its executable."""
        return self._built(program.lower())[0]

    def _built(self, lowered: jax.stages.Lowered) -> tuple[Any, float, bool]:
        """The executable, how long it took, and whether a store or JAX's cache had it."""
        began = time.perf_counter()
        found = self.store.load(lowered) if self.store else None
        if found is not None:
            return found, time.perf_counter() - began, True
        with cache_hits() as hits:
            compiled = compiled_with(lowered, self.options)
        return compiled, time.perf_counter() - began, bool(hits)

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """The keys of all compiled programs."""
        return tuple(self._compiled)


def program_stats(pool: ProgramPool, keys: Sequence[Hashable]) -> list[ProgramStats]:
    """Return the compiler's figures for the programs of some keys."""
    found = []
    for key in keys:
        peak = getattr(pool.executable(key).memory_analysis(), "peak_memory_in_bytes", None)
        found.append(ProgramStats(name_of(key), peak, pool.seconds[key]))
    return found


def name_of(key: Any) -> str:
    """Return the name of a key's program in tables."""
    if isinstance(key, str):
        return key
    kind, *rest = key
    return str(rest[0]) if isinstance(rest[0], StepShape) else " ".join([str(kind), *(_word(each) for each in rest)])


def _word(part: Any) -> str:
    return part.name.lower() if hasattr(part, "name") else str(part)
