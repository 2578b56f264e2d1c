"""What a compiler says of a plan's programs. A backend gives it; the command line shows it beside the prediction."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verification:
    """One program, compiled for slices that need not be there.

    Args:
        peak_bytes: on one device; None where the compiler refused the program.
        seconds: a walk through the compiler's schedule, good for comparing programs.
        collectives: kind of exchange, how often it is executed, and bytes of all its results on one device.
        refused: the sentence that says why, else "".
        compiler: its name and version.
        cached: compiled on another day.
    """

    task: str
    peak_bytes: int | None
    seconds: float
    collectives: tuple[tuple[str, int, int], ...]
    compile_seconds: float
    compiler: str
    refused: str = ""
    cached: bool = False
