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
class Removed:
    """A finding of the stock model in one of the `PASSES`, how often it came up, and what removed it: a patch's name,
    `GENERATION`, or None where it is still there."""

    during: str
    finding: Finding
    times: int
    by: str | None


@dataclass(frozen=True)
class Inspection:
    """What was found in the stock model, and what the prepared model still has that the stock one had not."""

    removed: tuple[Removed, ...]
    new: tuple[Removed, ...]

    @property
    def left(self) -> tuple[Removed, ...]:
        """Findings that nothing removes."""
        return (*(one for one in self.removed if one.by is None), *self.new)


def inspect_model(
    config: Any, architecture: Architecture, adapter: Adapter, tell: Callable[[str], None] = lambda _: None
) -> Inspection:
    """Run a model of this config stock, then with one patch more at a time, and compare.

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
    first = found = _findings(model, adapter)
    tell("stock")
    by: dict[tuple[str, Finding], str] = {}
    with ExitStack() as stack:
        for patch in patches:
            before = found
            stack.enter_context(applied((patch,)))
            found = _findings(model, adapter)
            tell(patch.name)
            by.update({key: patch.name for key in before if key not in found})
        before = found
        generation.install(model)
        found = _findings(model, adapter)
        tell(GENERATION)
        by.update({key: GENERATION for key in before if key not in found})
    removed = tuple(
        Removed(*key, times, None if key in found else by.get(key)) for key, times in first.items()
    )
    return Inspection(removed, tuple(Removed(*key, times, None) for key, times in found.items() if key not in first))


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
