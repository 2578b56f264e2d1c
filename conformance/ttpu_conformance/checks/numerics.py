"""Checks of numbers against transformers: logits in float32 and bfloat16, and their independence of padding and of the
other rows of the batch."""

from __future__ import annotations

import numpy as np

from ttpu_conformance.case import Case
from ttpu_conformance.check import check
from ttpu_conformance.diagnosis import diagnose
from ttpu_conformance.errors import CheckFailure, fail
from ttpu_conformance.measure import (
    BFLOAT16_FLOOR,
    BFLOAT16_SHARE,
    FLOAT32,
    Measured,
    hold,
    relative_error,
    typical_error,
)
from ttpu_conformance.model_under_test import RecordsPrograms, RunsReferenceCode, able
from ttpu_conformance.rope_length import CONTEXT_KEYS, depends_on_length, rope_of, short_context
from ttpu_conformance.stumbles import explained, with_hook
from ttpu_conformance.tiny import SEQUENCE
from ttpu_core.errors import TTPUError
from ttpu_core.spec import AttentionSpec


@check("numerics", quick="all")
def check_float32_logits(case: Case) -> Measured:
    """Logits in float32 equal those of transformers.

    Raises:
        CheckFailure: they differ, or the model fails; the message ends with a diagnosis where there is one.
        Exception: the model fails and there is no diagnosis.
    """
    try:
        ours = case.logits
    except Exception as error:
        diagnosis = diagnose(case) if "architecture" in vars(case) else ""  # without one a hook failed
        if not diagnosis:
            raise
        message = with_hook(error, case) if isinstance(error, TTPUError) else explained(error, case)
        raise CheckFailure(f"{message} {diagnosis}") from error
    try:
        return hold(relative_error(ours, case.reference.logits), FLOAT32, "the logits differ from transformers'")
    except CheckFailure as failure:
        message = f"{failure} {diagnose(case)}".rstrip()
        raise CheckFailure(message, error=failure.error, tolerance=failure.tolerance) from None


@check("numerics", quick="all")
def check_windows_are_passed(case: Case) -> None:
    """The test sequence is longer than every window, chunk, and context from which on a rope depends on length."""
    for index, layer in enumerate(case.architecture.spec.layers):
        rope = rope_of(layer)
        if rope is not None and rope.depends_on_length and short_context(rope) >= SEQUENCE:
            fail(
                f"layer {index} has a rope of type {rope.type!r}, which turns by other angles beyond "
                f"{short_context(rope)} tokens, and the test sequence has {SEQUENCE}, so that those would never be "
                f"tested: declare a smaller {CONTEXT_KEYS[rope.type]} in conformance.toml, or correct `ttpu_rope`."
            )
        if not isinstance(layer.mixer, AttentionSpec):
            continue
        reach = max(layer.mixer.window or 0, layer.mixer.chunk or 0)
        if reach >= SEQUENCE:
            fail(
                f"layer {index} sees {reach} tokens and the test sequence has {SEQUENCE}, so that its mask would never "
                "be tested: declare a smaller window or chunk in conformance.toml, or correct `ttpu_attention`."
            )


@check("numerics", scope="heavy", quick="base")
def check_bfloat16_logits(case: Case) -> Measured:
    """Logits in bfloat16 are about as near to exact ones as those of transformers in bfloat16."""
    exact, ids = case.reference.logits, case.reference.token_ids
    theirs = typical_error(case.reference.bfloat16_logits, exact)
    ours = typical_error(case.load(dtype="bfloat16").logits(ids), exact)
    allowed = BFLOAT16_SHARE * theirs + BFLOAT16_FLOOR
    if not ours <= allowed:
        fail(
            f"in bfloat16 the logits miss the exact ones by {ours:.1e} of their scale, where transformers misses them "
            f"by {theirs:.1e} and {allowed:.1e} is allowed: compare where transformers casts in its norms and "
            "embedding (`ttpu_norm`'s scale_in_fp32, `ttpu_rope`'s fp32, `ttpu_embedding`).",
            error=ours,
            tolerance=allowed,
        )
    return Measured(ours, allowed)


@check("numerics")
def check_batch_invariance(case: Case) -> Measured:
    """A row's logits do not depend on the other rows of its batch."""
    ids = case.reference.token_ids
    others = np.random.default_rng(3).integers(0, case.architecture.spec.vocab_size, ids.shape)
    others[1] = ids[0]
    return hold(
        relative_error(case.model.logits(others)[1], case.logits[0]),
        FLOAT32,
        "a row's logits change with its place and its neighbours in the batch",
    )


@check("numerics", scope="type", quick="base")
def check_forward_is_one_program(case: Case) -> None:
    """Where operations are recorded one by one, a forward pass is one program, and none of it runs on the host."""
    model = able(case.model, RecordsPrograms, "traces a forward pass as a whole")
    ids = case.reference.token_ids
    mask = np.ones_like(ids)
    mask[0, :3] = 0  # with padding on the left, for which nothing was compiled yet
    count = model.programs_of(lambda: case.model.logits(ids, mask))
    if count.compiles > 1 or count.fallbacks:
        fail(
            f"a forward pass compiles {count.compiles} programs and leaves to the host "
            f"{', '.join(sorted(count.fallbacks)) or 'no operation'}: `ttpu inspect` says where; replace what reads "
            "values in `ttpu_torch_patches`."
        )


@check("numerics")
def check_padding_invariance(case: Case) -> Measured:
    """A row's logits do not depend on padding, on its left or on its right. A model that runs the code of transformers
    has its logits with the same padding."""
    ids = case.reference.token_ids
    lengths = (SEQUENCE, SEQUENCE - 7, SEQUENCE - 16, SEQUENCE - 1)
    # A part of a longer row has the logits of a row of its own, unless the rope turns longer rows otherwise.
    alone = [case.logits[row, :length] for row, length in enumerate(lengths)]
    if depends_on_length(case.architecture.spec):
        alone = [case.model.logits(ids[row : row + 1, :length])[0] for row, length in enumerate(lengths)]
    worst = 0.0
    for left in (True, False):
        padded, mask = np.zeros_like(ids), np.zeros_like(ids)
        places = []
        for row, length in enumerate(lengths):
            place = slice(SEQUENCE - length, SEQUENCE) if left else slice(0, length)
            padded[row, place], mask[row, place] = ids[row, :length], 1
            places.append(place)
        ours = case.model.logits(padded, mask)
        if isinstance(case.model, RunsReferenceCode):
            reference = case.reference.padded_logits(padded, mask)
            alone = [reference[row, place] for row, place in enumerate(places)]
        side = "left" if left else "right"
        for row, place in enumerate(places):
            error = relative_error(ours[row, place], alone[row])
            hold(error, FLOAT32, f"with padding on the {side} a row's logits change")
            worst = max(worst, error)
    return Measured(worst, FLOAT32)
