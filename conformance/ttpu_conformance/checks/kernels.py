"""Checks of kernels on a real TPU against the reference implementation."""

from __future__ import annotations

from ttpu_conformance.case import Case
from ttpu_conformance.check import check
from ttpu_conformance.errors import NotApplicable
from ttpu_conformance.measure import BFLOAT16_FLOOR, BFLOAT16_SHARE, Measured, hold, typical_error
from ttpu_conformance.model_under_test import HasAttentionImplementations, able
from ttpu_core.errors import UnsupportedError


@check("device", scope="heavy")
def check_attention_kernels(case: Case) -> Measured:
    """In bfloat16 on the device every attention implementation is as near to exact logits as the reference is.

    Raises:
        CheckFailure: the logits of an implementation differ by more.
        NotApplicable: no other implementation serves this model.
    """
    backend = able(case.backend, HasAttentionImplementations, "has one implementation of attention")
    reference, *others = backend.attention_implementations()
    exact, ids = case.reference.logits, case.reference.token_ids

    def error_of(name: str) -> float:
        return typical_error(case.load(dtype="bfloat16", attn_implementation=name).logits(ids), exact)

    allowed = BFLOAT16_SHARE * error_of(reference) + BFLOAT16_FLOOR
    worst = 0.0
    served: list[str] = []
    refused: list[str] = []
    for name in others:
        try:
            error = error_of(name)
        except UnsupportedError as reason:
            refused.append(f"{name}: {reason}")
            continue
        hold(error, allowed, f"with {name} in bfloat16 the logits differ from exact ones")
        worst = max(worst, error)
        served.append(name)
    if not served:
        raise NotApplicable(
            f"no other attention implementation serves this model ({'; '.join(refused) or 'none is there'})"
        )
    return Measured(worst, allowed, note=", ".join(served))
