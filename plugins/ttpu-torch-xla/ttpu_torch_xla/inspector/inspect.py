"""Which patch removes what. In: a model's config and its patches; out: the findings of the stock model, each with the
patch after which it was gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from ttpu_core.architecture import Architecture
from ttpu_core.errors import UnsupportedError
from ttpu_torch_xla.adapter import Adapter
from ttpu_torch_xla.inspector.observe import Finding, observe
from ttpu_torch_xla.patches.choice import patches_for
from ttpu_torch_xla.patches.patch import applied

BATCH, PROMPT, NEW = 2, 24, 4
GENERATION = "generation"
"""What is reported beside the patches: the backend's own `generate`."""

PASSES = ("forward", "generate")


@dataclass(frozen=True)
class Observed:
    """A finding in one of the `PASSES`, how often it came up where it was first seen, and after which patch it was
    gone: its name, `GENERATION`, or None where it is still there."""

    during: str
    finding: Finding
    times: int
    removed_by: str | None


def inspect_model(
    config: Any, architecture: Architecture, adapter: Adapter, tell: Callable[[str], None] = lambda _: None
) -> tuple[Observed, ...]:
    """Run a model of this config stock, then with one patch more at a time, and compare. What one stage hides, such as
    all that comes after an error, is found at the next.

    Raises:
        UnsupportedError: transformers cannot build or run it here.
    """
    import transformers

    from ttpu_torch_xla import generation

    torch.manual_seed(0)
    patches = patches_for(architecture, "eager")
    try:
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    except (ValueError, ImportError) as error:
        raise UnsupportedError(
            f"a model of type {config.model_type!r} was to be inspected, but transformers {transformers.__version__} "
            f"cannot build it here ({' '.join(str(error).split())[:200]}): use backend='jax' for it."
        ) from error
    model.to(adapter.device())
    found = _findings(model, adapter)
    tell("stock")
    seen, removed_by = dict(found), {}

    def next_stage(name: str) -> None:
        nonlocal found
        before, found = found, _findings(model, adapter)
        removed_by.update({key: name for key in before if key not in found})
        for key, times in found.items():
            seen.setdefault(key, times)
            removed_by.pop(key, None)
        tell(name)

    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(applied((patch,)))
            next_stage(patch.name)
        generation.install(model)
        next_stage(GENERATION)
    return tuple(Observed(*key, times, removed_by.get(key)) for key, times in seen.items())


def _findings(model: Any, adapter: Adapter) -> Counter[tuple[str, Finding]]:
    device = adapter.device()
    ids = torch.randint(1, int(model.config.get_text_config().vocab_size), (BATCH, PROMPT))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0  # left padding

    def forward(_: int) -> None:
        model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False)

    def generate(step: int) -> None:
        inputs = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
        # A few tokens more the second time: what is compiled for them is compiled for every token.
        model.generate(**inputs, max_new_tokens=NEW + 2 * step, do_sample=False, eos_token_id=[255], pad_token_id=0)

    found: Counter[tuple[str, Finding]] = Counter()
    for name, run in zip(PASSES, (forward, generate), strict=True):
        for finding, times in observe(adapter, run).items():
            found[name, finding] += times
    return found
