"""Runs checks. In: the items that `checks_for` lists; out: one `Result` each, with the rules about expected failures
applied."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ttpu_conformance.case import Case
from ttpu_conformance.check import Item, Level, Measured
from ttpu_conformance.environment import missing_device
from ttpu_conformance.errors import CheckFailure, NotApplicable, NotProven
from ttpu_core.cli.commands import TRACEBACK_VARIABLE
from ttpu_core.errors import TTPUError

Status = Literal["passed", "failed", "expected failure", "not applicable", "skipped"]


@dataclass(frozen=True)
class Result:
    """What came of one check of one case. `error` and `tolerance` are shares of the logits' scale, or None."""

    model_type: str
    variant: str
    plugin: str
    check: str
    level: Level
    status: Status
    reason: str
    error: float | None
    tolerance: float | None
    seconds: float
    details: Mapping[str, Any]


def run(items: Iterable[Item]) -> Iterator[Result]:
    """Run checks in order; a case's models are forgotten when its last check is done, compiled programs at the end."""
    previous: Case | None = None
    for item in items:
        if previous is not None and item.case is not previous:
            previous.clear()
        previous = item.case
        yield run_one(item)
    if previous is not None:
        previous.clear()
        forget_programs()


def forget_programs() -> None:
    """Let go of what JAX keeps of functions that will not be called again: a process may map only so many programs."""
    import jax

    jax.clear_caches()


def run_one(item: Item) -> Result:
    """One check; nothing that it raises gets out, except what ends the process."""
    began = time.perf_counter()
    status, reason, measured = _outcome(item)
    expected = item.expected
    if expected is not None and status == "failed":
        status, reason = "expected failure", f"{expected.reason} ({reason})"
    elif expected is not None and status in ("passed", "not applicable"):
        found = "it passes" if status == "passed" else "it does not apply"
        reason = (
            f"this was declared to fail ({expected.reason}), but {found}: remove the expected failure from "
            f"{item.case.declaration.source}."
        )
        status = "failed"
    record = item.case.record
    return Result(
        item.case.model_type,
        item.case.variant.name,
        f"{record.distribution} {record.version}",
        item.check.id,
        item.check.level,
        status,
        reason,
        measured.error,
        measured.tolerance,
        time.perf_counter() - began,
        dict(measured.details),
    )


def _outcome(item: Item) -> tuple[Status, str, Measured]:
    try:
        missing = missing_device(item.case.options.device) if item.check.level != "contract" else None
        if missing:
            raise NotProven(missing)
        measured = item.check(item.case)
        return "passed", measured.note, measured
    except CheckFailure as failure:
        return "failed", str(failure), Measured(failure.error, failure.tolerance)
    except NotApplicable as reason:
        return "not applicable", str(reason), Measured()
    except NotProven as reason:
        return "skipped", str(reason), Measured()
    except TTPUError as error:
        return "failed", " ".join(str(error).split()), Measured()
    except Exception as error:  # a check that stumbles proves nothing, and must not stop the others
        if os.environ.get(TRACEBACK_VARIABLE, "") not in ("", "0"):
            traceback.print_exc()
        text = " ".join(str(error).split())[:400]
        return "failed", f"the check stumbled over {type(error).__name__}: {text}", Measured()
