"""Finds which patch removes which slow operation. It takes a model's config and patches, and returns the findings in
the stock model, each with the patch that removes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from ttpu_core.architecture import Architecture
from ttpu_core.config import ModelConfig
from ttpu_core.errors import UnsupportedError
from ttpu_torch_xla.encoders import encoder_class, is_encoder, without_pooling
from ttpu_torch_xla.inspector.observe import Finding, observe
from ttpu_torch_xla.load import other_way
from ttpu_torch_xla.patches.choice import patches_for
from ttpu_torch_xla.patches.patch import applied
from ttpu_torch_xla.runtime import TorchRuntime

PROMPT, NEW = 24, 2
STOCK, GENERATION = "stock", "generation"
"""What is reported beside the patches: the model as it is, and the backend's own `generate`."""

PASSES = ("forward", "generate")
AGAIN = {"forward": "with the same shapes", "generate": "for an answer of one token more, a new shape"}
"""In what the second run of each differs from the first."""

_batches = count(2)
"""Each stage gets a batch that this process did not inspect with before: a program that was compiled for an earlier
stage is not compiled again, so that with the same shapes every stage but the first would seem to compile nothing."""


@dataclass(frozen=True)
class Observed:
    """A finding in one of the `PASSES`, how often it came up where it was first seen, and after which patch it was
    gone: its name, `GENERATION`, or None where it is still there."""

    during: str
    finding: Finding
    times: int
    removed_by: str | None


Key = tuple[str, tuple[str, str, str]]
"""What is the same finding in two stages: the pass, and the finding's own key."""

Found = Mapping[Key, tuple[Finding, int]]


def stages(architecture: Architecture) -> tuple[str, ...]:
    """Return the stages to compare: the stock model, the model with one more patch at a time, and at last `GENERATION`.
    """
    return (STOCK, *(patch.name for patch in patches_for(architecture, "eager")), GENERATION)


def build(config: Any, *, shrunk: bool) -> Any:
    """Make the model on the host, with random weights and the attention that transformers chooses for it.

    Args:
        shrunk: whether the config was made small here, so that it is no fault of transformers if it does not fit.

    Raises:
        UnsupportedError: transformers has no such model, or cannot build it here.
    """
    import transformers

    asked = f"a model of type {config.model_type!r} was to be inspected, but transformers {transformers.__version__}"
    encoder = is_encoder(ModelConfig.from_dict(config.to_dict()))
    if not encoder and type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        remedy = other_way(config.model_type)
        raise UnsupportedError(f"{asked} has no causal language model of this type: update transformers, or {remedy}.")
    torch.manual_seed(0)
    try:
        if encoder:
            kind = encoder_class(config)
            return kind._from_config(config, **without_pooling(kind)).eval()
        return transformers.AutoModelForCausalLM.from_config(config).eval()
    except ImportError as error:
        raise UnsupportedError(
            f"{asked} needs something for it that is not installed ({_words(error)}): install that."
        ) from error
    except Exception as error:  # models raise many kinds for a config that does not fit
        what = "the small config that was made of it" if shrunk else "its config"
        remedy = "inspect a small checkpoint of this type with --as-it-is" if shrunk else "correct it"
        raise UnsupportedError(f"{asked} refuses {what} ({_words(error)}): {remedy}.") from error


def inspect_model(
    model: Any, architecture: Architecture, runtime: TorchRuntime, tell: Callable[[str, int], None] = lambda *_: None
) -> tuple[Observed, ...]:
    """Run a model stock, then with one patch more at a time, and compare. What one stage hides, such as all that comes
    after an error, is found at the next. Where both ends of a stretch of stages find the same, those between are taken
    to find it too, and are not run. A text encoder has no pass that generates.

    Args:
        model: from `build`; it is moved to the device, and is left with this backend's `generate`.
        tell: called before a stage is run, with its name and how many are settled.
    """
    from ttpu_torch_xla import generation

    patches = patches_for(architecture, "eager")
    names = stages(architecture)
    last = len(names) - 1
    model.to(runtime.device())
    settled: dict[int, Found] = {}

    def settle(stage: int) -> None:
        tell(names[stage], len(settled))
        with applied(patches[:stage]):
            settled[stage] = _findings(model, runtime)

    def settle_between(low: int, high: int) -> None:
        if settled[low].keys() == settled[high].keys():
            settled.update(dict.fromkeys(range(low + 1, high), settled[high]))
        elif high - low > 1:
            middle = (low + high) // 2
            settle(middle)
            settle_between(low, middle)
            settle_between(middle, high)

    settle(0)
    if patches:
        settle(last - 1)
        settle_between(0, last - 1)
    if model.can_generate():
        generation.install(model, runtime)  # for good, so that it comes last
        settle(last)
    return _compared([(names[stage], settled[stage]) for stage in sorted(settled)])


def _compared(found: list[tuple[str, Found]]) -> tuple[Observed, ...]:
    """Findings of all stages, in their order, with the stage after which each was gone for good."""
    seen: dict[Key, tuple[Finding, int]] = {}
    removed_by: dict[Key, str] = {}
    before: Found = {}
    for name, now in found:
        removed_by.update({key: name for key in before if key not in now})
        for key, value in now.items():
            seen.setdefault(key, value)
            removed_by.pop(key, None)
        before = now
    return tuple(Observed(key[0], finding, times, removed_by.get(key)) for key, (finding, times) in seen.items())


def _findings(model: Any, runtime: TorchRuntime) -> Found:
    device, batch = runtime.device(), next(_batches)
    ids = torch.randint(1, int(model.config.get_text_config().vocab_size), (batch, PROMPT))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0  # left padding

    generates = model.can_generate()
    uncached = {"use_cache": False} if generates else {}

    def forward(_: int) -> None:
        model(input_ids=ids.to(device), attention_mask=mask.to(device), **uncached)

    def generate(step: int) -> None:
        inputs = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
        # A token more the second time: what is compiled for it is compiled for every token.
        model.generate(**inputs, max_new_tokens=NEW + step, do_sample=False, eos_token_id=[255], pad_token_id=0)

    return {
        (name, finding.key): (finding, times)
        for name, run in zip(PASSES, (forward, generate) if generates else (forward,), strict=False)
        for finding, times in observe(runtime, run, AGAIN[name]).items()
    }


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
