"""Pads prompts to a few widths. The ids, mask and positions of `generate` are left-padded to the next bucket, so that
prompts of most lengths run programs that are already compiled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

SMALLEST_PROMPT = 16
SMALLEST_ANSWER = 64
CHUNK = 1024


@dataclass(frozen=True)
class Prompt:
    """A batch of prompts on the host.

    Attributes:
        ids: int64 [batch, width].
        mask: bool [batch, length]: which slots of the cache may be attended to; True for those not yet filled, which
            come after every query.
        positions: int64 [..., batch or 1, width].
        added: columns that the bucket added on the left.
        length: slots of the cache, prompt and output together.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor
    added: int
    length: int

    @property
    def width(self) -> int:
        """Columns of the padded prompt."""
        return self.ids.shape[1]

    @property
    def shift(self) -> torch.Tensor:
        """int64 [width]: from the padded prompt's columns to the caller's, those that the bucket added being 0."""
        columns = torch.arange(self.width)
        return (columns - self.added).clamp(min=0) - columns


def prompt_bucket(tokens: int) -> int:
    """Return the padded length of a prompt: a power of two up to a chunk, then whole chunks, as in the JAX backend."""
    if tokens > CHUNK:
        return -(-tokens // CHUNK) * CHUNK
    return max(SMALLEST_PROMPT, 1 << (tokens - 1).bit_length())


def answer_bucket(tokens: int) -> int:
    """Return the number of slots for an answer: a power of two, or one and a half of one."""
    power = max(SMALLEST_ANSWER, 1 << (tokens - 1).bit_length())
    return power * 3 // 4 if power > SMALLEST_ANSWER and power * 3 // 4 >= tokens else power


def padded(ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None, new_tokens: int) -> Prompt:
    """Pad the prompt to its bucket.

    Args:
        ids: [batch, tokens].
        mask: [batch, tokens], 0 at padding; None where there is none.
        positions: [..., batch or 1, tokens], as transformers counts them; None to count from the mask.
        new_tokens: the most that may follow.
    """
    batch, tokens = ids.shape
    added = prompt_bucket(tokens) - tokens
    seen = torch.ones(batch, tokens, dtype=torch.bool) if mask is None else mask.bool()
    if positions is None:
        positions = (seen.long().cumsum(-1) - 1).masked_fill(~seen, 0)
    answer = answer_bucket(new_tokens)
    return Prompt(
        pad(ids.long(), (added, 0)),
        pad(pad(seen, (added, 0)), (0, answer), value=True),
        pad(positions.long(), (added, 0)),
        added,
        tokens + added + answer,
    )
