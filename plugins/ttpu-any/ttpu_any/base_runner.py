"""What the runners of stock models share: programs, weights that can sleep, and pages that are only counted. Each page
holds a whole sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np

from ttpu_core.errors import RequestError
from ttpu_jax.params.placement import Placement
from ttpu_jax.runner.compilation import CompileStats, OnProgress, Program, ProgramPool, ProgramStats, program_stats
from ttpu_jax.runner.compilation_cache import keep_compiled
from ttpu_jax.runner.stats import Devices, Limits

if TYPE_CHECKING:
    from ttpu_serve.api.engine_config import EngineConfig
    from ttpu_serve.runner import InFlight, ModelRunner

SMALLEST_WIDTH = 16
"""Tokens of the shortest program that reads prompts."""
SEQUENCES = {"cpu": 8}
OTHER_SEQUENCES = 32
"""Requests that run at once where nothing is said and memory suffices, by platform."""
PAGES_PER_SLOT = 2
"""The engine counts pages, and keeps one free for each running request."""


@dataclass(frozen=True)
class OneGroup:
    """The page group of all layers: each keeps everything."""

    name: str = "slots"
    window: None = None
    chunk: None = None


class BaseRunner:
    """The device side of an engine for a stock model; subclasses compute its steps.

    Attributes:
        limits: see `ttpu_serve.runner.RunnerLimits`.
        num_pages: that the engine counts.
    """

    spec = None
    adapters = None
    num_pages: tuple[int, ...] = ()
    limits: Limits

    def __init__(self, params: dict[str, jax.Array], placement: Placement, config: EngineConfig) -> None:
        """
        Args:
            params: name → array.
            placement: of the model.
            config: the engine's settings, as the caller gave them.

        Raises:
            RequestError: settings that need pages.
        """
        refuse_pages(config)
        self.params, self.placement, self.config = params, placement, config
        self.pool = ProgramPool(strict=config.strict_compile, platform=placement.platform)
        self._asleep: dict[str, np.ndarray] = {}
        self._shardings: dict[str, Any] = {}

    @property
    def page_groups(self) -> Sequence[OneGroup]:
        """One group."""
        return (OneGroup(),)

    @property
    def devices(self) -> Devices:
        """The devices that the model runs on."""
        return Devices.of(self.placement)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(array.nbytes for array in self.params.values())

    def compile_stats(self) -> CompileStats:
        """The statistics of all compilations so far."""
        return self.pool.stats()

    def program_stats(self) -> Sequence[ProgramStats]:
        """Every compiled program, those that need the most memory first."""
        found = program_stats(self.pool, self.pool.keys)
        return sorted(found, key=lambda each: -(each.peak_bytes or 0))

    def allocate(self, num_pages: Sequence[int] | None = None, *, draft: ModelRunner | None = None) -> None:
        """Make room for all sequences. `num_pages`: not used; a draft is never given."""
        assert draft is None
        self.num_pages = (PAGES_PER_SLOT * self.limits.max_num_seqs + 1,)

    def compile(self, progress: OnProgress | None = None) -> None:
        """Trace and compile every program that serving needs. Later compilations count as compiled while serving."""
        keep_compiled()
        self.pool.compile(self.programs_ahead(), progress)
        self.pool.serving = True

    def programs_ahead(self) -> Iterable[Program]:
        """Every program that serving needs."""
        raise NotImplementedError

    def release(self) -> None:
        """Free the memory of what `allocate` made."""

    def sleep(self) -> None:
        """Move the weights to the host and free the rest."""
        self._asleep = {name: np.asarray(array) for name, array in self.params.items()}
        self._shardings = {name: array.sharding for name, array in self.params.items()}
        for array in self.params.values():
            array.delete()
        self.release()

    def wake_up(self) -> None:
        """Undo `sleep`."""
        self.params.update({name: jax.device_put(each, self._shardings[name]) for name, each in self._asleep.items()})
        self._asleep = {}
        self.allocate()

    def weight_update(self, weights: str | Path | Mapping[str, Any]) -> AbstractContextManager[Callable[[], None]]:
        """Refused: the engine would need the names of a family's mapping.

        Raises:
            RequestError: always.
        """
        refuse("new weights were given while serving")

    def length_salt(self, prompt_length: int) -> bytes:
        """Nothing: prefixes are not cached."""
        return b""

    def prompt_logprobs(self, step: InFlight, targets: np.ndarray) -> NoReturn:
        """Refused, for targets [tokens]: `limits` says so.

        Raises:
            RequestError: always.
        """
        refuse("log-probabilities of a prompt were asked for")

    def abstract_params(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The model's tensors by name: shapes, dtypes and shardings."""
        return {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
            for name, array in self.params.items()
        }


def default_sequences(platform: str) -> int:
    """Requests that run at once where nothing is said."""
    return SEQUENCES.get(platform, OTHER_SEQUENCES)


def widths_of(length: int, asked: Sequence[int] | None) -> tuple[int, ...]:
    """The lengths that prompts are padded to: powers of two, or those that were asked for, and the longest."""
    if asked is not None:
        return tuple(sorted({*(size for size in asked if size < length), length}))
    sizes = [SMALLEST_WIDTH]
    while sizes[-1] * 2 < length:
        sizes.append(sizes[-1] * 2)
    return tuple(sorted({*(size for size in sizes if size < length), length}))


def refuse_pages(config: EngineConfig) -> None:
    """Refuse settings that need pages.

    Raises:
        RequestError: one is given.
    """
    given = {
        "speculative": config.speculative,
        "adapters": config.adapters or config.max_adapters,
        "page_size": config.page_size,
        "num_pages": config.num_pages,
        "kv_cache_dtype": None if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        "sequence_buckets": config.sequence_buckets,
    }
    for name, value in given.items():
        if value is not None:
            refuse(f"{name}={value!r} was given")


def refuse(asked: str) -> NoReturn:
    """Refuse what a model without a plugin lacks in serving.

    Raises:
        RequestError: always.
    """
    raise RequestError(
        f"{asked}, but no plugin describes this model: transformers' own code serves it, without pages, drafts and "
        "adapters, and what it keeps of a request has the model's dtype. Leave it out, or begin a plugin with `ttpu "
        "new-plugin --from CONFIG`."
    )
