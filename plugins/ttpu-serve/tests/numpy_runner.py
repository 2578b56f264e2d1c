"""A whole `ModelRunner` in numpy: a toy language model over paged keys and values.

It is the template for whoever writes a runner for another framework: every member of `ttpu_serve.runner.ModelRunner` is
here, in the order in which an engine uses them, as plainly as it can be. Replace `ToyModel` by a real one, the loops by
batched programs, and `_sample` by a sampler on the device; keep the meaning of slots, pages, rows and `IN_FLIGHT`. The
scheduler's property tests run on it, because it is fast and because `ToyModel.alone` says what every request must get.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ttpu_core.errors import MappingError, RequestError
from ttpu_core.generation.sampling_params import SamplingParams
from ttpu_core.spec import ArchitectureSpec
from ttpu_serve.runner import (
    IN_FLIGHT,
    NULL_PAGE,
    AdapterWeights,
    LayerGroup,
    ModelRunner,
    OnProgress,
    RowRules,
    RunnerStep,
    SlotStart,
)
from ttpu_serve.runner import InFlight as AnyInFlight

HIDDEN, LOGPROBS = 8, 5


@dataclass(frozen=True)
class Group:
    """A page group; each holds one layer."""

    name: str = "full"
    window: int | None = None
    chunk: int | None = None

    def first_seen(self, position: int) -> int:
        """The first position that the token at `position` sees."""
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return 0 if self.window is None else max(position - self.window + 1, 0)


class LayerCache(Protocol):
    """Keys and values of one sequence in one layer."""

    def write(self, position: int, key: np.ndarray, value: np.ndarray) -> None: ...

    def read(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]: ...


class ToyModel:
    """Attention layers, one per group, over random weights: every token depends on every earlier one that it sees."""

    def __init__(self, groups: Sequence[Group] = (Group(),), vocab_size: int = 32, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.groups, self.vocab_size = tuple(groups), vocab_size
        self.weights: dict[str, np.ndarray] = {"embed": random.normal(size=(vocab_size, HIDDEN))}
        for index in range(len(self.groups)):
            for name in ("query", "key", "value", "output"):
                self.weights[f"{index}.{name}"] = random.normal(size=(HIDDEN, HIDDEN))

    def forward(
        self, token: int, position: int, caches: Sequence[LayerCache], adapter: Mapping[str, Any] | None = None
    ) -> np.ndarray:
        """The residual stream [hidden] of one token, whose keys and values are written."""
        weights = self.weights
        place = np.sin(position / (1.0 + np.arange(HIDDEN)))
        stream = weights["embed"][token] + place
        for index, (group, cache) in enumerate(zip(self.groups, caches, strict=True)):
            value = weights[f"{index}.value"] @ stream
            if adapter is not None and f"{index}.value" in adapter:
                update = adapter[f"{index}.value"]
                value = value + update.b @ (update.a @ stream)
            cache.write(position, weights[f"{index}.key"] @ stream, value)
            keys, values = cache.read(group.first_seen(position), position + 1)
            scores = keys @ (weights[f"{index}.query"] @ stream) / math.sqrt(HIDDEN)
            shares = np.exp(scores - scores.max())
            stream = stream + np.tanh(weights[f"{index}.output"] @ (shares @ values / shares.sum()))
        return stream / np.sqrt(np.mean(stream**2))

    def logits(self, stream: np.ndarray) -> np.ndarray:
        """[vocab] of one token's stream."""
        logits: np.ndarray = self.weights["embed"] @ stream
        return logits

    def alone(
        self, prompt: Sequence[int], params: SamplingParams, count: int, adapter: Mapping[str, Any] | None = None
    ) -> list[int]:
        """The oracle: what a request gets that has the model to itself, without pages, steps or an engine."""
        caches = [PlainCache() for _ in self.groups]
        tokens = list(prompt)
        for position in range(len(prompt) + count - 1):
            stream = self.forward(tokens[position], position, caches, adapter)
            if position >= len(prompt) - 1:
                logits = self.logits(stream)
                logits[forbidden(tokens[len(prompt) :], params)] = -np.inf
                tokens.append(choose(logits, params, position + 1 - len(prompt), None))
        return tokens[len(prompt) :]


def forbidden(output: list[int], params: SamplingParams) -> list[int]:
    """The tokens that would complete a bad word, by the rule as it is written down."""
    words = [list(word) for word in params.bad_words]
    return [int(word[-1]) for word in words if output[max(len(output) - len(word) + 1, 0) :] == word[:-1]]


class PlainCache:
    """Keys and values in a list."""

    def __init__(self) -> None:
        self._rows: list[tuple[np.ndarray, np.ndarray]] = []

    def write(self, position: int, key: np.ndarray, value: np.ndarray) -> None:
        assert position == len(self._rows)
        self._rows.append((key, value))

    def read(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        keys, values = zip(*self._rows[first:last], strict=True)
        return np.array(keys), np.array(values)


class PagedCache:
    """Keys and values of one sequence in a group's pages [pages, page_size, 2, hidden], by its row of a block table."""

    def __init__(self, pages: np.ndarray, table: np.ndarray) -> None:
        self._pages, self._table, self._size = pages, table, pages.shape[1]

    def write(self, position: int, key: np.ndarray, value: np.ndarray) -> None:
        page = self._table[position // self._size]
        assert page != NULL_PAGE, "a token has no page to be written to"
        self._pages[page, position % self._size] = key, value

    def read(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        at = np.arange(first, last)
        pages = self._table[at // self._size]
        assert (pages != NULL_PAGE).all(), "a page was given back while its tokens are still seen"
        rows = self._pages[pages, at % self._size]
        return rows[:, 0], rows[:, 1]


def choose(logits: np.ndarray, params: SamplingParams, index: int, rules: RowRules | None) -> int:
    """The token of one row: the request's rules, then the likeliest one, or a draw whose noise depends on the request's
    seed and the token's index in the output alone, so that batching, chunks, preemption and drafts change nothing."""
    logits = logits.copy()
    if rules is not None and rules.bias is not None:
        logits[rules.bias[0]] += rules.bias[1]
    if rules is not None and rules.allowed is not None:
        bits = np.unpackbits(rules.allowed.view(np.uint8), bitorder="little")[: len(logits)]
        logits[bits == 0] = -np.inf
    if params.is_greedy:
        return int(logits.argmax())
    logits /= params.temperature
    order = np.argsort(-logits, kind="stable")
    shares = np.exp(logits[order] - logits[order[0]])
    shares /= shares.sum()
    keep = (np.cumsum(shares) - shares < params.top_p) & (shares >= params.min_p * shares[0])
    if params.top_k:
        keep[params.top_k :] = False
    noise = np.random.default_rng((params.seed or 0, index)).gumbel(size=len(logits))
    drawn = np.where(keep, logits[order] + noise[order], -np.inf)
    return int(order[drawn.argmax()])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum())
    return result


# -- values that the engine reads --


@dataclass(frozen=True)
class Limits:
    max_model_len: int = 64
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    max_prefills: int | None = None
    draft_tokens: int = 0
    page_size: int = 4
    recurrent: bool = False
    vocab_size: int = 32
    logit_columns: int = 32
    sampling_level: str = "all"
    penalties: bool = False
    prompt_logprobs: bool = True
    max_logprobs: int = LOGPROBS
    whole_prompts: bool = False
    hidden_states: bool = True
    generates: bool = True


@dataclass(frozen=True)
class Sampled:
    token: np.ndarray
    logprob: np.ndarray | None
    top_tokens: np.ndarray | None
    top_logprobs: np.ndarray | None


@dataclass(frozen=True)
class Logprobs:
    logprob: np.ndarray
    top_tokens: np.ndarray
    top_logprobs: np.ndarray


@dataclass(frozen=True)
class InFlight:
    """A step that is computed already; a real runner would wait in `read`."""

    sampled: Sampled
    hidden: np.ndarray

    def read(self) -> Sampled:
        return self.sampled

    def read_hidden(self) -> np.ndarray:
        return self.hidden


@dataclass(frozen=True)
class Devices:
    kind: str = "numpy"
    platform: str = "cpu"
    count: int = 1


@dataclass(frozen=True)
class Memory:
    weight_bytes: int
    kv_itemsize: float = 8.0


@dataclass(frozen=True)
class Compiled:
    programs: int = 0
    recompiles: int = 0
    seconds: float = 0.0
    pending: int = 0
    cached: int = 0


@dataclass(frozen=True)
class Program:
    name: str
    peak_bytes: int | None
    seconds: float


class Adapters:
    """Room for `capacity` adapters; an adapter changes the values of layers (`0.value`, …)."""

    def __init__(self, model: ToyModel, capacity: int) -> None:
        self.names: dict[str, int] = {}
        self.weights: dict[int, Mapping[str, Any]] = {}
        self._model, self._capacity, self._loads = model, capacity, 0
        self._salts: dict[str, bytes] = {}

    def salt(self, name: str) -> bytes:
        return self._salts[name]

    def check(self, weights: AdapterWeights) -> Mapping[str, Any]:
        for module in weights.updates:
            if module not in self._model.weights or not module.endswith(".value"):
                raise MappingError(f"{weights.source} changes {module!r}, but only values can be: train another one.")
        return weights.updates

    def load(self, name: str, checked: Mapping[str, Any], busy: Collection[int]) -> None:
        others = {number for other, number in self.names.items() if other != name} | set(busy)
        free = [number for number in range(1, self._capacity + 1) if number not in others]
        if not free:
            raise RequestError(f"the adapter {name!r} was to be loaded, but there is no room: unload one.")
        self._loads += 1
        self.names[name], self.weights[free[0]] = free[0], checked
        self._salts[name] = f"{name}\0{self._loads}".encode()

    def unload(self, name: str) -> None:
        del self.names[name]


class NumpyRunner:
    """Runs steps at once, in the order in which they are dispatched."""

    spec: ArchitectureSpec | None = None
    devices = Devices()

    def __init__(
        self, model: ToyModel, limits: Limits | None = None, num_pages: Sequence[int] | None = None, adapters: int = 0
    ) -> None:
        """`num_pages`: per group, what `allocate` takes; room for `adapters` of them."""
        self.model, self.limits = model, limits or Limits(vocab_size=model.vocab_size, logit_columns=model.vocab_size)
        self.adapters = Adapters(model, adapters) if adapters else None
        self.num_pages: tuple[int, ...] = ()
        self._asked = tuple(num_pages or [1 + 2 * self._pages_of_one] * len(model.groups))
        self._pages: list[np.ndarray] = []
        self._slots: list[SlotStart | None] = [None] * self.limits.max_num_seqs
        self._last = np.full(self.limits.max_num_seqs, -1)
        self._asleep: dict[str, np.ndarray] | None = None

    @property
    def _pages_of_one(self) -> int:
        return -(-self.limits.max_model_len // self.limits.page_size)

    @property
    def page_groups(self) -> Sequence[LayerGroup]:
        return self.model.groups

    # -- setting up --

    def allocate(self, num_pages: Sequence[int] | None = None, *, draft: ModelRunner | None = None) -> None:
        self.num_pages = tuple(num_pages or self._asked)
        size = self.limits.page_size
        # Not a number: what is read before it is written shows.
        self._pages = [np.full((pages, size, 2, HIDDEN), np.nan) for pages in self.num_pages]

    def compile(self, progress: OnProgress | None = None) -> None:
        """There is nothing to compile."""

    # -- steps --

    def dispatch(self, step: RunnerStep) -> InFlight:
        for start in step.begins:
            self._slots[start.slot] = start
        streams = np.zeros((step.num_tokens, HIDDEN))
        begin = 0
        for index, slot in enumerate(step.slots.tolist()):
            owner = self._slots[slot]
            assert owner is not None, "a slot was never given to a request"
            caches = [PagedCache(pages, table[index]) for pages, table in zip(self._pages, step.tables, strict=True)]
            adapter = self.adapters.weights.get(owner.adapter) if self.adapters else None
            for offset in range(int(step.counts[index])):
                token = int(step.tokens[begin + offset])
                token = int(self._last[slot]) if token == IN_FLIGHT else token
                position = int(step.starts[index]) + offset
                streams[begin + offset] = self.model.forward(token, position, caches, adapter)
            begin += int(step.counts[index])
        return InFlight(self._sample(step, streams), streams)

    def _sample(self, step: RunnerStep, streams: np.ndarray) -> Sampled:
        rows = len(step.rows)
        tokens, logprobs = np.full(rows, -1), np.zeros(rows, np.float32)
        tops, top_logprobs = np.zeros((rows, LOGPROBS), np.int32), np.zeros((rows, LOGPROBS), np.float32)
        begins = np.cumsum(step.counts) - step.counts
        for row, (at, owner) in enumerate(zip(step.rows.tolist(), step.owners.tolist(), strict=True)):
            start = self._slots[step.slots[owner]]
            assert start is not None
            logits = self.model.logits(streams[at])
            if not np.isfinite(logits).all():
                continue
            index = int(step.starts[owner]) + at - int(begins[owner]) + 1 - start.prompt_length
            tokens[row] = choose(logits, start.params, max(index, 0), step.rules.get(row))
            values = log_softmax(logits)
            logprobs[row] = values[tokens[row]]
            tops[row] = np.argsort(-values, kind="stable")[:LOGPROBS]
            top_logprobs[row] = values[tops[row]]
            alone = int((step.owners == owner).sum()) == 1
            if step.samples[owner] and alone:
                self._last[step.slots[owner]] = tokens[row]
        return Sampled(tokens, logprobs, tops, top_logprobs)

    def prompt_logprobs(self, step: AnyInFlight, targets: np.ndarray) -> Logprobs:
        assert isinstance(step, InFlight)
        values = np.array([log_softmax(self.model.logits(stream)) for stream in step.hidden])
        tops = np.argsort(-values, axis=1, kind="stable")[:, :LOGPROBS]
        return Logprobs(
            values[np.arange(len(targets)), targets], tops.astype(np.int32), np.take_along_axis(values, tops, axis=1)
        )

    def length_salt(self, prompt_length: int) -> bytes:
        return b""

    # -- weights and memory --

    def sleep(self) -> None:
        self._asleep, self.model.weights = self.model.weights, {}
        self.release()

    def wake_up(self) -> None:
        assert self._asleep is not None
        self.model.weights, self._asleep = self._asleep, None
        self.allocate(self.num_pages)

    @contextmanager
    def weight_update(self, weights: str | Path | Mapping[str, Any]) -> Iterator[Callable[[], None]]:
        held = self.model.weights if self._asleep is None else self._asleep
        if not isinstance(weights, Mapping):
            raise RequestError(f"weights were to be read from {weights}, but this runner takes arrays: pass some.")
        for name, value in weights.items():
            if name not in held or held[name].shape != value.shape:
                raise MappingError(f"the update holds {name!r}, but this model has no such tensor: leave it out.")
        yield lambda: held.update(weights)

    def memory_stats(self) -> Memory:
        return Memory(sum(value.nbytes for value in self.model.weights.values()))

    def compile_stats(self) -> Compiled:
        return Compiled()

    def program_stats(self) -> Sequence[Program]:
        return ()

    def release(self) -> None:
        self._pages = []
        self._slots = [None] * self.limits.max_num_seqs
