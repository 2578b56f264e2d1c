"""What a TPU's compiler says of the programs of plans, for `ttpu plan --verify`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ttpu_core.cli.console import stderr_console

if TYPE_CHECKING:
    from ttpu_core.architecture import Architecture
    from ttpu_core.sharding.verification import Verification
    from ttpu_plan.plan import Plan

Verified = dict["Plan", "tuple[Verification, ...]"]
"""Plan → what the compiler says of its programs."""


def compiled_plans(architecture: Architecture, wanted: Sequence[Plan]) -> Verified:
    """Compile the programs of plans.

    Args:
        architecture: of their model.
        wanted: the plans.

    Raises:
        UnsupportedError: no installed backend can compile a plan.
    """
    from ttpu_core.backend import Verifies
    from ttpu_core.errors import UnsupportedError
    from ttpu_core.registry import default_registry
    from ttpu_plan.served import capable_backend

    backend = capable_backend(default_registry(), Verifies)
    if not isinstance(backend, Verifies):
        raise UnsupportedError(
            "--verify was asked for, but no installed backend can compile a plan: "
            '`pip install -U "ttpu-core[jax]"`.'
        )
    result: Verified = {}
    with stderr_console().status("") as status:
        for one in wanted:

            def progress(task: str, one: Plan = one) -> None:
                status.update(f"compiling {task} of {one.model_type} for {plan_name(one)}")

            result[one] = backend.verify_plan(architecture, one, progress=progress)
    return result


def refused(one: Plan, verified: Verified) -> bool:
    """Whether the compiler refuses one of a plan's programs."""
    return any(program.peak_bytes is None for program in verified.get(one, ()))


def all_refused(shown: Sequence[Plan], verified: Verified) -> str:
    """Why nothing fits, where the compiler refuses every plan that was predicted to."""
    left = any(one.fits and one not in verified for one in shown)
    return (
        "the compiler refuses what was predicted to fit: take "
        f"{'more of --candidates, or more chips' if left else 'more chips, fewer rows or a shorter context'}."
    )


def compiled_order(one: Plan, verified: Verified) -> tuple[int, float]:
    """Verified plans by the compiler's times, then the others, then those that it refused."""
    if one not in verified:
        return 1, 0.0
    if refused(one, verified):
        return 2, 0.0
    return 0, one.rank_seconds({program.task: program.seconds for program in verified[one]})


def plan_name(one: Plan) -> str:
    """Slices and mesh."""
    return f"{one.topology} {one.layout}"
