"""The compiler's figures for a plan's programs. A backend returns them, and the command line prints them beside the
prediction."""

from __future__ import annotations

from dataclasses import dataclass

MEASURED = (0.8, 1.5)
"""Between which multiples of the schedule's predictions lie published measurements on TPUs (docs/compile-report.md)."""
MEASURED_NOTE = (
    f"What others measured on TPUs took {MEASURED[0]} to {MEASURED[1]} times such predictions (docs/compile-report.md)."
)


@dataclass(frozen=True)
class Verification:
    """One program, compiled for slices that need not be present.

    Args:
        task: the program's task.
        peak_bytes: peak memory on one device; None if the compiler refused the program.
        seconds: estimate from the compiler's schedule, with kernels and HBM shared; suitable for comparing programs.
        collectives: kind of collective, number of executions, and bytes of all results on one device.
        compile_seconds: duration of the compilation.
        compiler: name and version of the compiler.
        refused: the reason for a refusal, else "".
        cached: whether the result comes from the cache.
    """

    task: str
    peak_bytes: int | None
    seconds: float
    collectives: tuple[tuple[str, int, int], ...]
    compile_seconds: float
    compiler: str
    refused: str = ""
    cached: bool = False
