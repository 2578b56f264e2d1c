"""Checks of checkpoints in both directions: we read what transformers writes, and transformers reads what we write, bit
for bit."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from ttpu_conformance.case import Case
from ttpu_conformance.check import check
from ttpu_conformance.errors import fail
from ttpu_conformance.measure import FLOAT32, Measured, relative_error


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
    """Tensors of a checkpoint that the plugin leaves unread leave transformers' logits as they are."""
    tensors = saved_tensors(case.reference.path)
    mapping = case.architecture.mapping
    read = set(mapping.resolve({name: tuple(tensor.shape) for name, tensor in tensors.items()}).values())
    unread = sorted(name for name in tensors.keys() - read if tensors[name].is_floating_point())
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
        loaded = type(case.reference.model).from_pretrained(folder, attn_implementation="eager").eval()
    moved = case.reference.logits_of(loaded, case.reference.token_ids)
    return relative_error(moved, case.reference.logits) > FLOAT32


def saved_tensors(folder: Path) -> dict[str, Any]:
    """Return every tensor of a checkpoint's safetensors files."""
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors
