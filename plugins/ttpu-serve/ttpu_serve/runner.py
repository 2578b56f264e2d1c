"""The wall between the engine and whatever computes a model's steps: the `ModelRunner` protocol, and the values that
cross it. The engine schedules, samples by request and streams; a runner holds weights, pages and programs, and knows
nothing of requests. No framework is imported here.

**Runners that span hosts.** A runner may compute over several hosts, one process of the runner on each. The engine,
with its scheduler and its server, runs on one of them. Every host must be told the same calls in the same order,
since each of them may begin collectives: `allocate`, `compile`, `dispatch`, `prompt_logprobs`, `sleep`, `wake_up`,
`weight_update`, the adapters' `load` and `unload`, and `release`. Their arguments are plain values of this module,
which pickle: a `RunnerStep` holds all that a host needs for a step, and refers to no object of the engine. `read` and
`read_hidden` are for the engine's host alone: whatever they return is there. Directories of `weight_update` have to
be readable on every host. What each host keeps between steps (the tokens sampled last, sampling parameters by slot,
penalty counts) follows from the steps that it was given.

Runners are structural: they need not inherit from anything here, nor import it at run time. A small complete one, in
numpy, is `tests/numpy_runner.py` of this distribution.
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
    """What the request of one row says about single tokens.

    bias: token ids int32 [n] and what is added to their logits, float32 [n].
    allowed: a bit per token, uint32 [words]: bit i % 32 of word i // 32 is token i's; None allows every token.
    """

    bias: tuple[np.ndarray, np.ndarray] | None = None
    allowed: np.ndarray | None = None


@dataclass(frozen=True)
class SlotStart:
    """A request takes a slot with the step that this comes with, and keeps it until another one takes it.

    params: how its tokens are sampled; the seed is set. level: index into `SAMPLING_LEVELS`, the least that serves it.
    prompt_length: tokens of its prompt. adapter: number of its LoRA adapter, 0 for none.
    prompt, output: int32, its tokens so far, where penalties count them; None elsewhere.
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
    """One step over n sequences, complete: a runner needs nothing else of the engine's to compute it.

    slots: int32 [n], the row of each sequence in whatever the runner keeps by slot.
    starts: int32 [n], the position of each sequence's first token here. counts: int32 [n], its tokens here.
    tokens: int32 [tokens] of all sequences, one after another, with `IN_FLIGHT` for those that the host does not know.
    samples: bool [n], whether the tokens that the sequence's rows sample are wanted.
    rows: int32 [rows], indices into `tokens` whose logits are wanted: of each sequence its last token, and before it
        those that its drafts follow. owners: int32 [rows], each row's sequence.
    tables: per page group int32 [n, pages]: entry i holds the page of positions i * page_size and on.
    begins: requests that take their slots with this step.
    rules: row → what its token must obey.
    hidden: whether the residual stream of the step's tokens is kept, for embeddings and prompt log-probabilities.

    A sequence with one row leaves its sampled token in its slot, where a later step's `IN_FLIGHT` finds it. Of several
    rows (drafts) the host says which tokens count, so that none is left.
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
    """`b` [out, rank], times its scale, times `a` [rank, in] is added to a module's weight [out, in]; float32."""

    a: np.ndarray
    b: np.ndarray

    @property
    def rank(self) -> int:
        """Rows of `a`."""
        return int(self.a.shape[0])


@dataclass(frozen=True)
class AdapterWeights:
    """A LoRA adapter as its files have it. `source` is what errors call it; `updates` are by the module of the base
    model, as transformers names it."""

    source: str
    updates: Mapping[str, LowRankUpdate]


# -- values that a runner gives, with whatever types of its own that have these --


class LayerGroup(Protocol):
    """Layers that share a pool of pages and a block table."""

    @property
    def name(self) -> str:
        """What metrics call it."""
        ...

    @property
    def window(self) -> int | None:
        """Positions that a token sees, its own included; None is all."""
        ...

    @property
    def chunk(self) -> int | None:
        """A token sees those of its own chunk of so many positions; None is all."""
        ...


class RunnerLimits(Protocol):
    """What a runner was built for; the engine asks for no more."""

    @property
    def max_model_len(self) -> int:
        """Tokens of one sequence, prompt and output."""
        ...

    @property
    def max_num_seqs(self) -> int:
        """Sequences of one step; slots are 0 to this - 1."""
        ...

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens of one step."""
        ...

    @property
    def max_prefills(self) -> int | None:
        """Sequences of one step with more than one token; None is any number."""
        ...

    @property
    def draft_tokens(self) -> int:
        """Draft tokens per sequence and step; 0 without speculation."""
        ...

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        ...

    @property
    def recurrent(self) -> bool:
        """Whether layers keep a state that cannot go back: no prefix caching, no drafts."""
        ...

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        ...

    @property
    def logit_columns(self) -> int:
        """Columns of the logits: the vocabulary, and what pads it."""
        ...

    @property
    def sampling_level(self) -> str:
        """The highest of `SAMPLING_LEVELS` that is served."""
        ...

    @property
    def penalties(self) -> bool:
        """Whether presence, frequency and repetition penalties are served."""
        ...

    @property
    def prompt_logprobs(self) -> bool:
        """Whether `ModelRunner.prompt_logprobs` is served."""
        ...

    @property
    def max_logprobs(self) -> int:
        """The most likely tokens that are reported beside a sampled one."""
        ...


class SampledRows(Protocol):
    """What a step sampled; log-probabilities are None where no row's level has them."""

    @property
    def token(self) -> np.ndarray:
        """int32 [rows]; -1 where the logits are no distribution."""
        ...

    @property
    def logprob(self) -> np.ndarray | None:
        """float32 [rows], of the tokens."""
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
    """A dispatched step, whose results can be read later."""

    def read(self) -> SampledRows:
        """Wait for the step, and return what its rows sampled."""
        ...

    def read_hidden(self) -> np.ndarray:
        """Wait for the step, and return the residual stream after the final norm, [tokens, hidden]; only where the step
        had `hidden` set."""
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
    """What a runner holds."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, adapters included, over all devices."""
        ...

    @property
    def kv_itemsize(self) -> float:
        """Bytes of one number of a cached key or value."""
        ...


class CompileStats(Protocol):
    """What was compiled so far."""

    @property
    def programs(self) -> int:
        """Programs that are there."""
        ...

    @property
    def recompiles(self) -> int:
        """Those of them that were compiled while serving."""
        ...

    @property
    def seconds(self) -> float:
        """Time that compiling took."""
        ...


class ProgramStats(Protocol):
    """One compiled program."""

    @property
    def name(self) -> str:
        """What tables call it."""
        ...

    @property
    def peak_bytes(self) -> int | None:
        """The most that it takes on a device; None where the compiler does not say."""
        ...

    @property
    def seconds(self) -> float:
        """Time that compiling or loading it took."""
        ...


class Devices(Protocol):
    """What a runner runs on."""

    @property
    def kind(self) -> str:
        """As the hardware calls itself."""
        ...

    @property
    def platform(self) -> str:
        """Such as tpu or cpu."""
        ...

    @property
    def count(self) -> int:
        """Devices over which the model is sharded."""
        ...


class AdapterSlots(Protocol):
    """Room for LoRA adapters beside the weights, for a fixed number of them."""

    @property
    def names(self) -> Mapping[str, int]:
        """Loaded adapters, each with its number, from 1 on."""
        ...

    def salt(self, name: str) -> bytes:
        """Sets prefixes of this adapter apart from all others, also from an earlier adapter of its name."""
        ...

    def check(self, weights: AdapterWeights) -> Any:
        """What `load` takes, from an adapter's weights; may run in another thread than the engine's.

        Raises:
            MappingError, UnsupportedError: another model's adapter, or one that is not served.
        """
        ...

    def load(self, name: str, checked: Any, busy: Collection[int]) -> None:
        """Load an adapter, in place of one of the same name; `busy` are numbers that requests still use.

        Raises:
            RequestError: no room, or a rank above what there is room for.
        """
        ...

    def unload(self, name: str) -> None:
        """Forget an adapter; requests that use it finish with it."""
        ...


class ModelRunner(Protocol):
    """A model's side of an engine: weights, pages, programs.

    Its life: made by a backend (`ttpu_core.backend.Serves.model_runner`), `allocate`, `compile`, then steps; `sleep`
    and `wake_up` in between; `release` at the end. Steps are dispatched in order, computed in order, and may be read
    later. """

    @property
    def limits(self) -> RunnerLimits:
        """What it was built for."""
        ...

    @property
    def spec(self) -> ArchitectureSpec | None:
        """The model as data, for formulas of FLOPs and bytes; None for a model that is not described so."""
        ...

    @property
    def devices(self) -> Devices:
        """What it runs on."""
        ...

    @property
    def page_groups(self) -> Sequence[LayerGroup]:
        """Its page groups, in the order of `RunnerStep.tables`; the largest comes first."""
        ...

    @property
    def num_pages(self) -> tuple[int, ...]:
        """Pages of each group, `NULL_PAGE` included, once `allocate` has made them."""
        ...

    @property
    def adapters(self) -> AdapterSlots | None:
        """Its LoRA adapters; None where it was built without room for any."""
        ...

    def allocate(self, num_pages: Sequence[int] | None = None, *, draft: ModelRunner | None = None) -> None:
        """Make the pages.

        Args:
            num_pages: per group, with `NULL_PAGE`; None takes what the settings say, or fills the free memory.
            draft: a runner on the same devices, not yet allocated, that gets as many pages per group as the largest
                group here: both have to fit.

        Raises:
            RequestError: not even one sequence of `max_model_len` tokens fits.
        """
        ...

    def compile(self, progress: OnProgress | None = None) -> None:
        """Compile every program that serving needs; what is compiled after it counts as a recompilation."""
        ...

    def dispatch(self, step: RunnerStep) -> InFlight:
        """Begin a step and return at once. Whatever it raises, an equal step may be dispatched again."""
        ...

    def prompt_logprobs(self, step: InFlight, targets: np.ndarray) -> TokenLogprobs:
        """Log-probabilities of `targets` [tokens], each given the dispatched step's token of the same index."""
        ...

    def length_salt(self, prompt_length: int) -> bytes:
        """Sets a prompt of this length apart from prompts that begin alike, where keys depend on the whole length (some
        ropes); b"" where they do not."""
        ...

    def sleep(self) -> None:
        """Give the devices' memory back: weights go to the host, pages are dropped."""
        ...

    def wake_up(self) -> None:
        """Undo `sleep`, with empty pages."""
        ...

    def weight_update(self, weights: str | Path | Mapping[str, Any]) -> AbstractContextManager[Callable[[], None]]:
        """Check new weights, and give what puts them in the old ones' place, awake or asleep.

        Args:
            weights: a directory of safetensors files, or tensor name, as transformers saves it → array.

        Raises:
            RequestError, MappingError, CheckpointError: what does not fit, before anything is replaced.
        """
        ...

    def compile_stats(self) -> CompileStats:
        """What was compiled so far; cheap, as it is asked for with every metrics page."""
        ...

    def program_stats(self) -> Sequence[ProgramStats]:
        """Every compiled program, those that need the most memory first."""
        ...

    def memory_stats(self) -> MemoryStats:
        """What it holds."""
        ...

    def release(self) -> None:
        """Give the pages' memory back for good."""
        ...


class ServedModel(Protocol):
    """A loaded model, as far as an engine reads it."""

    @property
    def name(self) -> str:
        """What the checkpoint is called."""
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
        """The tokens that end a sequence."""
        ...

    @property
    def spec(self) -> ArchitectureSpec:
        """The architecture as data, unpadded."""
        ...


class ServingBackend(Protocol):
    """`ttpu_core.backend.Serves` with this module's types."""

    name: str

    @property
    def options(self) -> type[LoadOptions]: ...

    def model_runner(
        self, model: Any, config: EngineConfig, adapters: Mapping[str, AdapterWeights] | None = None
    ) -> ModelRunner:
        """A runner for a loaded model, without pages and programs."""
        ...

    def options_beside(self, model: Any) -> LoadOptions:
        """Loading options for a second model on the same devices."""
        ...

    def keep_compiled(self) -> Path | None:
        """Keep compiled programs between runs, unless the user wants none; their folder."""
        ...
