"""Runs the checks of several model types, in this process or in several, and yields the results of each type as it is
done."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from ttpu_conformance import environment
from ttpu_conformance.case import Options, cases_of
from ttpu_conformance.check import Depth, Level
from ttpu_conformance.environment import VIRTUAL_DEVICES
from ttpu_conformance.model_under_test import backend_under_test
from ttpu_conformance.runner import Result, run
from ttpu_conformance.selection import Item, checks_for
from ttpu_core.errors import TTPUError

MOST_JOBS = 8
"""Processes that are started unless more are asked for; each takes one to two GiB."""

Announce = Callable[[Item], None]


@dataclass(frozen=True)
class Request:
    """The options of a run for every model type; see `ttpu_conformance.selection.checks_for`."""

    depth: Depth
    levels: tuple[Level, ...]
    only: tuple[str, ...]
    chips: tuple[str, ...]
    options: Options

    def items(self, model_type: str) -> list[Item]:
        """The checks of one model type.

        Raises:
            PluginError, DeclarationError: no such plugin, or something that the kit does not know.
            RequestError: a check that would never run.
        """
        cases = cases_of(model_type, self.options, compile_for=self.chips)
        return list(checks_for(cases, self.depth, levels=self.levels, only=self.only))


def prepare(options: Options) -> None:
    """Prepare this process for a run, before the backend starts in it.

    Raises:
        MissingDependencyError: the backend is not installed.
    """
    environment.prepare()
    backend_under_test(options.backend).prepare(options.device, VIRTUAL_DEVICES)


def usual_jobs(types: Sequence[str], options: Options) -> int:
    """Return the number of processes: one for each core and model type, and one on a TPU."""
    return 1 if options.device == "tpu" else min(os.cpu_count() or 1, len(types), MOST_JOBS)


def check_types(
    types: Sequence[str], request: Request, jobs: int, announce: Announce = lambda item: None
) -> Generator[tuple[str, list[Result]]]:
    """The results of each type as it is done; where one process serves, `announce` hears of each check before it runs.

    Raises:
        TTPUError: a process ended by itself.
    """
    if jobs == 1:
        for model_type in types:
            yield model_type, list(run(_announced(request.items(model_type), announce)))
        return
    # Spawned: JAX and torch have threads, which a fork would lose.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, context, initializer=prepare, initargs=(request.options,))
    try:
        # Those with most checks first, so that none of them is left over for one process alone at the end.
        largest_first = sorted(types, key=lambda model_type: -len(request.items(model_type)))
        running = {pool.submit(_check_type, model_type, request): model_type for model_type in largest_first}
        for done in as_completed(running):
            try:
                yield running[done], done.result()
            except BrokenProcessPool as error:
                raise TTPUError(
                    f"a process that checked one of {', '.join(types)} ended by itself, for lack of memory or by a "
                    "crash in a library: run again with --jobs 1, which shows at which check."
                ) from error
    finally:  # whoever stops listening does not want the types that have not begun
        pool.shutdown(cancel_futures=True)


def _check_type(model_type: str, request: Request) -> list[Result]:
    return list(run(request.items(model_type)))


def _announced(items: list[Item], announce: Announce) -> Iterator[Item]:
    for item in items:
        announce(item)
        yield item
