"""A check: a small named function of a case, with a level and a promise of one sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ttpu_conformance.case import Case, CompileCase
from ttpu_conformance.measure import Measured

Level = Literal["contract", "numerics", "sharded", "compile", "device"]
LEVELS: tuple[Level, ...] = ("contract", "numerics", "sharded", "compile", "device")
EVERYWHERE: tuple[Level, ...] = ("contract", "numerics", "sharded", "compile")
"""Levels that need no device beside the CPU."""

Depth = Literal["quick", "standard", "full"]
Quick = Literal["all", "base", "no", "full"]
Scope = Literal["type", "variant", "heavy"]

WRAPPER_CHECKS = ("greedy_tokens",)
"""What the standard selection proves of the base of a type that wraps another one's text model, beside the checks that
belong to the quick selection for every case: it is loaded, named and generated from as a whole."""


@dataclass(frozen=True)
class Check:
    """One promise.

    `scope`: "type" checks run for the base variant, "variant" checks for every one, "heavy" checks for the base and for
    variants that the declaration calls heavy. `quick` says for which cases it belongs to the quick selection: "all",
    "base" or "no". The standard selection has every check of the base, and of other cases what the quick one has;
    "full" says that it belongs to neither. The base of a type that wraps another one's text model is such a case: the
    other type's checks prove that model."""

    id: str
    level: Level
    promise: str
    function: Callable[[Case], Measured | None]
    scope: Scope
    quick: Quick

    def __call__(self, case: Case) -> Measured:
        """Hold the promise against a case.

        Raises:
            CheckFailure: it does not hold.
            NotApplicable, NotProven: it cannot be asked, or not here.
        """
        return self.function(case) or Measured()

    def applies_to(self, case: Case, depth: Depth) -> bool:
        """Whether the check applies to a case."""
        if (self.level == "compile") != isinstance(case, CompileCase):
            return False
        if isinstance(case, CompileCase):
            return True
        if self.scope == "type" and not case.is_base:
            return False
        if self.scope == "heavy" and not (case.is_base or case.variant.name in case.declaration.heavy):
            return False
        if depth == "full" or self.quick == "all":
            return True
        if depth == "standard":
            return self.quick != "full" and case.is_base and (not case.wraps_text_model or self.id in WRAPPER_CHECKS)
        return self.quick == "base" and case.is_base


_CHECKS: dict[str, Check] = {}


def check(
    level: Level, *, scope: Scope = "variant", quick: Quick = "no"
) -> Callable[[Callable[[Case], Measured | None]], Check]:
    """Register `check_<id>`; the first sentence of its docstring is the promise."""

    def register(function: Callable[[Case], Measured | None]) -> Check:
        name = function.__name__.removeprefix("check_")
        promise = " ".join((function.__doc__ or "").split("\n\n")[0].split())
        made = Check(name, level, promise, function, scope, quick)
        _CHECKS[name] = made
        return made

    return register


def registered() -> list[Check]:
    """Return every check of the modules imported so far, by level, in the order in which they run."""
    return [one for level in LEVELS for one in _CHECKS.values() if one.level == level]
