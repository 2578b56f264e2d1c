"""Checks of where numbers are rounded to bfloat16. Logits of a tiny model cannot tell one order of casts from another,
so the norm and the embedding are compared alone, in a model whose layers add nothing."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ttpu_conformance.case import Case
from ttpu_conformance.check import check
from ttpu_conformance.checks.checkpoints import saved_tensors
from ttpu_conformance.config_reading import hook_of_family
from ttpu_conformance.errors import NotApplicable, fail
from ttpu_conformance.measure import Measured
from ttpu_conformance.model_under_test import ShowsKeys, ShowsResidualStream, able
from ttpu_core.architecture import Architecture
from ttpu_core.checkpoint import open_checkpoint
from ttpu_core.spec import AttentionSpec

ROUNDED_OTHERWISE = 0.05
"""The share of bfloat16 numbers that may differ. Sums in another order change the last bit of 1 in 1,000; a cast before
the multiplication by a norm's weight instead of after it changes 1 in 4."""

SEQUENCES = 64
"""Sequences of one token, so that a share of their keys' numbers is one of many."""

IN_A_LAYER = r"\.\d+\."


@check("numerics", scope="type", quick="base")
def check_bfloat16_casts(case: Case) -> Measured:
    """In bfloat16 the embedding and the final norm round where transformers' round.

    Raises:
        CheckFailure: too many numbers differ in their last bits; the message names the cast.
        NotApplicable: the backend or transformers does not show the residual stream.
    """
    spec = case.architecture.spec
    able(case.model, ShowsResidualStream, "shows its residual stream")
    if spec.embedding.custom is not None or any(layer.block.custom for layer in spec.layers):
        raise NotApplicable("its embedding or blocks are its own, so that its layers cannot be made to add nothing")
    with tempfile.TemporaryDirectory(prefix="ttpu-conformance-") as folder:
        without_layers(case, Path(folder))
        theirs = _their_streams(case, Path(folder))
        embedded = _differing(_our_stream(case, Path(folder), case.architecture, 0), theirs[0])
        if embedded > ROUNDED_OTHERWISE:
            fail(
                f"in bfloat16 {embedded:.0%} of the embedding's numbers differ from transformers' in their last bits: "
                "compare where transformers casts the scale of its embedding, and correct `ttpu_embedding`.",
                error=embedded,
                tolerance=ROUNDED_OTHERWISE,
            )
        normed = _differing(_our_stream(case, Path(folder), case.architecture, spec.num_layers), theirs[-1])
        if normed <= ROUNDED_OTHERWISE:
            return Measured(max(embedded, normed), ROUNDED_OTHERWISE)
        advice = ""
        for text, other in _other_casts(case.architecture):
            if _differing(_our_stream(case, Path(folder), other, spec.num_layers), theirs[-1]) <= ROUNDED_OTHERWISE:
                advice = f"with NormSpec({text}) they agree: "
                break
    return fail(
        f"in bfloat16 {normed:.0%} of the final norm's numbers differ from transformers' in their last bits, so that "
        "one of both casts at another place, such as before it multiplies by the weight instead of after it; "
        f"{advice}correct `ttpu_norm`.",
        error=normed,
        tolerance=ROUNDED_OTHERWISE,
    )


@check("numerics", scope="type", quick="base")
def check_bfloat16_keys(case: Case) -> Measured:
    """In bfloat16 the norms of keys and the rope round where transformers' round.

    Keys of a sequence of one token are not turned, which shows the norm alone.

    Raises:
        CheckFailure: other casts give transformers' numbers; the message names them.
        NotApplicable: the first layer keeps no keys, or the backend or transformers does not show them.
    """
    able(case.model, ShowsKeys, "shows the keys that it keeps")
    mixer = case.architecture.spec.layers[0].mixer
    if not isinstance(mixer, AttentionSpec) or mixer.kv_from_layer is not None:
        raise NotApplicable("its first layer keeps no keys")
    single = np.random.default_rng(0).integers(case.architecture.spec.vocab_size, size=(SEQUENCES, 1))
    theirs = case.reference.loaded(case.reference.path, "bfloat16")
    ours = _in_bfloat16(case, case.architecture)
    wanted = _their_keys(theirs, single, mixer.maps)
    normed = _differing(ours.keys(single, 0), wanted)
    if normed > ROUNDED_OTHERWISE and mixer.k_norm is not None:
        changed = replace(mixer.k_norm, scale_in_fp32=not mixer.k_norm.scale_in_fp32)
        other = _in_bfloat16(case, _with_mixer(case.architecture, replace(mixer, k_norm=changed)))
        if _differing(other.keys(single, 0), wanted) <= ROUNDED_OTHERWISE:
            fail(
                f"in bfloat16 {normed:.0%} of the keys' numbers differ from transformers' in their last bits; with "
                f"NormSpec(scale_in_fp32={changed.scale_in_fp32}) as k_norm, and likely as q_norm, they agree: correct "
                f"`{hook_of_family(case, 'ttpu_attention')}`.",
                error=normed,
                tolerance=ROUNDED_OTHERWISE,
            )
    if normed > ROUNDED_OTHERWISE:
        return Measured(note="keys differ before they are turned, by no cast that a description names")
    turned = 0.0
    if mixer.rope is not None and mixer.rope.type != "none":
        wanted = _their_keys(theirs, case.reference.token_ids, mixer.maps)
        found = ours.keys(case.reference.token_ids, 0)[:, :, -wanted.shape[2] :]  # a window keeps the last ones
        turned = _differing(found[..., : mixer.rope.rotary_dim], wanted[..., : mixer.rope.rotary_dim])
        if (turned <= ROUNDED_OTHERWISE) != mixer.rope.fp32:
            does = "rounds" if mixer.rope.fp32 else "does not round"
            fail(
                f"transformers {does} cos, sin or their products in bfloat16 ({turned:.0%} of the turned keys' numbers "
                f"differ from those of a rope in float32); RopeSpec(fp32={not mixer.rope.fp32}) says so: correct "
                f"`{hook_of_family(case, 'ttpu_rope')}`.",
                error=turned,
                tolerance=ROUNDED_OTHERWISE,
            )
    return Measured(normed, ROUNDED_OTHERWISE)


def _in_bfloat16(case: Case, architecture: Architecture) -> ShowsKeys:
    model = case.backend.load(
        architecture, open_checkpoint(case.reference.path), dtype="bfloat16", mesh=None, attn_implementation="auto"
    )
    return able(model, ShowsKeys, "shows the keys that it keeps")


def _their_keys(model: Any, ids: np.ndarray, maps: int) -> np.ndarray:
    """Keys [batch, heads, tokens, features]; where a head has several softmax maps, those of all maps together."""
    import torch

    with torch.no_grad():
        kept = getattr(model(input_ids=torch.tensor(ids), use_cache=True), "past_key_values", None)
    layers = getattr(kept, "layers", None)
    keys = getattr(layers[0], "keys", None) if layers else None
    if keys is None or keys.ndim != len(("batch", "heads", "tokens", "features")):
        raise NotApplicable("transformers does not show the keys that this model keeps")
    found: np.ndarray = keys.float().numpy()
    if maps == 1:
        return found
    batch, heads, tokens, features = found.shape
    parts = found.reshape(batch, maps, heads // maps, tokens, features).transpose(0, 2, 3, 1, 4)
    return parts.reshape(batch, heads // maps, tokens, maps * features)


def _with_mixer(architecture: Architecture, mixer: AttentionSpec) -> Architecture:
    """The architecture with another mixer in the first layer."""
    spec = architecture.spec
    return replace(architecture, spec=replace(spec, layers=(replace(spec.layers[0], mixer=mixer), *spec.layers[1:])))


def without_layers(case: Case, folder: Path) -> None:
    """Write the reference's checkpoint with zeros in every matrix and bias of a layer, so that layers add nothing.
    Constants would not do: compilers add them to the residual stream without rounding the sum."""
    from safetensors.torch import save_file

    tensors = saved_tensors(case.reference.path)
    for name, tensor in tensors.items():
        if re.search(IN_A_LAYER, name) and (tensor.ndim > 1 or name.endswith("bias")):
            tensors[name] = tensor * 0
    for file in case.reference.path.glob("*.json"):
        if not file.name.endswith("index.json"):
            (folder / file.name).write_bytes(file.read_bytes())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _their_streams(case: Case, folder: Path) -> list[np.ndarray]:
    import torch

    loaded = case.reference.loaded(folder, "bfloat16")
    with torch.no_grad():
        states = loaded(input_ids=torch.tensor(case.reference.token_ids), output_hidden_states=True).hidden_states
    spec = case.architecture.spec
    shape = (*case.reference.token_ids.shape, spec.hidden_size)
    if states is None or len(states) != spec.num_layers + 1 or any(tuple(state.shape) != shape for state in states):
        raise NotApplicable("transformers does not show this model's residual stream")
    found = [state.float().numpy() for state in (states[0], states[-1])]
    if not all(np.isfinite(one).all() for one in found):
        raise NotApplicable("transformers' model gives no finite numbers when its layers add nothing")
    return found


def _our_stream(case: Case, folder: Path, architecture: Architecture, layers: int) -> np.ndarray:
    model = case.backend.load(
        architecture, open_checkpoint(folder), dtype="bfloat16", mesh=None, attn_implementation="auto"
    )
    return able(model, ShowsResidualStream, "shows its residual stream").residual_stream(
        case.reference.token_ids, layers
    )


def _differing(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The share of numbers that differ."""
    return float((ours != theirs).mean())


def _other_casts(architecture: Architecture) -> Iterator[tuple[str, Architecture]]:
    """The architecture with the final norm's casts at each other place."""
    norm = architecture.spec.final_norm
    assert norm is not None
    for scale in (norm.scale_in_fp32, not norm.scale_in_fp32):
        for offset in (norm.offset_in_fp32, not norm.offset_in_fp32) if norm.offset else (norm.offset_in_fp32,):
            changed = replace(norm, scale_in_fp32=scale, offset_in_fp32=offset)
            fields = ("scale_in_fp32", "offset_in_fp32")
            names = [name for name in fields if getattr(changed, name) != getattr(norm, name)]
            if names:
                text = ", ".join(f"{name}={getattr(changed, name)}" for name in names)
                yield text, replace(architecture, spec=replace(architecture.spec, final_norm=changed))
