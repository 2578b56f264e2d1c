"""Selects the checks to run: one generator lists the checks of a model type's cases for pytest and for the command."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ttpu_conformance import checks  # noqa: F401  (importing the checks registers them)
from ttpu_conformance.case import Case, CompileCase
from ttpu_conformance.check import EVERYWHERE, Check, Depth, Level, registered
from ttpu_conformance.declaration import ExpectedFailure
from ttpu_conformance.environment import Device
from ttpu_conformance.errors import DeclarationError
from ttpu_core.errors import RequestError


def all_checks() -> dict[str, Check]:
    """Every check by id, in the order in which they run."""
    return {one.id: one for one in registered()}


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
    """A check of a case, and the plugin's declaration of its failure, if any."""

    check: Check
    case: Case
    expected: ExpectedFailure | None = None

    @property
    def id(self) -> str:
        """The item's name, as in `qwen3-base-float32_logits`."""
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
                yield Item(one, case, case.expected_failure(one.id))


def levels_on(device: Device) -> tuple[Level, ...]:
    """Return the levels that are checked on a device."""
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
