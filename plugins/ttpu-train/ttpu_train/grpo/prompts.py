"""The prompts of a run, in an order that depends on the seed alone."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ttpu_core.errors import DataError, MissingDependencyError
from ttpu_train.data.chat import ChatEncoder
from ttpu_train.data.settings import DataSettings
from ttpu_train.data.sources import sources_of

SAMPLED = ("prompt", "prompts", "completion", "completions", "completion_ids", "trainer_state")
"""Names that reward functions are given values by, and that columns of the data therefore cannot have."""


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Attributes:
        content: a text, or a list of messages.
        tokens: what the model is given.
        columns: the example's other fields.
    """

    content: Any
    tokens: list[int]
    columns: dict[str, Any]

    @property
    def conversational(self) -> bool:
        """Whether it is a list of messages."""
        return not isinstance(self.content, str)


class Prompts:
    """All prompts of a run.

    Args:
        dataset: as for `ttpu_train.data.loader.batch_loader`; each example has a field `prompt`.
        tokenizer: the checkpoint's.
        settings: of reading.
        longest: the most tokens of a prompt.
        shuffle: another order in each epoch.

    Raises:
        DataError: an example without a prompt, or with one that is too long.
        MissingDependencyError: the checkpoint has no tokenizer.
    """

    def __init__(self, dataset: Any, tokenizer: Any, settings: DataSettings, longest: int, *, shuffle: bool) -> None:
        if tokenizer is None:
            raise MissingDependencyError(
                "prompts were to be read, but the checkpoint has no tokenizer: pass one as Trainer(tokenizer=...)."
            )
        self._seed, self._shuffle = settings.seed, shuffle
        self.prompts: list[Prompt] = []
        for source in sources_of(dataset, settings):
            for place, example in source.examples():
                self.prompts.append(_prompt(example, place, tokenizer, settings, longest))
        self.longest = max(len(prompt.tokens) for prompt in self.prompts)
        self._order = lru_cache(maxsize=4)(self._ordered)

    def __len__(self) -> int:
        return len(self.prompts)

    def digest(self) -> str:
        """Changes with the prompts."""
        told = json.dumps([[prompt.tokens, prompt.columns] for prompt in self.prompts], default=repr, sort_keys=True)
        return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()

    def taken(self, first: int, count: int) -> list[Prompt]:
        """The prompts `first` to `first + count` of all epochs, one after another."""
        epochs = (divmod(place, len(self.prompts)) for place in range(first, first + count))
        return [self.prompts[self._order(epoch)[place]] for epoch, place in epochs]

    def _ordered(self, epoch: int) -> np.ndarray:
        places = np.arange(len(self.prompts))
        if self._shuffle:
            np.random.default_rng((self._seed, epoch)).shuffle(places)
        return places


def _prompt(example: Any, place: str, tokenizer: Any, settings: DataSettings, longest: int) -> Prompt:
    content = example.get("prompt")
    if content is None:
        raise DataError(
            f"{place} was given as a prompt, but it has the fields {', '.join(map(repr, example)) or 'none'} and no "
            "'prompt': add it, a text or a list of messages."
        )
    columns = {name: value for name, value in example.items() if name not in ("prompt", "completion")}
    taken = [name for name in columns if name in SAMPLED]
    if taken:
        raise DataError(
            f"{place} has the field {taken[0]!r}, but reward functions are given a value of the run by that name: "
            "rename it."
        )
    if isinstance(content, str):
        tokens = [int(token) for token in tokenizer(content)["input_ids"]]
    else:
        tokens = ChatEncoder(tokenizer, settings).prompt(example, place).tolist()
    if not 1 <= len(tokens) <= longest:
        raise DataError(
            f"{place} has a prompt of {len(tokens):,} tokens, but from 1 to {longest:,} fit before a completion: "
            "shorten it, or change max_length or max_completion_length."
        )
    return Prompt(content, tokens, columns)
