"""Runs checks and returns one `Result` each. It applies the rules for missing devices, missing references and expected
failures, for pytest and for the command alike."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ttpu_conformance.case import Case
from ttpu_conformance.check import Level
from ttpu_conformance.environment import Device
from ttpu_conformance.errors import CheckFailure, NoReference, NotApplicable, NotProven
from ttpu_conformance.measure import Measured
from ttpu_conformance.selection import Item
from ttpu_conformance.stumbles import explained, with_hook
from ttpu_core.cli.commands import TRACEBACK_VARIABLE
from ttpu_core.errors import TTPUError

Status = Literal["passed", "failed", "expected failure", "not applicable", "skipped", "expected skip"]


@dataclass(frozen=True)
class Result:
    """The result of one check of one case. `error` and `tolerance` are shares of the logits' scale, or None."""

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
    """Run checks in order. A case's models are dropped after its last check, compiled programs at the end."""
    previous: Case | None = None
    for item in items:
        if previous is not None and item.case is not previous:
            previous.clear()
        previous = item.case
        yield run_one(item)
    if previous is not None:
        previous.clear()
        previous.backend.forget_programs()  # a process may map only so many programs


def run_one(item: Item) -> Result:
    """Run one check and return its result. Only exceptions that end the process are passed on."""
    began = time.perf_counter()
    found = outcome(item)
    record = item.case.record
    return Result(
        item.case.model_type,
        item.case.variant.name,
        f"{record.distribution} {record.version}",
        item.check.id,
        item.check.level,
        found.status,
        found.reason,
        found.measured.error,
        found.measured.tolerance,
        time.perf_counter() - began,
        dict(found.measured.details),
    )


@dataclass(frozen=True)
class Outcome:
    """The outcome of a check, and the exception where it failed by itself."""

    status: Status
    reason: str
    measured: Measured = field(default_factory=Measured)
    raised: Exception | None = None


def outcome(item: Item) -> Outcome:
    """One check, with what is declared about it: a failure may be expected, and then nothing else may happen."""
    found, expected = _attempt(item), item.expected
    if expected is None or isinstance(found.raised, NoReference):
        return found
    if found.status == "failed":
        return Outcome("expected failure", f"{expected.reason} ({found.reason})", found.measured)
    if found.status in ("passed", "not applicable"):
        instead = "it passes" if found.status == "passed" else "it does not apply"
        reason = (
            f"this was declared to fail ({expected.reason}), but {instead}: remove the expected failure from "
            f"{item.case.declaration.source}."
        )
        return Outcome("failed", reason, found.measured)
    return found


def needed_device(item: Item) -> Device | None:
    """The device that a check needs: kernels are checked on a TPU; descriptions and compilers need none."""
    if item.check.level == "device":
        return "tpu"
    return None if item.check.level in ("contract", "compile") else item.case.options.device


def _attempt(item: Item) -> Outcome:
    try:
        device = needed_device(item)
        missing = item.case.backend.missing_device(device) if device else None
        if missing:
            raise NotProven(missing)
        measured = item.check(item.case)
        return Outcome("passed", measured.note, measured)
    except CheckFailure as failure:
        return Outcome("failed", str(failure), Measured(failure.error, failure.tolerance), failure)
    except NotApplicable as reason:
        return Outcome("not applicable", str(reason))
    except NoReference as missing_library:
        return _without_reference(item, missing_library)
    except NotProven as reason:
        return Outcome("skipped", str(reason))
    except TTPUError as error:
        return Outcome("failed", with_hook(error, item.case), raised=error)
    except Exception as error:  # a check that stumbles proves nothing, and must not stop the others
        if os.environ.get(TRACEBACK_VARIABLE, "") not in ("", "0"):
            traceback.print_exc()
        return Outcome("failed", explained(error, item.case), raised=error)


def _without_reference(item: Item, missing: NoReference) -> Outcome:
    """A failure, unless the plugin declares that its reference model cannot be made everywhere."""
    declaration = item.case.declaration
    if declaration.not_proven is not None:
        return Outcome("expected skip", declaration.not_proven, raised=missing)
    reason = (
        f'{str(missing).rstrip(".")}: install what is missing, or say with not_proven = "…" under '
        f"[{declaration.model_type}] in conformance.toml what the reference model needs."
    )
    return Outcome("failed", reason, raised=missing)
