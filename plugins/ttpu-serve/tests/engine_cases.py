"""Small engines for tests of what they can do beside answering. In: checkpoints and requests; out: tokens, and whether
a model's own logits say the same."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from ttpu import LLM, AutoModelForTPU, SamplingParams
from ttpu_serve.execution.engine_core import EngineCore

NEW = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "sequence_buckets": (4,),
    "token_buckets": (32,),
    "page_size": 8,
    "num_pages": 40,
    "sampling_level": "greedy",
    "prompt_logprobs": False,
    "strict_compile": True,
    "progress": None,
}
_RANDOM = np.random.default_rng(7)
PROMPTS: list[list[int]] = [_RANDOM.integers(0, 255, length).tolist() for length in (5, 40, 17, 3)]
_numbers = itertools.count()


def small_engine(model: Any, **options: Any) -> EngineCore:
    """An engine that compiles little: greedy requests of up to 64 tokens, four at once, 32 tokens per step."""
    return LLM(model, **OPTIONS | options).engine


def add(core: EngineCore, prompt: Sequence[int], **options: Any) -> str:
    """A greedy request; its id."""
    name = f"request {next(_numbers)}"
    core.add(name, list(prompt), options.pop("params", GREEDY), **options)
    return name


def finish(core: EngineCore, names: Sequence[str], so_far: dict[str, list[int]] | None = None) -> list[list[int]]:
    """Step until nothing is left; the tokens of each request. `so_far` has, and is given, those of earlier steps."""
    tokens = {} if so_far is None else so_far
    while core.has_work:
        collect(core, tokens)
    return [tokens[name] for name in names]


def collect(core: EngineCore, tokens: dict[str, list[int]]) -> None:
    """One step; its tokens are added."""
    for delta in core.step():
        assert delta.error is None, delta.error
        tokens.setdefault(delta.request_id, []).extend(delta.token_ids)


def answers(core: EngineCore, prompts: Sequence[Sequence[int]], adapters: Sequence[str | None] = ()) -> list[list[int]]:
    """Greedy tokens of prompts that are served together."""
    each = list(adapters) or [None] * len(prompts)
    return finish(core, [add(core, prompt, adapter=name) for prompt, name in zip(prompts, each, strict=True)])


class Oracle:
    """A model that is asked for whole sequences' logits, with the weights of any checkpoint of its kind."""

    def __init__(self, checkpoint: Path) -> None:
        self.model = AutoModelForTPU.from_pretrained(checkpoint)

    def uses(self, checkpoint: Path) -> Oracle:
        """From now on, this checkpoint's weights."""
        self.model.params.update(AutoModelForTPU.from_pretrained(checkpoint).params)
        return self

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """[tokens, vocab]."""
        size = OPTIONS["max_model_len"]
        padded, mask = np.zeros((1, size), np.int32), np.zeros((1, size), np.int32)
        padded[0, : len(tokens)], mask[0, : len(tokens)] = tokens, 1
        return np.asarray(self.model(padded, mask).logits)[0, : len(tokens)]

    def agrees(self, prompt: Sequence[int], answer: Sequence[int]) -> bool:
        """Whether each token of a whole answer is the likeliest after those before it."""
        assert len(answer) == NEW
        logits = self.logits([*prompt, *answer])[len(prompt) - 1 : -1]
        return logits.argmax(-1).tolist() == list(answer)


def with_weights(source: Path, folder: Path, changes: dict[str, np.ndarray]) -> Path:
    """A copy of a checkpoint in which some tensors are others."""
    folder.mkdir(parents=True)
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    save_file({**tensors, **changes}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
