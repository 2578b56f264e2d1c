"""Words that an output must not hold (`bad_words`): the sequences of tokens that write them, and the tokens that would
complete one of these after given tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ttpu_core.errors import RequestError
from ttpu_core.generation.sampling_params import MAX_BAD_WORD_TOKENS


def sequences_of(words: Sequence[str | Sequence[int]], tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Return the sequences of tokens that write the words, each once.

    A text is tokenized with a space before it and without, because tokenizers write a word within a text otherwise than
    at the beginning of one; blanks such as line breaks are tokenized as they are. Sequences of token ids are kept.

    Args:
        words: texts, and sequences of token ids.
        tokenizer: the model's transformers tokenizer, or None.

    Raises:
        RequestError: a text is given without a tokenizer, has no tokens, or too many.
    """
    texts = [word for word in words if isinstance(word, str)]
    if texts and tokenizer is None:
        raise RequestError(
            "bad_words holds texts, but the checkpoint has no tokenizer: pass each word as a list of token ids.",
            param="bad_words",
        )
    found: dict[tuple[int, ...], None] = {}
    if texts:
        stripped = [text.lstrip() for text in texts]
        forms = [form for text in stripped if text for form in (text, f" {text}")]
        forms += [text for text in texts if not text.strip()]
        encoded = tokenizer(forms, add_special_tokens=False, verbose=False)["input_ids"]
        for form, ids in zip(forms, encoded, strict=True):
            if not 0 < len(ids) <= MAX_BAD_WORD_TOKENS:
                raise RequestError(
                    f"the word {form[:60]!r} of bad_words has {len(ids)} tokens, but it may have 1 to "
                    f"{MAX_BAD_WORD_TOKENS}: correct it.",
                    param="bad_words",
                )
            found[tuple(map(int, ids))] = None
    found |= {tuple(map(int, word)): None for word in words if not isinstance(word, str)}
    return tuple(found)


class BadWords:
    """Sequences of tokens that an output must not hold.

    alone: tokens that are one of them by themselves. highest: the highest token of all, -1 without any. reach: how many
    of an output's last tokens decide what completes a sequence of several tokens; 0 if there is none.
    """

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self._last: dict[tuple[int, ...], set[int]] = {}  # all tokens of a sequence but the last → the last ones
        self.highest = -1
        for sequence in sequences:
            self._last.setdefault(tuple(sequence[:-1]), set()).add(sequence[-1])
            self.highest = max(self.highest, *sequence)
        self.alone = frozenset(self._last.pop((), ()))
        self._lengths = sorted({len(before) for before in self._last})
        self.reach = max(self._lengths, default=0)

    def completing(self, output: Sequence[int]) -> set[int]:
        """Return the tokens that would complete a sequence of several tokens after `output`, the generated tokens."""
        found: set[int] = set()
        for length in self._lengths:
            if length > len(output):
                break
            found |= self._last.get(tuple(output[len(output) - length :]), set())
        return found
