"""A reward model as a reward function of GRPO. It reads prompts with completions as `Trainer(method="reward")` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ttpu_train.data.settings import DataSettings
from ttpu_train.data.sources import Example
from ttpu_train.data.tokenize import Tokenization


class RewardsRows(Protocol):
    """A reward model of a backend.

    Attributes:
        tokenizer: the checkpoint's.
    """

    tokenizer: Any

    def rewards(self, rows: Sequence[Sequence[int]]) -> np.ndarray:
        """float32 [rows], of the token ids of whole texts."""
        ...


class RewardModel:
    """Judges completions. The model is opened when it is first asked.

    Args:
        source: the checkpoint's folder or Hub id, whose last part is the model's name in the log.
        opened: opens it.
    """

    def __init__(self, source: str, opened: Callable[[str], RewardsRows]) -> None:
        self.__name__ = Path(source).name
        self._source, self._opened = source, opened

    @cached_property
    def _model(self) -> RewardsRows:
        return self._opened(self._source)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        """The reward of each completion after its prompt."""
        tokenization = Tokenization(self._model.tokenizer, DataSettings())
        pairs = zip(prompts, completions, strict=True)
        examples = [(f"completion {number}", _example(*pair)) for number, pair in enumerate(pairs)]
        rows = [one.tokens.tolist() for one in tokenization.documents(examples)]
        return [float(one) for one in self._model.rewards(rows)]


def _example(prompt: Any, completion: Any) -> Example:
    """A prompt with its completion; the prompt alone where nothing follows it."""
    return {"prompt": prompt, "completion": completion} if completion else {"text": prompt}
