"""What a check is: a small named function over a case, with a level and a one-sentence promise. One generator lists the
checks of a model type for both doors, pytest and the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

from ttpu_conformance.case import Case, CompileCase
from ttpu_conformance.declaration import ExpectedFailure
from ttpu_conformance.environment import Device
from ttpu_conformance.errors import CheckFailure, DeclarationError
from ttpu_core.errors import RequestError

Level = Literal["contract", "numerics", "sharded", "compile", "device"]
LEVELS: tuple[Level, ...] = ("contract", "numerics", "sharded", "compile", "device")
EVERYWHERE: tuple[Level, ...] = ("contract", "numerics", "sharded", "compile")
"""Levels that need no device beside the CPU."""

Depth = Literal["quick", "full"]
Scope = Literal["type", "variant", "heavy"]


@dataclass(frozen=True)
class Measured:
    """What a check measured: the error must not be above the tolerance. `details` are plain values for the report."""

    error: float | None = None
    tolerance: float | None = None
    note: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """One promise.

    `scope`: "type" checks run for the base variant, "variant" checks for every one, "heavy" checks for the base and for
    variants that the declaration calls heavy. `quick` says for which cases it belongs to the quick selection: "all",
    "base" or "no"."""

    id: str
    level: Level
    promise: str
    function: Callable[[Case], Measured | None]
    scope: Scope
    quick: Literal["all", "base", "no"]

    def __call__(self, case: Case) -> Measured:
        """Hold the promise against a case.

        Raises:
            CheckFailure: it does not hold.
            NotApplicable, NotProven: it cannot be asked, or not here.
        """
        return self.function(case) or Measured()

    def applies_to(self, case: Case, depth: Depth) -> bool:
        """Whether the check is among those of a case."""
        if (self.level == "compile") != isinstance(case, CompileCase):
            return False
        if isinstance(case, CompileCase):
            return True
        if self.scope == "type" and not case.is_base:
            return False
        if self.scope == "heavy" and not (case.is_base or case.variant.name in case.declaration.heavy):
            return False
        return depth == "full" or self.quick == "all" or (self.quick == "base" and case.is_base)


SUBJECTS = (
    "contract",
    "numerics",
    "caching",
    "generation",
    "serving",
    "checkpoints",
    "training",
    "parallel",
    "compilation",
    "kernels",
)
"""Modules of `ttpu_conformance.checks`, in the order in which their checks run."""

_CHECKS: dict[str, Check] = {}


def check(
    level: Level, *, scope: Scope = "variant", quick: Literal["all", "base", "no"] = "no"
) -> Callable[[Callable[[Case], Measured | None]], Check]:
    """Register `check_<id>`; the first sentence of its docstring is the promise."""

    def register(function: Callable[[Case], Measured | None]) -> Check:
        name = function.__name__.removeprefix("check_")
        promise = " ".join((function.__doc__ or "").split("\n\n")[0].split())
        made = Check(name, level, promise, function, scope, quick)
        _CHECKS[name] = made
        return made

    return register


def all_checks() -> dict[str, Check]:
    """Every check by id, in the order in which they run."""
    for module in SUBJECTS:
        import_module(f"ttpu_conformance.checks.{module}")
    return {one.id: one for level in LEVELS for one in _CHECKS.values() if one.level == level}


def checks_named(names: Iterable[str]) -> list[Check]:
    """Checks by id.

    Raises:
        DeclarationError: no check has such an id.
    """
    known = all_checks()
    for name in names:
        if name not in known:
            raise DeclarationError(
                f"the check {name!r} was asked for, but the checks are {', '.join(known)}: use one of those."
            )
    return [known[name] for name in names]


@dataclass(frozen=True)
class Item:
    """A check of a case, and what is declared about its failing."""

    check: Check
    case: Case
    expected: ExpectedFailure | None = None

    @property
    def id(self) -> str:
        """As in `qwen3-base-float32_logits`."""
        return f"{self.case.name}-{self.check.id}"


def checks_for(
    cases: Iterable[Case], depth: Depth = "full", *, levels: Iterable[Level] | None = None, only: Iterable[str] = ()
) -> Iterator[Item]:
    """The checks of some cases, case by case, so that what one needs is made once and can be let go.

    Args:
        depth: "quick" for the selection that takes seconds.
        levels: which levels; None is all that run on any machine: contract, numerics, sharded, and compile for
            the cases that are about it.
        only: check ids; none means all. They are taken whatever their depth.

    Raises:
        DeclarationError: an id that does not exist, here or in a plugin's expected failures.
        RequestError: a check of `only` whose level is not among those asked for, so that it would never run.
    """
    known = all_checks()
    cases, chosen = list(cases), checks_named(only) or list(known.values())
    wanted = EVERYWHERE if levels is None else tuple(levels)
    if only:
        _refuse_unasked(chosen, wanted, compiling=any(isinstance(case, CompileCase) for case in cases))
    for case in cases:
        case.declaration.check_ids(known)
        for one in chosen:
            if one.level in wanted and one.applies_to(case, "full" if only else depth):
                yield Item(one, case, case.declaration.expected_failure(one.id, case.names))


def levels_on(device: Device) -> tuple[Level, ...]:
    """The levels that are checked on a device."""
    return EVERYWHERE if device == "cpu" else (*EVERYWHERE, "device")


def _refuse_unasked(chosen: Iterable[Check], wanted: tuple[Level, ...], *, compiling: bool) -> None:
    for one in chosen:
        if one.level == "compile" and not compiling:
            raise RequestError(
                f"the check {one.id!r} was asked for alone, but it compiles published models and no chip was named: "
                "add --compile-for to the command, as in --compile-for v5e."
            )
        if one.level not in wanted:
            add = "--device tpu, or device='tpu' in a test" if one.level == "device" else "its level"
            raise RequestError(
                f"the check {one.id!r} was asked for alone, but it is of the level {one.level!r} and those asked for "
                f"are {', '.join(wanted)}: add {add}."
            )


def fail(sentence: str, *, error: float | None = None, tolerance: float | None = None) -> Any:
    """Raise a `CheckFailure`."""
    raise CheckFailure(sentence, error=error, tolerance=tolerance)
