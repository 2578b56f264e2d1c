"""Chooses the next token on the device. It takes logits and transformers' logits processors, and returns tokens and
their scores, by operations whose shapes do not change from step to step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers.generation import logits_process as stock

from ttpu_torch_xla.generation.prompt import answer_bucket

SAME: tuple[type, ...] = (
    stock.TemperatureLogitsWarper,
    stock.TopKLogitsWarper,
    stock.TopPLogitsWarper,
    stock.MinPLogitsWarper,
    stock.TypicalLogitsWarper,
    stock.EpsilonLogitsWarper,
    stock.InfNanRemoveLogitsProcessor,
    stock.LogitNormalization,
)
"""What looks at scores only, and at all of them alike, so that it runs on the device as it is."""

REPLACED: tuple[type, ...] = (
    stock.MinLengthLogitsProcessor,
    stock.MinNewTokensLengthLogitsProcessor,
    stock.SuppressTokensLogitsProcessor,
    stock.RepetitionPenaltyLogitsProcessor,
)
"""What looks at the tokens so far, whose number changes, and has a form of fixed shape here."""

Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def runs_on_device(processors: Iterable[Any]) -> bool:
    """Whether each processor is one that this module implements on the device (a derived class is not)."""
    return all(type(processor) in (*SAME, *REPLACED) for processor in processors)


class DeviceChoice:
    """Chooses tokens of one call of `generate`.

    Args:
        processors: those that transformers prepared, for which `runs_on_device` holds.
        prompt: int64 [batch, tokens] on the host, as the caller gave it.
        new_tokens: the most that are chosen.
        sample: draw, or take the likeliest. Draws are uniform numbers from torch's own generator of the host, taken
            before the first step; so `torch.manual_seed` repeats them, on whatever device the model is.
        device: where the logits are.
    """

    def __init__(
        self, processors: Iterable[Any], prompt: torch.Tensor, new_tokens: int, sample: bool, device: torch.device
    ) -> None:
        self._prompt, self._device = prompt, device
        self._processors = list(processors)
        self._steps: list[Step] | None = None
        self._draws: torch.Tensor | None = None
        if sample:
            draws = torch.zeros(answer_bucket(new_tokens), prompt.shape[0])
            draws[:new_tokens] = torch.rand(new_tokens, prompt.shape[0])
            self._draws = draws.to(device)

    def seen_in_prompt(self, vocab: int) -> torch.Tensor | None:
        """Return bool [batch, vocab], the tokens of the prompt, for the first call; None where no processor needs it.
        """
        for processor in self._processors:
            if isinstance(processor, stock.RepetitionPenaltyLogitsProcessor):
                # The processor's own scores of ones say which tokens it counts as seen in the prompt.
                marks: torch.Tensor = processor(self._prompt, torch.ones(len(self._prompt), vocab)) != 1
                return marks.to(self._device)
        return None

    def __call__(
        self, logits: torch.Tensor, step: torch.Tensor, seen: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [batch] and processed scores [batch, vocab] of logits [batch, vocab]; step, int64 [1], counts the new
        tokens before these, and seen, bool [batch, vocab], marks the tokens so far."""
        if self._steps is None:
            self._steps = [self._step(processor, logits.shape[-1]) for processor in self._processors]
        scores = logits
        for process in self._steps:
            scores = process(scores, step, seen)
        token = scores.argmax(-1) if self._draws is None else drawn(scores, self._draws.index_select(0, step)[0])
        return token, scores

    def _step(self, processor: Any, vocab: int) -> Step:
        if type(processor) in SAME:
            return lambda scores, step, seen: processor(None, scores)
        if isinstance(processor, stock.RepetitionPenaltyLogitsProcessor):
            penalty = processor.penalty

            # Captures no `self`: in a cycle, the call's tensors would stay on the device until a garbage collection.
            def penalised(scores: torch.Tensor, step: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
                assert seen is not None
                lower = torch.where(scores < 0, scores * penalty, scores / penalty)
                return torch.where(seen, lower, scores)

            return penalised
        if isinstance(processor, stock.SuppressTokensLogitsProcessor):
            never = self._marked(processor.suppress_tokens, vocab)
            return lambda scores, step, seen: scores.masked_fill(never, -math.inf)
        if isinstance(processor, stock.MinLengthLogitsProcessor):
            fewest = processor.min_length - self._prompt.shape[1]
        else:
            fewest = processor.min_new_tokens + processor.prompt_length_to_skip - self._prompt.shape[1]
        ends = self._marked(processor.eos_token_id, vocab)
        count = torch.tensor([fewest]).to(self._device)
        return lambda scores, step, seen: scores.masked_fill(ends & (step < count), -math.inf)

    def _marked(self, tokens: torch.Tensor, vocab: int) -> torch.Tensor:
        """bool [vocab] on the device, True at these tokens."""
        return torch.isin(torch.arange(vocab), tokens.cpu()).to(self._device)


def drawn(scores: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Tokens [batch] from softmax(scores [batch, vocab]) by the inverse of its distribution function at uniform [batch]
    in [0, 1); tokens of probability zero are never drawn.

    XLA sums prefixes in a tree, so that rounding makes them rise and fall by an ulp between tokens that add nothing:
    where they first pass the level, the token may have probability zero.
    """
    probabilities = scores.softmax(-1)
    below = probabilities.cumsum(-1)
    vocab = scores.shape[-1]
    token = torch.arange(vocab, device=scores.device)
    possible = probabilities > 0
    passed = possible & (below > uniform[:, None] * below[:, -1:])
    first = torch.where(passed, token, vocab).amin(-1)
    last = torch.where(possible, token, 0).amax(-1)
    return torch.minimum(first, last)
