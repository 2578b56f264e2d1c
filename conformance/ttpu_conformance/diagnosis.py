"""Diagnoses why logits differ. It names the first place where the models differ, the changes to the description that
make them agree, and the hooks to correct."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ttpu_conformance.case import Case
from ttpu_conformance.hypotheses import Hypothesis, hypotheses
from ttpu_conformance.measure import FLOAT32, relative_error
from ttpu_conformance.model_under_test import ModelUnderTest, ShowsResidualStream
from ttpu_conformance.overlay import described_as
from ttpu_core.architecture import Architecture
from ttpu_core.errors import TTPUError

logger = logging.getLogger("ttpu.conformance")

MOST_MISTAKES = 4
"""How many mistakes are looked for, one after the other."""

STREAM = 5 * FLOAT32
"""Of the residual stream's scale: within a model the stream is not normalised, as logits are before the head."""

SHARED = 0.02
"""The first token's error over the largest one, above which a mistake is one that the first token shares."""


EVERY_HOOK = (
    "ttpu_embedding",
    "ttpu_rope",
    "ttpu_norm",
    "ttpu_attention",
    "ttpu_mlp",
    "ttpu_block",
    "ttpu_head",
    "ttpu_flax_mapping",
    "ttpu_final_norm",
)
"""Hooks whose answers change logits, those first that have few changes to try."""


@dataclass(frozen=True)
class Place:
    """The first place where two models differ: a sentence, the hooks to correct, and the number of layers before that
    place."""

    sentence: str
    hooks: tuple[str, ...]
    layers: int | None  # the residual stream after so many layers; None for the logits


def diagnose(case: Case) -> str:
    """Return the diagnosis as sentences, or "" for none; never raises."""
    try:
        return _diagnose(case)
    except Exception:  # a diagnosis is help, and must not hide the failure that it explains
        logger.warning("no diagnosis of %s, because looking for one failed", case.name, exc_info=True)
        return ""


def _diagnose(case: Case) -> str:
    architecture = case.architecture
    first = place = first_difference(case, architecture)
    found: list[Hypothesis] = []
    while place is not None and len(found) < MOST_MISTAKES:
        hypothesis = _explanation(case, architecture, place)
        if hypothesis is None:
            break
        found.append(hypothesis)
        architecture = _changed(case, architecture, hypothesis)
        place = first_difference(case, architecture)
    if first is None:
        return ""
    if not found:
        return f"{_capital(first.sentence)}: look at {_listed(first.hooks)}."
    changes = " and ".join(f"{one.change} in `{one.hook}`" for one in found)
    hooks = tuple(dict.fromkeys(one.hook for one in found))
    if place is None:
        return f"{_capital(first.sentence)}; with {changes} the logits agree: correct {_listed(hooks)}."
    return (
        f"{_capital(first.sentence)}; with {changes} the models agree further, but then {place.sentence}: correct "
        f"{_listed(hooks)} first, then look at {_listed(place.hooks)}."
    )


def first_difference(case: Case, architecture: Architecture) -> Place | None:
    """Return the first place where our model differs from the reference; None where the logits agree."""
    try:
        model = case.load(architecture=architecture)
    except TTPUError as error:
        logger.info("%s cannot be loaded as it is described: %s", case.name, error)
        hooks = ("ttpu_attention", "ttpu_mlp", "ttpu_head", "ttpu_block", "ttpu_norm", "ttpu_flax_mapping")
        return Place("the checkpoint and the description do not fit each other", hooks, None)
    ids = case.reference.token_ids
    if relative_error(model.logits(ids), case.reference.logits) <= FLOAT32:
        return None
    if not isinstance(model, ShowsResidualStream):
        return None
    streams = _reference_streams(case)
    if streams is None:
        why = "transformers does not show this model's residual stream"
        return Place(f"where they first differ cannot be seen, since {why}", EVERY_HOOK, None)
    for layers, wanted in enumerate(streams):
        errors = _errors(model.residual_stream(ids, layers, several=_several(wanted)), wanted)
        if not errors.max() <= STREAM:
            # A mistake that every token shares shows at the first one too, if not always above the tolerance.
            shared = not errors[0] <= SHARED * errors.max()
            token = 0 if shared else int(np.argmax(~(errors <= STREAM)))
            return _place(layers, architecture.spec.num_layers, token)
    head = ("ttpu_head", "ttpu_flax_mapping")
    if _several(streams[-1]):
        return Place("the models agree up to the final norm", ("ttpu_final_norm", "ttpu_embedding", *head), None)
    return Place("the models agree up to the head", head, None)


def _place(layers: int, of: int, token: int) -> Place:
    if layers == 0:
        return Place("the models differ from the embedding on", ("ttpu_embedding", "ttpu_flax_mapping"), 0)
    where = f"the models first differ in layer {layers - 1}"
    hooks: tuple[str, ...]
    if token > 0:
        hooks = ("ttpu_attention", "ttpu_rope", "ttpu_flax_mapping")
        where += f", from token {token} on, so in what attention sees or how it is rotated"
    else:
        # The first token attends to itself alone, whatever the rotation, scale and mask.
        hooks = ("ttpu_norm", "ttpu_mlp", "ttpu_block", "ttpu_attention", "ttpu_flax_mapping")
        where += ", from the first token on, so in a norm, the MLP, the value or output projection"
    if layers == of:
        where, hooks = f"{where} or in the final norm", ("ttpu_norm", "ttpu_final_norm", *hooks)
    return Place(where, tuple(dict.fromkeys(hooks)), layers)


def _explanation(case: Case, architecture: Architecture, place: Place) -> Hypothesis | None:
    """The first change that makes the models agree at the place, those of the hooks that it points at first."""
    candidates = [one for one in hypotheses(architecture) if one.hook in place.hooks]
    candidates.sort(key=lambda one: place.hooks.index(one.hook))
    streams = (_reference_streams(case) if place.layers is not None else None) or []
    for one in candidates:
        try:
            model = case.load(architecture=_changed(case, architecture, one))
            if _agrees(case, model, place, streams):
                return one
        except Exception as error:  # a change that cannot be described, loaded or run explains nothing
            logger.info("%s in %s explains nothing: %s: %s", one.change, one.hook, type(error).__name__, error)
            continue
    return None


def _agrees(case: Case, model: ModelUnderTest, place: Place, streams: list[np.ndarray]) -> bool:
    ids = case.reference.token_ids
    if place.layers is not None and isinstance(model, ShowsResidualStream):
        wanted = streams[place.layers]
        errors = _errors(model.residual_stream(ids, place.layers, several=_several(wanted)), wanted)
        return bool(errors.max() <= STREAM)
    if "do not fit" in place.sentence:
        return True  # it could be loaded
    return relative_error(model.logits(ids), case.reference.logits) <= FLOAT32


def _changed(case: Case, architecture: Architecture, hypothesis: Hypothesis) -> Architecture:
    if hypothesis.mapping is not None:
        return replace(architecture, mapping=hypothesis.mapping)
    assert hypothesis.spec is not None
    return described_as(case, hypothesis.spec)


def _reference_streams(case: Case) -> list[np.ndarray] | None:
    """The reference's residual stream after the embedding and after each layer, in the forms of `residual_stream`; None
    where transformers does not give it so."""
    import torch

    model: Any = case.reference.model
    with torch.no_grad():
        states = model(input_ids=torch.tensor(case.reference.token_ids), output_hidden_states=True).hidden_states
    spec = case.architecture.spec
    shape = (*case.reference.token_ids.shape, spec.hidden_size)
    if states is None or len(states) != spec.num_layers + 1:
        return None
    streams = []
    for state in states:
        if tuple(state.shape[-3:]) != shape or state.ndim > len(shape) + 1:
            return None
        array = state.float().numpy()
        streams.append(np.moveaxis(array, 0, 2) if array.ndim > len(shape) else array)
    return streams


def _several(stream: np.ndarray) -> bool:
    """Whether these are several residual streams beside each other, as in gemma3n."""
    return stream.ndim > 3


def _errors(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """The largest error of each token over the batch, [seq], as a share of the reference's scale."""
    if ours.shape != theirs.shape:
        raise ValueError(f"streams of {ours.shape} and {theirs.shape} cannot be compared")
    others = tuple(axis for axis in range(ours.ndim) if axis != 1)
    return np.asarray(np.abs(ours - theirs).max(axis=others) / np.abs(theirs).max())


def _listed(hooks: tuple[str, ...]) -> str:
    return ", ".join(f"`{hook}`" for hook in hooks)


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
