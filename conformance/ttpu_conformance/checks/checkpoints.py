"""Checks of checkpoints in both directions: we read what transformers writes, and transformers reads what we write, bit
for bit."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from ttpu_conformance.case import Case
from ttpu_conformance.check import check
from ttpu_conformance.declaration import NEVER_WRITTEN
from ttpu_conformance.errors import fail
from ttpu_conformance.measure import FLOAT32, Measured, relative_error
from ttpu_core.checkpoint.unread import unread_tensors
from ttpu_core.errors import MappingError
from ttpu_core.mapping.layout import IGNORED_TENSORS
from ttpu_core.mapping.text_part import OTHER_PARTS


@check("numerics", quick="all")
def check_checkpoint_round_trip(case: Case) -> Measured:
    """What `save_pretrained` writes has transformers' own tensor names and bits, and transformers loads it whole."""
    with tempfile.TemporaryDirectory(prefix="ttpu-conformance-") as folder:
        case.model.save(Path(folder))
        _refuse_other_tensors(case, Path(folder))
        again, about = type(case.reference.model).from_pretrained(folder, output_loading_info=True)
    left_out = {
        name
        for name in about["missing_keys"]
        if any(re.fullmatch(pattern, name) for pattern in case.architecture.mapping.ignored)
    }
    found = {kind: set(about.get(kind, ())) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    found["missing_keys"] -= left_out
    for kind, names in found.items():
        if names:
            listed = ", ".join(sorted(map(str, names))[:4])
            fail(
                f"transformers finds {kind.replace('_', ' ')} in what we save ({listed}): correct `ttpu_flax_mapping`, "
                "whose rules must have the names that transformers writes (its prefixes are for reading alone)."
            )
    _refuse_other_values(case, again, left_out)
    return Measured(note=f"without {len(left_out)} tensors that the plugin ignores" if left_out else "")


def _refuse_other_tensors(case: Case, folder: Path) -> None:
    """Fail where the checkpoint that we saved has other tensors than transformers' own, but for those ignored."""
    import torch

    theirs, ours = saved_tensors(case.reference.path), saved_tensors(folder)
    renamed = case.architecture.mapping.resolve({name: tuple(tensor.shape) for name, tensor in theirs.items()})
    expected = {canonical if canonical in ours else actual: theirs[actual] for canonical, actual in renamed.items()}
    # What nothing reads may be written, unchanged, by a backend that keeps transformers' own model.
    expected |= {name: tensor for name, tensor in theirs.items() if name in ours}
    for name in sorted(expected.keys() ^ ours.keys()):
        who = "is missing from" if name in expected else "is only in"
        fail(f"the tensor {name!r} {who} the checkpoint that we save: correct `ttpu_flax_mapping`.")
    for name, tensor in expected.items():
        if tensor.dtype != ours[name].dtype or not torch.equal(tensor, ours[name]):
            fail(f"the tensor {name!r} is not what it was after loading and saving: correct `ttpu_flax_mapping`.")


def _refuse_other_values(case: Case, again: Any, left_out: set[str]) -> None:
    """Fail where the model that transformers loaded from what we saved is not the one that it was."""
    import torch

    was, now = case.reference.model.state_dict(), again.state_dict()
    for name, tensor in was.items():
        if name not in left_out and not torch.equal(tensor, now[name].to(tensor.dtype)):
            fail(f"transformers loads another {name!r} from what we save: correct `ttpu_flax_mapping`.")


@check("numerics", quick="all")
def check_ignored_tensors_do_not_matter(case: Case) -> None:
    """Tensors of a checkpoint that the plugin leaves unread leave transformers' logits as they are. Buffers that are
    declared as following from the config are not changed."""
    tensors = saved_tensors(case.reference.path)
    mapping = case.architecture.mapping
    read = set(mapping.resolve({name: tuple(tensor.shape) for name, tensor in tensors.items()}).values())
    unread = sorted(
        name
        for name in tensors.keys() - read
        if tensors[name].is_floating_point() and not case.declaration.is_derived(name)
    )
    if not unread:
        return
    if not _logits_move(case, tensors, unread):
        return
    culprits = [name for name in unread[:MOST_TENSORS] if _logits_move(case, tensors, [name])]
    named = ", ".join(culprits[:4]) or f"some of {', '.join(unread[:4])}"
    fail(
        f"nothing reads {named}, but transformers' logits depend on it: map it in `ttpu_flax_mapping`, instead of "
        "counting it among what is ignored or tied, and describe what uses it."
    )


STRAY = "a_tensor_that_no_plugin_can_know"
FAR = 7
"""A layer that lies so many layers beyond the last one belongs to no head that predicts further tokens."""


@check("numerics", scope="type", quick="base")
def check_unwritten_tensors_are_ignored(case: Case) -> None:
    """Tensors of published checkpoints that transformers never writes are ignored with a warning where the plugin
    declares them, and any other tensor is refused.

    Raises:
        CheckFailure: a declared tensor is read or refused, an unknown one is accepted, or a pattern of ignored tensors
            matches nothing that is declared.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in case.checkpoint.tensors.items()}
    mapping, declared = case.architecture.mapping, case.declaration.never_written
    held = shapes | dict.fromkeys((*declared, *OF_OLD_FILES), (2, 2))
    try:
        mapping.suited_to(held).resolve(held)
    except MappingError as error:
        fail(f"a checkpoint with tensors that are declared as {NEVER_WRITTEN} is refused ({error}): ignore them.")
    warned = unread_tensors(mapping, held)
    silent = [name for name in declared if name not in warned]
    if silent:
        fail(
            f"{silent[0]!r} is declared as {NEVER_WRITTEN}, but it is read, or not ignored by a pattern: add one to "
            "`ignored` in `ttpu_flax_mapping`, so that loading warns of it, or correct conformance.toml."
        )
    for stray in _strays(case, shapes):
        try:
            mapping.suited_to(shapes | {stray: (2, 2)}).resolve(shapes | {stray: (2, 2)})
        except MappingError:
            continue
        fail(
            f"a checkpoint that holds {stray!r}, which nothing reads, is accepted in silence: narrow the patterns of "
            "`ignored` in `ttpu_flax_mapping` to the tensors that are meant."
        )
    for pattern in mapping.ignored:
        if pattern in (*IGNORED_TENSORS, OTHER_PARTS) or any(re.fullmatch(pattern, name) for name in held):
            continue
        fail(
            f"`ttpu_flax_mapping` ignores {pattern!r}, which matches no tensor of this model and none that is "
            f"declared: name one that published checkpoints hold under {NEVER_WRITTEN} in conformance.toml, or remove "
            "the pattern."
        )


OF_OLD_FILES = ("model.layers.0.self_attn.rotary_emb.inv_freq",)
"""What transformers 4 wrote in checkpoints of every type."""


def _strays(case: Case, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Names of tensors that a checkpoint of this model cannot have."""
    strays = [f"{STRAY}.weight"]
    within = next((name for name in shapes if re.search(r"\.0\..+\.", name)), None)
    if within is not None:
        strays.append(f"{within.rpartition('.')[0]}.{STRAY}")
        strays.append(re.sub(r"\.0\.", f".{case.architecture.spec.num_layers + FAR}.", within, count=1))
    return strays


MOST_TENSORS = 40
"""How many unread tensors are tried one by one, to name those that matter."""


def _logits_move(case: Case, tensors: dict[str, Any], names: list[str]) -> bool:
    """Whether transformers computes other logits when these tensors hold other numbers."""
    from safetensors.torch import save_file

    changed = tensors | {name: tensors[name] * -0.5 + 0.25 for name in names}
    with tempfile.TemporaryDirectory(prefix="ttpu-conformance-") as folder:
        for file in case.reference.path.glob("*.json"):
            if not file.name.endswith("index.json"):
                (Path(folder) / file.name).write_bytes(file.read_bytes())
        save_file(changed, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        loaded = case.reference.loaded(Path(folder))
    moved = case.reference.logits_of(loaded, case.reference.token_ids)
    return relative_error(moved, case.reference.logits) > FLOAT32


def saved_tensors(folder: Path) -> dict[str, Any]:
    """Return every tensor of a checkpoint's safetensors files."""
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors
