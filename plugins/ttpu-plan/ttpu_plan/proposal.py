"""The batch that `ttpu plan --task training` proposes for some slices: by prediction, or by what the compiler says of
the best predictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ttpu_core.cli.console import counted, in_milliseconds, stderr_console
from ttpu_core.sharding.hardware import GIB, parse_topology
from ttpu_core.sharding.training_state import REMATS, Recomputation
from ttpu_plan.batches import Batch, best_batches
from ttpu_plan.plan import Plan
from ttpu_plan.planner import Request

if TYPE_CHECKING:
    from ttpu_core.sharding.verification import Verification
    from ttpu_core.spec import ArchitectureSpec

Verify = Callable[[Plan], "tuple[Verification, ...]"]


@dataclass(frozen=True, slots=True)
class Proposal:
    """A batch, and what the compiler says of its update; None where it was not asked."""

    batch: Batch
    compiled: Verification | None = None

    @property
    def seconds(self) -> float:
        """Seconds of an update: the compiler's if it was compiled, else the predicted ones."""
        return self.batch.plan.seconds if self.compiled is None else self.compiled.seconds

    @property
    def fits(self) -> bool:
        """Whether the compiler accepts it, as far as it was asked."""
        return self.compiled is None or self.compiled.peak_bytes is not None

    @property
    def tokens_per_second(self) -> float:
        """Tokens of an update over `seconds`; 0 if the compiler refuses it."""
        plan = self.batch.plan
        return plan.tokens_per_second * plan.seconds / self.seconds if self.fits else 0.0

    def mfu(self, spec: ArchitectureSpec) -> float:
        """As `Batch.mfu`, by `seconds`."""
        return self.batch.mfu(spec) * self.batch.plan.seconds / self.seconds

    def as_json(self, spec: ArchitectureSpec) -> dict[str, Any]:
        """The batch as `ttpu plan --json` shows it."""
        batch, compiled = self.batch, self.compiled
        shown = {
            "rows": batch.rows,
            "rows_each": batch.rows_each,
            "remat": batch.remat,
            "mesh": dict(batch.plan.mesh),
            "memory_bytes": batch.plan.memory.total,
            "seconds": batch.plan.seconds,
            "mfu": batch.mfu(spec),
        }
        if compiled is None:
            return shown
        if not self.fits:
            return {**shown, "compiled": {"refused": compiled.refused}}
        figures = {"peak_bytes": compiled.peak_bytes, "seconds": compiled.seconds, "mfu": self.mfu(spec)}
        return {**shown, "compiled": figures}

    def words(self, spec: ArchitectureSpec) -> str:
        """The batch in a sentence."""
        plan, batch, compiled = self.batch.plan, self.batch, self.compiled
        said = (
            f"Best batch for {plan.topology}, {plan.layout}: {counted(batch.rows, 'row')} (--batch {batch.rows} "
            f"--remat {batch.remat}), {batch.rows_each} on each device that rows are divided over; "
            f"{plan.memory.total / GIB:.1f} of {plan.hbm_bytes / GIB:.1f} GiB, {in_milliseconds(plan.seconds)} a step, "
            f"MFU {batch.mfu(spec):.0%} predicted."
        )
        if compiled is None or compiled.peak_bytes is None:
            return said
        peak, took = compiled.peak_bytes / GIB, in_milliseconds(compiled.seconds)
        return f"{said} Compiled: {peak:.1f} GiB, {took}, MFU {self.mfu(spec):.0%}."


def proposals(
    spec: ArchitectureSpec, topology: str, request: Request, remat: str | None, candidates: int, verify: Verify | None
) -> list[Proposal]:
    """Batches for some slices, the one that trains fastest first, then those that the compiler refuses. Empty where
    none is predicted to fit.

    Args:
        spec: the model.
        topology: the slices, such as v5e:4x4.
        request: to train; its batch is not read.
        remat: what the backward pass computes again; None or "auto" is what is best.
        candidates: how many of the best predictions are compiled.
        verify: returns what the compiler says of a plan; None compiles nothing.

    Raises:
        UnsupportedError: an update cannot be compiled at all, as `verify` says.
    """
    remats = REMATS if remat in (None, "auto") else (cast("Recomputation", remat),)
    with stderr_console().status(f"looking for the best batch for {topology}"):
        found = best_batches(spec, parse_topology(topology), request, remats)
    if verify is None:
        return [Proposal(batch) for batch in found]
    compiled = [Proposal(batch, verify(batch.plan)[0]) for batch in found[:candidates]]
    return sorted(compiled, key=lambda one: one.tokens_per_second, reverse=True)


def in_words(found: list[Proposal], spec: ArchitectureSpec) -> str:
    """What `ttpu plan` prints of the batches for some slices: the first, or that the compiler refuses all of them."""
    if found[0].fits:
        return found[0].words(spec)
    batches = ", ".join(f"{one.batch.rows} rows with {one.batch.remat}" for one in found)
    return f"No batch is proposed: the compiler refuses the best predictions ({batches}). Take more of --candidates."
