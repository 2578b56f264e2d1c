"""Checkpoints in both directions: read as transformers wrote them, written as transformers reads them, bit for bit."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from ttpu_conformance.case import Case
from ttpu_conformance.check import check, fail


@check("numerics", quick="all")
def check_checkpoint_round_trip(case: Case) -> None:
    """What `save_pretrained` writes has transformers' own tensor names and bits, and transformers loads it whole."""
    import torch

    theirs = saved_tensors(case.reference.path)
    mapping = case.architecture.mapping
    ignored = {name for name in theirs if any(re.fullmatch(pattern, name) for pattern in mapping.ignored)}
    with tempfile.TemporaryDirectory(prefix="ttpu-conformance-") as folder:
        case.model.model.save_pretrained(folder)
        ours = saved_tensors(Path(folder))
        renamed = mapping.resolve({name: tuple(tensor.shape) for name, tensor in theirs.items()})
        expected = {canonical: theirs[actual] for canonical, actual in renamed.items()}
        for name in sorted(expected.keys() ^ ours.keys()):
            who = "is missing from" if name in expected else "is only in"
            fail(f"the tensor {name!r} {who} the checkpoint that we save: correct `ttpu_flax_mapping`.")
        for name, tensor in expected.items():
            if tensor.dtype != ours[name].dtype or not torch.equal(tensor, ours[name]):
                fail(f"the tensor {name!r} is not what it was after loading and saving: correct `ttpu_flax_mapping`.")
        if renamed.keys() != set(renamed.values()) or ignored:
            return  # part of a larger model, which transformers could only load whole
        again, about = type(case.reference.model).from_pretrained(folder, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if about.get(kind):
            listed = ", ".join(sorted(map(str, about[kind]))[:4])
            fail(f"transformers loads what we save with {kind.replace('_', ' ')} ({listed}): correct `ttpu_flax_mapping`.")
    states: tuple[Any, Any] = (case.reference.model.state_dict(), again.state_dict())
    for name, tensor in states[0].items():
        if not torch.equal(tensor, states[1][name].to(tensor.dtype)):
            fail(f"transformers loads another {name!r} from what we save: correct `ttpu_flax_mapping`.")


def saved_tensors(folder: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint's safetensors files."""
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors
