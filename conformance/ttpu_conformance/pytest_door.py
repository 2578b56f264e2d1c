"""The checks under pytest. `@parametrize_with_checks("qwen3")` makes one test of each check and case, with ids such as
`qwen3-base-float32_logits`. The outcomes are those of the command: expected failures are strict xfails."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, get_args

from ttpu_conformance.case import Case, Options, cases_of
from ttpu_conformance.check import Depth, Level
from ttpu_conformance.declaration import Declaration
from ttpu_conformance.environment import Device
from ttpu_conformance.errors import CheckFailure
from ttpu_conformance.runner import outcome
from ttpu_conformance.selection import Item, checks_for, levels_on
from ttpu_conformance.session import prepare
from ttpu_core.errors import RequestError
from ttpu_core.registry import Registry

LEVEL_VARIABLE = "TTPU_CONFORMANCE_LEVEL"

PROVEN_BY_OTHERS = ("served_tokens", "cached_decode", "decode_compiles_once")
"""Quick checks that relatives do without at the standard level."""


@dataclass(frozen=True)
class PytestCheck:
    """A check of one case as a test. It skips, with the reason, where the check does not apply."""

    item: Item

    def __call__(self, case: Case) -> None:
        """Run the check on a case.

        Raises:
            CheckFailure: the promise does not hold.
        """
        import pytest

        _keep_only(case)
        found = outcome(replace(self.item, case=case))
        if found.status == "expected failure":
            pytest.xfail(found.reason)
        if found.status == "failed":
            if isinstance(found.raised, CheckFailure):
                raise found.raised
            raise CheckFailure(found.reason) from found.raised
        if found.status != "passed":
            pytest.skip(found.reason)

    def __repr__(self) -> str:
        return f"{self.item.check.id}: {self.item.check.promise}"


_latest: Case | None = None


def _keep_only(case: Case) -> None:
    """Let go of what the case before this one has made."""
    global _latest
    if _latest is not None and _latest is not case:
        _latest.clear()
    _latest = case


def release() -> None:
    """Let go of the models of the latest case, which are kept for its next check. A model that runs transformers' code
    keeps patches applied for as long as it is there."""
    global _latest
    if _latest is not None:
        _latest.clear()
    _latest = None


def parametrize_with_checks(
    *model_types: str,
    level: Depth | None = None,
    levels: Iterable[Level] | None = None,
    relatives: bool = False,
    device: Device = "cpu",
    only: Iterable[str] = (),
    patch_packs: Iterable[str] = (),
    attn_implementation: str = "auto",
    backend: str | None = None,
    registry: Registry | None = None,
    declaration: Declaration | None = None,
) -> Any:
    """Parametrize a test function `(case, check)` with every check of some model types.

    Args:
        model_types: Hugging Face model types that installed plugins describe.
        level: "quick" for the selection that takes seconds per type; "standard" for all checks of each type's base
            variant and the quick ones of its other variants; or "full". None reads the environment variable
            TTPU_CONFORMANCE_LEVEL; without it everything is checked.
        levels: which levels of checks; None is contract, numerics and sharded, which run on any machine, and on a TPU
            device too.
        relatives: the types are made of parts that other types' checks prove. At the level "standard" they get the
            quick checks, except those of caches beside greedy_tokens, which tell more of parts than of types.
        device: where numbers are computed; "tpu" skips with the reason where there is none.
        only: check ids, instead of all.
        patch_packs: installed patch packs under which to check.
        attn_implementation: as in `from_pretrained`.
        backend: which runs the models; None is the one that runs models where none is named.
        registry, declaration: instead of the environment's plugins and the plugin's own conformance.toml.

    The sharded checks need eight devices. On a CPU this sets the backend's variables for that, XLA_FLAGS for JAX, which
    count if it has not started yet; where a test module uses it earlier, set them in `conftest.py`.

    Raises:
        MissingDependencyError: the backend is not installed.
        PluginError, DeclarationError, RequestError: while tests are collected.
    """
    import pytest

    level = level or _level_of_environment()
    left_out: tuple[str, ...] = ()
    if relatives and level == "standard":
        level, left_out = "quick", PROVEN_BY_OTHERS
    options = Options(device, tuple(patch_packs), attn_implementation, backend)
    prepare(options)
    wanted = levels_on(device) if levels is None else tuple(levels)
    parameters = []
    for model_type in model_types:
        cases = cases_of(model_type, options, registry=registry, declaration=declaration)
        for item in checks_for(cases, level, levels=wanted, only=only):
            if item.check.id in left_out:
                continue
            parameters.append(pytest.param(item.case, PytestCheck(item), id=item.id))
    return pytest.mark.parametrize(("case", "check"), parameters)


def _level_of_environment() -> Depth:
    """Return the level that TTPU_CONFORMANCE_LEVEL names, "full" where it is not set.

    Raises:
        RequestError: it names no level.
    """
    named = os.environ.get(LEVEL_VARIABLE, "full")
    for level in get_args(Depth):
        if level == named:
            found: Depth = level
            return found
    raise RequestError(
        f"{LEVEL_VARIABLE} is {named!r}, but the levels are {', '.join(get_args(Depth))}: set it to one of them, or "
        "unset it to check everything."
    )
