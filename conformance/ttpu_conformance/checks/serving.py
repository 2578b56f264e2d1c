"""The serving engine: what it answers in any company is what the model generates alone."""

from __future__ import annotations

from ttpu_conformance.case import Case
from ttpu_conformance.check import check
from ttpu_conformance.checks.generation import generated
from ttpu_conformance.errors import fail

PREFILL = 6  # tokens of one step: longer prompts come in parts


@check("numerics", scope="type", quick="base")
def check_served_tokens(case: Case) -> None:
    """Requests served together, their prompts in parts, preempted for want of pages, and again from cached prefixes,
    get the greedy tokens of generation without the engine."""
    prompts, alone = generated(case)
    for turn, served in enumerate(case.model.served(prompts, len(alone[0]), prefill=PREFILL)):
        for prompt, ours, expected in zip(prompts, served, alone, strict=True):
            if ours != expected:
                at = next(i for i, (one, other) in enumerate(zip(ours, expected, strict=True)) if one != other)
                which = "first" if turn == 0 else "second"
                fail(
                    f"served with others for the {which} time, the greedy token number {at + 1} after a prompt of "
                    f"{len(prompt)} tokens is {ours[at]}, but generated alone it is {expected[at]}: a mixer must leave "
                    "its state as it is for padding, and depend on positions and not on places."
                )
