"""The interface between the engine and the code that computes a model's steps: the `ModelRunner` protocol and the
values that cross it. The engine schedules requests and streams outputs; a runner holds weights, KV pages and programs,
and knows nothing of requests. This module imports no framework.

**Runners that span hosts.** A runner may compute on several hosts, with one runner process on each. The engine, with
its scheduler and its server, runs on one of them. Every host must receive the same calls in the same order, because
each call may start collectives: `allocate`, `compile`, `dispatch`, `prompt_logprobs`, `sleep`, `wake_up`,
`weight_update`, the adapters' `load` and `unload`, and `release`. Their arguments are plain values of this module that
pickle: a `RunnerStep` contains all that a host needs for a step, and refers to no object of the engine. Only the
engine's host calls `read` and `read_hidden`, and their results are there. Directories for `weight_update` must be
readable on every host. The state that a host keeps between steps (last sampled tokens, sampling parameters by slot,
penalty counts) follows from the steps it received. The backend of such runners declares `spans_processes`.

Runners are structural: they need not inherit from anything here, nor import it at run time. `tests/numpy_runner.py` of
this distribution is a small complete one in numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ttpu_core.generation.sampling_params import SamplingParams
from ttpu_core.loading import LoadOptions
from ttpu_core.spec import ArchitectureSpec

if TYPE_CHECKING:
    from ttpu_serve.api.engine_config import EngineConfig

NULL_PAGE = 0
"""The page that padding is written to; no sequence ever holds it."""
IN_FLIGHT = -1
"""In `RunnerStep.tokens`: the token that was sampled last in the slot of its sequence, which the host has yet to
read."""
SAMPLING_LEVELS = ("greedy", "draw", "all")
"""What sampling can do: the likeliest token; temperature, top-k, top-p and min-p; rules for tokens, penalties and
log-probabilities too."""

OnProgress = Callable[[str, float, float], None]
"""Called as progress("compile", programs done, programs in all)."""


# -- values that the engine gives --


@dataclass(frozen=True)
class RowRules:
    """Token rules for the logits of one row.

    bias: token ids int32 [n] and the values added to their logits, float32 [n].
    allowed: uint32 [words], bit i % 32 of word i // 32 stands for token i; None allows every token.
    """

    bias: tuple[np.ndarray, np.ndarray] | None = None
    allowed: np.ndarray | None = None


@dataclass(frozen=True)
class SlotStart:
    """A request that takes a slot with the step that contains this value, and keeps it until another request takes it.

    params: sampling parameters, with the seed set. level: lowest sufficient sampling level, an index into
    `SAMPLING_LEVELS`.
    prompt_length: tokens of the prompt. adapter: number of the LoRA adapter, 0 for none.
    prompt, output: int32 [tokens], the tokens so far, if penalties count them; otherwise None.
    """

    slot: int
    params: SamplingParams
    level: int
    prompt_length: int
    adapter: int = 0
    prompt: np.ndarray | None = None
    output: np.ndarray | None = None


@dataclass(frozen=True)
class RunnerStep:
    """One step over n sequences, complete: a runner needs nothing else from the engine to compute it.

    slots: int32 [n], the slot of each sequence.
    starts: int32 [n], position of each sequence's first token in this step. counts: int32 [n], its number of tokens.
    tokens: int32 [tokens] of all sequences in order, with `IN_FLIGHT` for tokens that the host does not know yet.
    samples: bool [n], whether the sampled tokens of the sequence's rows are used.
    rows: int32 [rows], indices into `tokens` whose logits are needed: the last token of each sequence, and before it
    the tokens that its drafts follow. owners: int32 [rows], the sequence of each row.
    tables: per page group int32 [n, pages]: entry i is the page of the positions from i * page_size.
    begins: requests that take their slots with this step.
    rules: row → rules of its token.
    hidden: whether to keep the residual stream of the step's tokens, for embeddings and prompt log-probabilities.

    A sequence with one row leaves its sampled token in its slot, where a later step's `IN_FLIGHT` reads it. A sequence
    with several rows (drafts) leaves none: the host decides which tokens are accepted.
    """

    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    tokens: np.ndarray
    samples: np.ndarray
    rows: np.ndarray
    owners: np.ndarray
    tables: tuple[np.ndarray, ...]
    begins: tuple[SlotStart, ...] = ()
    rules: Mapping[int, RowRules] = field(default_factory=dict)
    hidden: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return len(self.tokens)


@dataclass(frozen=True)
class LowRankUpdate:
    """An update to a module's weight [out, in]: scale times `b` [out, rank] times `a` [rank, in], in float32."""

    a: np.ndarray
    b: np.ndarray

    @property
    def rank(self) -> int:
        """The rank, the number of rows of `a`."""
        return int(self.a.shape[0])


@dataclass(frozen=True)
class AdapterWeights:
    """A LoRA adapter as stored in its files. `source` names it in errors; `updates` maps the base model's modules, by
    their transformers names, to updates."""

    source: str
    updates: Mapping[str, LowRankUpdate]


# -- values that a runner gives, with whatever types of its own that have these --


class LayerGroup(Protocol):
    """Layers that share a pool of pages and a block table."""

    @property
    def name(self) -> str:
        """The group's name in metrics."""
        ...

    @property
    def window(self) -> int | None:
        """Positions that a token sees, including its own; None is all."""
        ...

    @property
    def chunk(self) -> int | None:
        """Size of the chunks within which tokens see each other; None is no limit."""
        ...


class RunnerLimits(Protocol):
    """The limits that a runner was built for. The engine stays within them."""

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of one sequence, prompt and output."""
        ...

    @property
    def max_num_seqs(self) -> int:
        """Maximum sequences of one step; slots are 0 to this - 1."""
        ...

    @property
    def max_num_batched_tokens(self) -> int:
        """Maximum tokens of one step."""
        ...

    @property
    def max_prefills(self) -> int | None:
        """Maximum sequences of one step with more than one token; None is unlimited."""
        ...

    @property
    def draft_tokens(self) -> int:
        """Maximum draft tokens per sequence and step; 0 without speculation."""
        ...

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        ...

    @property
    def recurrent(self) -> bool:
        """Whether layers have recurrent states, which rule out prefix caching and drafts."""
        ...

    @property
    def whole_prompts(self) -> bool:
        """Whether a step holds prompts as a whole, and never a part of one."""
        ...

    @property
    def hidden_states(self) -> bool:
        """Whether a step can keep its residual stream, for embeddings."""
        ...

    @property
    def generates(self) -> bool:
        """Whether the model generates tokens; a text encoder gives embeddings alone."""
        ...

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        ...

    @property
    def logit_columns(self) -> int:
        """Columns of the logits: the vocabulary and its padding."""
        ...

    @property
    def sampling_level(self) -> str:
        """The highest supported level of `SAMPLING_LEVELS`."""
        ...

    @property
    def penalties(self) -> bool:
        """Whether presence, frequency and repetition penalties are supported."""
        ...

    @property
    def prompt_logprobs(self) -> bool:
        """Whether `ModelRunner.prompt_logprobs` is supported."""
        ...

    @property
    def max_logprobs(self) -> int:
        """Number of most likely tokens reported beside a sampled token."""
        ...


class SampledRows(Protocol):
    """The sampled tokens of a step. Log-probabilities are None if no row's level includes them."""

    @property
    def token(self) -> np.ndarray:
        """int32 [rows]; -1 if the logits define no distribution."""
        ...

    @property
    def logprob(self) -> np.ndarray | None:
        """float32 [rows], the log-probabilities of the tokens."""
        ...

    @property
    def top_tokens(self) -> np.ndarray | None:
        """int32 [rows, max_logprobs], likeliest first."""
        ...

    @property
    def top_logprobs(self) -> np.ndarray | None:
        """float32 [rows, max_logprobs]."""
        ...


class InFlight(Protocol):
    """A dispatched step whose results can be read later."""

    def read(self) -> SampledRows:
        """Wait for the step and return its sampled tokens."""
        ...

    def read_hidden(self) -> np.ndarray:
        """Wait for the step and return the residual stream after the final norm, [tokens, hidden]. Requires the step's
        `hidden`."""
        ...


class TokenLogprobs(Protocol):
    """Log-probabilities of given tokens."""

    @property
    def logprob(self) -> np.ndarray:
        """float32 [tokens]."""
        ...

    @property
    def top_tokens(self) -> np.ndarray:
        """int32 [tokens, max_logprobs], likeliest first."""
        ...

    @property
    def top_logprobs(self) -> np.ndarray:
        """float32 [tokens, max_logprobs]."""
        ...


class MemoryStats(Protocol):
    """Memory that a runner holds."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, including adapters, over all devices."""
        ...

    @property
    def kv_itemsize(self) -> float:
        """Bytes of one number of a cached key or value."""
        ...


class CompileStats(Protocol):
    """Compilation counts and time so far."""

    @property
    def programs(self) -> int:
        """Number of compiled programs."""
        ...

    @property
    def recompiles(self) -> int:
        """Programs that were compiled while serving."""
        ...

    @property
    def seconds(self) -> float:
        """Time spent compiling."""
        ...

    @property
    def pending(self) -> int:
        """Programs that are compiled while the engine serves, and are not there yet."""
        ...

    @property
    def cached(self) -> int:
        """Programs that a cache had."""
        ...


class ProgramStats(Protocol):
    """One compiled program."""

    @property
    def name(self) -> str:
        """The program's name in tables."""
        ...

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory on one device; None if the compiler does not report it."""
        ...

    @property
    def seconds(self) -> float:
        """Time spent compiling or loading the program."""
        ...


class Devices(Protocol):
    """The devices of a runner."""

    @property
    def kind(self) -> str:
        """The hardware's own name."""
        ...

    @property
    def platform(self) -> str:
        """The platform, for example tpu or cpu."""
        ...

    @property
    def count(self) -> int:
        """Number of devices over which the model is sharded."""
        ...


class AdapterSlots(Protocol):
    """A fixed number of slots for LoRA adapters beside the weights."""

    @property
    def names(self) -> Mapping[str, int]:
        """Names of the loaded adapters, each with its number, from 1."""
        ...

    def salt(self, name: str) -> bytes:
        """Return a salt that separates cached prefixes of this adapter from all others, including an earlier adapter of
        the same name."""
        ...

    def check(self, weights: AdapterWeights) -> Any:
        """Convert an adapter's weights to the form that `load` takes. May run in any thread.

        Raises:
            MappingError, UnsupportedError: the adapter belongs to another model or is not supported.
        """
        ...

    def load(self, name: str, checked: Any, busy: Collection[int]) -> None:
        """Load an adapter, replacing one of the same name. `busy` holds the numbers that requests still use.

        Raises:
            BusyError: requests still use the slots that are not taken.
            RequestError: no slot is free, or the rank exceeds the maximum.
        """
        ...

    def unload(self, name: str) -> None:
        """Unload an adapter; requests that use it finish with it."""
        ...


class ModelRunner(Protocol):
    """The model's side of an engine: weights, KV pages and programs.

    Life cycle: a backend makes it (`ttpu_core.backend.Serves.model_runner`), then `allocate`, `compile`, and steps,
    with `sleep` and `wake_up` in between, and `release` at the end. Steps are dispatched and computed in order, and may
    be read later.
    """

    @property
    def limits(self) -> RunnerLimits:
        """The limits it was built for."""
        ...

    @property
    def spec(self) -> ArchitectureSpec | None:
        """The model's architecture, for FLOP and byte formulas; None if the model has no such description."""
        ...

    @property
    def devices(self) -> Devices:
        """The devices it runs on."""
        ...

    @property
    def page_groups(self) -> Sequence[LayerGroup]:
        """The page groups in the order of `RunnerStep.tables`, the largest first."""
        ...

    @property
    def num_pages(self) -> tuple[int, ...]:
        """Pages per group including `NULL_PAGE`, after `allocate`."""
        ...

    @property
    def adapters(self) -> AdapterSlots | None:
        """Its LoRA adapter slots; None if it was built without any."""
        ...

    def allocate(self, num_pages: Sequence[int] | None = None, *, draft: ModelRunner | None = None) -> None:
        """Allocate the KV pages.

        Args:
            num_pages: pages per group including `NULL_PAGE`; None follows the settings or fills the free memory.
            draft: an unallocated runner on the same devices that will get as many pages per group as the largest group
                here; memory is left for it.

        Raises:
            RequestError: memory does not suffice for one sequence of `max_model_len` tokens.
        """
        ...

    def compile(self, progress: OnProgress | None = None) -> None:
        """Compile all programs that serving needs. Later compilations count as recompilations."""
        ...

    def dispatch(self, step: RunnerStep) -> InFlight:
        """Start a step and return at once. If it raises, the same step may be dispatched again."""
        ...

    def prompt_logprobs(self, step: InFlight, targets: np.ndarray) -> TokenLogprobs:
        """Return log-probabilities of `targets`, int32 [tokens], each given the dispatched step's token of the same
        index."""
        ...

    def length_salt(self, prompt_length: int) -> bytes:
        """Return a salt that separates prompts of this length from others with an equal beginning, if keys depend on
        the prompt's length (some ropes); otherwise b""."""
        ...

    def sleep(self) -> None:
        """Free the devices' memory: move the weights to the host and drop the pages."""
        ...

    def wake_up(self) -> None:
        """Undo `sleep`, with empty pages."""
        ...

    def weight_update(self, weights: str | Path | Mapping[str, Any]) -> AbstractContextManager[Callable[[], None]]:
        """Check new weights and return a context whose value is a function that puts them in place, awake or asleep.

        Args:
            weights: a directory of safetensors files, or a mapping from tensor names of the transformers checkpoint to
                arrays.

        Raises:
            RequestError, MappingError, CheckpointError: the weights do not fit; nothing is replaced then.
        """
        ...

    def compile_stats(self) -> CompileStats:
        """Return compilation counts; cheap, because every metrics request calls it."""
        ...

    def program_stats(self) -> Sequence[ProgramStats]:
        """Return all compiled programs, those with the highest memory first."""
        ...

    def memory_stats(self) -> MemoryStats:
        """Return the memory that the runner holds."""
        ...

    def release(self) -> None:
        """Free the pages' memory for good."""
        ...


class ServedModel(Protocol):
    """The attributes of a loaded model that an engine reads."""

    @property
    def name(self) -> str:
        """The checkpoint's name."""
        ...

    @property
    def backend(self) -> str:
        """The name of the backend that loaded it."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's transformers tokenizer, or None."""
        ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a sequence."""
        ...

    @property
    def spec(self) -> ArchitectureSpec:
        """The unpadded architecture."""
        ...


class ServingBackend(Protocol):
    """`ttpu_core.backend.Serves` with the types of this module."""

    name: str
    spans_processes: bool

    @property
    def options(self) -> type[LoadOptions]: ...

    def model_runner(
        self, model: Any, config: EngineConfig, adapters: Mapping[str, AdapterWeights] | None = None
    ) -> ModelRunner:
        """Return a runner for a loaded model, without pages and programs."""
        ...

    def options_beside(self, model: Any) -> LoadOptions:
        """Return the options that load a second model on the same devices."""
        ...

    def keep_compiled(self) -> Path | None:
        """Turn on the persistent cache of compiled programs and return its folder; None if the user turned it off."""
        ...
