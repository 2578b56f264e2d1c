"""A prompt as models and engines take it, whatever form the caller had it in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens that a sequence begins with. Media that stand for some of the tokens will be further fields.

    token_ids: at least one, without padding.
    """

    token_ids: tuple[int, ...]

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.token_ids)
