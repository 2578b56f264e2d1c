"""Diagnoses why logits differ. It names the first place where the models differ, the changes to the description that
make them agree, and the hooks to correct."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ttpu_conformance.case import Case
from ttpu_conformance.every_field import at_the_ends, in_layer, without_mlp
from ttpu_conformance.hypotheses import Hypothesis, hypotheses, numbers_of
from ttpu_conformance.measure import FLOAT32, relative_error
from ttpu_conformance.misfits import hooks_of, misfits_of
from ttpu_conformance.model_under_test import ModelUnderTest, ShowsResidualStream
from ttpu_conformance.overlay import described_as
from ttpu_core.architecture import Architecture
from ttpu_core.errors import TTPUError
from ttpu_core.spec import AttentionSpec, MoESpec

logger = logging.getLogger("ttpu.conformance")

MOST_MISTAKES = 4
"""How many mistakes are looked for, one after the other."""

STREAM = 5 * FLOAT32
"""Of the residual stream's scale: within a model the stream is not normalised, as logits are before the head."""

SHARED = 0.02
"""The first token's error over the largest one, above which a mistake is one that the first token shares."""


MOST_LOADED = 120
"""How many changes are tried on loaded models for one mistake."""

MOST_SECONDS = 60.0
"""CPU seconds after which a diagnosis tries no further change: a mixer of one's own may take seconds to compile."""

MOST_FITTING = 12
"""Of changes after which a checkpoint fits the description, how many are tried for equal logits."""

MLP_MODULES = r"mlp|feed_forward|ffn|moe|experts|fc1|fc2"
"""The names of transformers' modules that belong to a layer's MLP, among the layer's own children."""

EVERY_HOOK = (
    "ttpu_embedding",
    "ttpu_rope",
    "ttpu_norm",
    "ttpu_attention",
    "ttpu_mixer",
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
    fits: bool = True  # whether the checkpoint has the tensors that the description asks for


def diagnose(case: Case) -> str:
    """Return the diagnosis as sentences, or "" for none; never raises."""
    try:
        return _diagnose(case)
    except Exception:  # a diagnosis is help, and must not hide the failure that it explains
        logger.warning("no diagnosis of %s, because looking for one failed", case.name, exc_info=True)
        return ""


def _diagnose(case: Case) -> str:
    architecture = case.architecture
    until = time.process_time() + MOST_SECONDS
    first = place = first_difference(case, architecture)
    found: list[Hypothesis] = []
    while place is not None and len(found) < MOST_MISTAKES:
        hypothesis = _explanation(case, architecture, place, until)
        if hypothesis is None:
            break
        found.append(hypothesis)
        architecture = _changed(case, architecture, hypothesis)
        place = first_difference(case, architecture)
    if first is None:
        return ""
    if not found and not first.fits and set(first.hooks) == {"ttpu_block", "ttpu_flax_mapping"}:
        first = replace(first, hooks=("ttpu_flax_mapping",))  # no placement of norms has the checkpoint's names
    if not found:
        what = "correct" if len(first.hooks) == 1 else "look at"
        return f"{_capital(first.sentence)}: {what} {_listed(first.hooks)}."
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
    ids = case.reference.token_ids
    try:
        model = case.load(architecture=architecture)
        error = relative_error(model.logits(ids), case.reference.logits)
    except Exception as raised:
        logger.info("%s cannot be run as it is described: %s", case.name, raised)
        return _unloaded(case, architecture, raised)
    if error <= FLOAT32:
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
            return _place(case, architecture, layers, token)
    head = ("ttpu_head", "ttpu_flax_mapping")
    if _several(streams[-1]):
        return Place("the models agree up to the final norm", ("ttpu_final_norm", "ttpu_embedding", *head), None)
    factor = _constant_factor(model.logits(ids), case.reference.logits)
    if factor is not None:
        what = f"the models agree up to the head, whose logits in transformers are {factor:.6g} times these"
        return Place(f"{what}, so its multiplier is wrong", ("ttpu_head",), None)
    return Place("the models agree up to the head", head, None)


def _constant_factor(ours: np.ndarray, wanted: np.ndarray) -> float | None:
    """The number by which all of our logits must be multiplied; None where there is no such number."""
    if ours.shape != wanted.shape or not np.any(ours):
        return None
    factor = float((ours * wanted).sum() / (ours * ours).sum())
    return factor if relative_error(factor * ours, wanted) <= FLOAT32 else None


def _unloaded(case: Case, architecture: Architecture, raised: Exception) -> Place | None:
    """The place of a description that cannot be loaded or run."""
    misfits = misfits_of(architecture, _shapes(case))
    if misfits:
        sentence = "the checkpoint and the description do not fit each other"
        return Place(sentence, hooks_of(misfits, architecture), None, fits=False)
    if not isinstance(raised, TTPUError) or raised.hook is None:
        return None
    return Place("the description cannot be run", (raised.hook,), None)


def _shapes(case: Case) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in case.checkpoint.tensors.items()}


def _place(case: Case, architecture: Architecture, layers: int, token: int) -> Place:
    if layers == 0:
        return Place("the models differ from the embedding on", ("ttpu_embedding", "ttpu_flax_mapping"), 0)
    layer = architecture.spec.layers[layers - 1]
    where = f"the models first differ in layer {layers - 1}"
    attends, routes = isinstance(layer.mixer, AttentionSpec), isinstance(layer.mlp, MoESpec)
    mixer = ("ttpu_attention",) if attends else ("ttpu_mixer",)
    block = ("ttpu_block",) if layer.block.custom else ()
    in_mlp = _agrees_before_mlp(case, architecture, layers - 1)
    hooks: tuple[str, ...]
    if in_mlp:
        hooks = (*block, "ttpu_mlp", "ttpu_norm", "ttpu_block")
        where += ", in its MLP or the norm of it: without the MLP they agree"
    elif token > 0:
        hooks = (*block, *(("ttpu_rope",) if attends else ()), *mixer)
        where += f", from token {token} on, so in "
        what = "what attention sees or how it is rotated" if attends else "what its mixer carries from token to token"
        if routes and in_mlp is None:
            hooks, what = (*hooks, "ttpu_mlp"), f"{what}, or in which experts are chosen"
        where += what
    else:
        # The first token attends to itself alone, whatever the rotation, scale and mask.
        hooks = (*block, "ttpu_norm", *(("ttpu_mlp",) if in_mlp is None else ()), "ttpu_block", *mixer)
        parts = ("value or output projection",) if attends else ("mixer",)
        parts = (*(("MLP",) if in_mlp is None else ()), *parts)
        where += f", from the first token on, so in a norm, the {', the '.join(parts)}"
        where += "" if in_mlp is None else "; without the MLP they differ too"
    hooks = (*hooks, "ttpu_flax_mapping")
    if architecture.spec.embedding.custom is not None:  # which may give each layer an input
        hooks = (*hooks, "ttpu_embedding")
    if layers == architecture.spec.num_layers:
        where, hooks = f"{where} or in the final norm", ("ttpu_norm", "ttpu_final_norm", *hooks)
    return Place(where, tuple(dict.fromkeys(hooks)), layers)


def _agrees_before_mlp(case: Case, architecture: Architecture, layer: int) -> bool | None:
    """Whether the models agree after a layer whose MLP adds nothing; None where that cannot be seen."""
    if architecture.spec.layers[layer].mlp is None or architecture.spec.layers[layer].block.custom:
        return None
    try:
        ours = case.load(architecture=without_mlp(architecture, layer))
        streams = _streams_without_mlp(case, layer)
        if streams is None or not isinstance(ours, ShowsResidualStream):
            return None
        wanted = streams[layer + 1]
        found = ours.residual_stream(case.reference.token_ids, layer + 1, several=_several(wanted))
        return bool(_errors(found, wanted).max() <= STREAM)
    except Exception as error:
        logger.info("layer %d of %s cannot be seen without its MLP: %s", layer, case.name, error)
        return None


def _streams_without_mlp(case: Case, layer: int) -> list[np.ndarray] | None:
    """The reference's residual stream where one layer's MLP gives zeros; None where its modules are not known."""
    import torch

    layers = next(
        (
            module
            for _, module in case.reference.model.named_modules()
            if isinstance(module, torch.nn.ModuleList) and len(module) == case.architecture.spec.num_layers
        ),
        None,
    )
    found = [] if layers is None else list(layers[layer].named_children())
    parts = [child for name, child in found if re.search(MLP_MODULES, name) and "norm" not in name]
    if not parts:
        return None

    def nothing(module: Any, given: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (torch.zeros_like(output[0]), *output[1:])
        return torch.zeros_like(output)

    hooks = [part.register_forward_hook(nothing) for part in parts]
    try:
        return _reference_streams(case)
    finally:
        for hook in hooks:
            hook.remove()


def _candidates(case: Case, architecture: Architecture, place: Place) -> Iterator[Hypothesis]:
    """Changes worth trying at a place: the common ones, then those of every field; of each those of the first hook that
    the place points at come first."""
    spec, numbers = architecture.spec, numbers_of(architecture)
    if place.layers is not None:
        layers = [place.layers - 1] if place.layers else []
    else:  # every layer that is described like none before it
        layers = [i for i, one in enumerate(spec.layers) if one not in spec.layers[:i]]
    every = [one for layer in layers for one in in_layer(architecture, layer, numbers)]
    every += at_the_ends(spec, numbers)
    for group in (hypotheses(architecture), every):
        known = [one for one in group if one.hook in place.hooks and (one.spec is None or one.spec != spec)]
        yield from sorted(known, key=lambda one: place.hooks.index(one.hook))


def _explanation(case: Case, architecture: Architecture, place: Place, until: float) -> Hypothesis | None:
    """The first change that makes the models agree at the place, those of the hooks that it points at first; None where
    none does that can be tried until so many CPU seconds of this process."""
    if not place.fits:
        return _explanation_of_misfits(case, architecture, place, until)
    streams = (_reference_streams(case) if place.layers is not None else None) or []
    tried = 0
    for one in _candidates(case, architecture, place):
        try:
            changed = _changed(case, architecture, one)
            if misfits_of(changed, _shapes(case)):
                continue
            if tried == MOST_LOADED or time.process_time() > until:
                return None
            tried += 1
            if _agrees(case, case.load(architecture=changed), place, streams):
                return one
        except Exception as error:  # a change that cannot be described, loaded or run explains nothing
            logger.info("%s in %s explains nothing: %s: %s", one.change, one.hook, type(error).__name__, error)
            continue
    return None


def _explanation_of_misfits(
    case: Case, architecture: Architecture, place: Place, until: float
) -> Hypothesis | None:
    """The first change after which checkpoint and description fit and the logits agree, else the first one after which
    they fit."""
    every = replace(place, hooks=tuple(dict.fromkeys([*place.hooks, *EVERY_HOOK, "ttpu_block"])))
    fitting: list[Hypothesis] = []
    for one in _candidates(case, architecture, every):
        try:
            if not misfits_of(_changed(case, architecture, one), _shapes(case)):
                fitting.append(one)
        except Exception as error:
            logger.info("%s in %s does not fit: %s: %s", one.change, one.hook, type(error).__name__, error)
        if len(fitting) == MOST_FITTING:
            break
    for one in fitting:
        if time.process_time() > until:
            break
        try:
            if first_difference(case, _changed(case, architecture, one)) is None:
                return one
        except Exception as error:
            logger.info("%s in %s cannot be run: %s", one.change, one.hook, error)
    pointed = [one for one in fitting if one.hook in place.hooks]
    return pointed[0] if pointed else None


def _agrees(case: Case, model: ModelUnderTest, place: Place, streams: list[np.ndarray]) -> bool:
    ids = case.reference.token_ids
    if place.layers is not None and isinstance(model, ShowsResidualStream):
        wanted = streams[place.layers]
        errors = _errors(model.residual_stream(ids, place.layers, several=_several(wanted)), wanted)
        return bool(errors.max() <= STREAM)
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
