"""Preferences as batches: examples with a prompt, a chosen and a rejected completion (for rewards, whole texts too), or
with a prompt, a completion and a label. Each example is two rows (or one) that stay together. Tokens, cache, order and
positions are those of prompts with completions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ttpu_core.errors import DataError
from ttpu_train.data.packing import EpochPlan, permutation
from ttpu_train.data.settings import DataSettings
from ttpu_train.data.sources import Example, Source, sources_of
from ttpu_train.data.token_files import TokenFile, cache_folder, tokenized
from ttpu_train.data.tokenize import Tokenization
from ttpu_train.runner import Batch

PairKind = Literal["pairs", "rewards", "labels", "labels_and_others"]
"""What an example is: a chosen and a rejected completion; these or whole texts, perhaps with a margin, of which none is
cut; a completion with a label; or that, and beside it the completion of the example before, which the divergence of KTO
is estimated from."""


@dataclass(frozen=True)
class Completions:
    """A source's preferences as prompts with completions, one after another.

    Attributes:
        source: of the examples.
        kind: what an example is.
        text_field: that a whole text is given to the tokenization in.
    """

    source: Source
    kind: PairKind
    text_field: str = "text"

    @property
    def name(self) -> str:
        """What errors and the progress bar call it."""
        return self.source.name

    def key(self) -> str:
        """Words that change when the completions do."""
        return json.dumps([self.kind, self.source.key()])

    def examples(self) -> Iterator[tuple[str, Example]]:
        """Each completion with its prompt.

        Raises:
            DataError: a field is missing.
        """
        if self.kind in ("pairs", "rewards"):
            for place, example in self.source.examples():
                example = with_prompt(example)
                whole = self.kind == "rewards" and example.get("prompt") is None
                _need(example, ("chosen", "rejected") if whole else ("prompt", "chosen", "rejected"), place)
                rest = {key: value for key, value in example.items() if key not in ("chosen", "rejected")}
                for field in ("chosen", "rejected"):
                    yield f"{place} ({field})", {**rest, self.text_field if whole else "completion": example[field]}
            return
        other = self._last() if self.kind == "labels_and_others" else None
        for place, example in self.source.examples():
            _need(example, ("prompt", "completion", "label"), place)
            yield place, example
            if self.kind == "labels_and_others":
                yield f"{place} (with another completion)", {**example, "completion": other}
                other = example["completion"]

    def labels(self) -> np.ndarray:
        """float32 [examples], 1 for a desirable completion and 0 for others.

        Raises:
            DataError: a label is neither true nor false.
        """
        found = []
        for place, example in self.source.examples():
            _need(example, ("prompt", "completion", "label"), place)
            if not isinstance(example["label"], bool | np.bool_) and example["label"] not in (0, 1):
                raise DataError(
                    f"{place} was given with the label {example['label']!r}, but a completion is desirable or not: "
                    "write true or false."
                )
            found.append(float(example["label"]))
        return np.asarray(found, np.float32)

    def margins(self) -> np.ndarray:
        """float32 [examples], by how much chosen rewards are to be above rejected ones; NaN where nothing says so.

        Raises:
            DataError: a margin is no number.
        """
        found = []
        for place, example in self.source.examples():
            margin = example.get("margin")
            number = isinstance(margin, int | float | np.number) and not isinstance(margin, bool)
            if margin is not None and not (number and np.isfinite(margin)):
                raise DataError(
                    f"{place} was given with the margin {margin!r}, but it is a number, the least difference of both "
                    "rewards: write one, or leave it out of all examples."
                )
            found.append(float("nan") if margin is None else float(margin))
        return np.asarray(found, np.float32)

    def _last(self) -> Any:
        last: Mapping[str, Any] = {}
        for place, example in self.source.examples():
            _need(example, ("prompt", "completion", "label"), place)
            last = example
        return last.get("completion")


def with_prompt(example: Example) -> Example:
    """A pair of conversations without a prompt, with the messages that both begin with as their prompt."""
    chosen, rejected = example.get("chosen"), example.get("rejected")
    if example.get("prompt") is not None or not isinstance(chosen, list) or not isinstance(rejected, list):
        return example
    same = 0
    while same < min(len(chosen), len(rejected)) - 1 and chosen[same] == rejected[same]:
        same += 1
    return {**example, "prompt": chosen[:same], "chosen": chosen[same:], "rejected": rejected[same:]}


class PairPlanner:
    """The examples of each epoch, and their rows; a `RowPlanner` whose rows are examples.

    Args:
        dataset: as for `batch_loader`.
        tokenizer: the checkpoint's.
        settings: how examples become rows; `rows` are examples.
        kind: what an example is.

    Attributes:
        digest: a hash of all completions.
        layout: how documents become sequences; always 1, as none is split.
        references: float32 [examples, rows of each], the log-probabilities of the completions by the reference; None
            until they were computed.

    Raises:
        DataError: data that is missing or malformed, or of which no completion fits a row.
    """

    layout = 1

    def __init__(self, dataset: Any, tokenizer: Any, settings: DataSettings, kind: PairKind) -> None:
        self._settings, self._each = settings, 1 if kind == "labels" else 2
        tokenization = Tokenization(tokenizer, replace(settings, completion_only_loss=True))
        field = settings.text_field
        sources = [Completions(source, kind, field) for source in sources_of(dataset, settings)]
        self._files: list[TokenFile] = [tokenized(one, tokenization, cache_folder(settings)) for one in sources]
        counts = [(len(file.offsets) - 1) // self._each for file in self._files]
        self._bounds = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self._labels = self._margins = None
        if kind.startswith("labels"):
            self._labels = np.concatenate([one.labels() for one in sources])
        elif kind == "rewards":
            self._margins = _all_or_none(np.concatenate([one.margins() for one in sources]))
        fits = self._whole if kind == "rewards" else self._fitting
        self._kept = np.flatnonzero(np.concatenate([fits(file) for file in self._files]))
        if not len(self._kept):
            which = "do both texts fit into" if kind == "rewards" else "do both completions begin within the first"
            raise DataError(
                f"{int(self._bounds[-1]):,} examples were given as training data, but in none {which} "
                f"{settings.max_length:,} tokens (max_length): raise it, or shorten prompts."
            )
        labels = b"".join(b"" if one is None else one.tobytes() for one in (self._labels, self._margins))
        digests = " ".join([kind, *(file.digest for file in self._files)]).encode()
        self.digest = hashlib.blake2b(digests + labels, digest_size=16).hexdigest()
        self.references: np.ndarray | None = None

    def plan(self, epoch: int) -> EpochPlan:
        """The examples of an epoch, numbered from 0."""
        count = len(self._kept)
        order = permutation(count, self._settings.seed, epoch) if self._settings.shuffle else np.arange(count)
        return EpochPlan(order, np.arange(count + 1))

    def compare(
        self, logprobs: Callable[[Batch], np.ndarray], share: int, shares: int, parts: int = 1
    ) -> None:
        """Compute `references`.

        Args:
            logprobs: a process's rows of a batch → float32 [rows of all shares], in their order, the log-probability
                of each row's completion.
            share: which part of each batch this process reads.
            shares: how many parts there are.
            parts: that an update is computed in: the rows of one are what devices have memory for.
        """
        count, each = len(self._kept), self._settings.rows // parts
        plan, found = EpochPlan(np.arange(count), np.arange(count + 1)), []
        for begin in range(0, count, each * shares):
            first = min(begin + share * each, count)
            found.append(logprobs(self.batch(plan, first, min(first + each, count), each)))
        self.references = np.concatenate(found).astype(np.float32).reshape(-1, self._each)[:count]

    def batch(self, plan: EpochPlan, first: int, last: int, rows: int) -> Batch:
        """Examples `first` to `last` of an epoch, and empty ones after them.

        Args:
            plan: of the epoch.
            first: the first example.
            last: the example after the last.
            rows: examples of the batch; as many as `last - first`, or more.
        """
        width, each = self._settings.max_length, self._each
        shape = (rows * each, width)
        tokens, positions = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
        weights = np.zeros(shape, np.float32)
        references, labels = np.zeros(shape[0], np.float32), np.full(shape[0], -1, np.float32)
        margins = np.zeros(shape[0], np.float32)
        for here, member in enumerate(plan.members[first:last].tolist()):
            example = int(self._kept[member])
            place = int(np.searchsorted(self._bounds, example, "right")) - 1
            file, document = self._files[place], (example - int(self._bounds[place])) * each
            for row in range(each):
                begin, end = file.offsets[document + row], file.offsets[document + row + 1]
                size, at = min(int(end - begin), width), here * each + row
                tokens[at, :size] = file.tokens[begin : begin + size]
                weights[at, 1:size] = file.weights[begin + 1 : begin + size]
                positions[at, :size] = np.arange(size)
                if self.references is not None:
                    references[at] = self.references[member, row]
            if self._labels is not None:
                labels[here * each] = self._labels[example]
            if self._margins is not None:
                margins[here * each] = self._margins[example]
        beside = (("ref_logps", self.references, references), ("labels", self._labels, labels))
        found = {name: array for name, known, array in (*beside, ("margins", self._margins, margins))
                 if known is not None}  # fmt: skip
        return Batch(tokens, weights, positions, None, found)

    def _whole(self, file: TokenFile) -> np.ndarray:
        """bool [examples], whether each row of an example holds its whole text."""
        return np.all((np.diff(file.offsets) <= self._settings.max_length).reshape(-1, self._each), axis=1)

    def _fitting(self, file: TokenFile) -> np.ndarray:
        """bool [examples], whether each row of an example has a token with weight."""
        first = file.first_weighted
        return np.all(((first >= 0) & (first < self._settings.max_length)).reshape(-1, self._each), axis=1)


def _all_or_none(margins: np.ndarray) -> np.ndarray | None:
    """Margins [examples], or None where there are none.

    Raises:
        DataError: some examples have none.
    """
    missing = np.isnan(margins)
    if missing.all():
        return None
    if missing.any():
        raise DataError(
            f"{int(missing.sum()):,} of {len(margins):,} examples were given without a margin, which the others have: "
            "write a margin in each example, or in none."
        )
    return margins


def _need(example: Example, names: tuple[str, ...], place: str) -> None:
    if not hasattr(example, "get"):
        raise DataError(
            f"{place} was given as a preference, but it is a {type(example).__name__}: write a mapping with "
            f"{', '.join(map(repr, names))}."
        )
    missing = [name for name in names if example.get(name) is None]
    if missing:
        raise DataError(
            f"{place} was given with the fields {', '.join(map(repr, example)) or '(none)'}, but this method needs "
            f"{', '.join(map(repr, names))}: add {', '.join(map(repr, missing))}."
        )
