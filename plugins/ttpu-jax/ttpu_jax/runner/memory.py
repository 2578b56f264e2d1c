"""Computes how many pages fit on a device, from its memory and the memory that weights and steps need. On accelerators
these are measured after the weights are loaded and the largest step is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from ttpu_core.cli.console import in_bytes
from ttpu_core.errors import RequestError
from ttpu_jax.model.paged import PagedLayout

if TYPE_CHECKING:
    from ttpu_serve.api.engine_config import EngineConfig

GIB = 2**30
HOST_SHARE = 0.25
"""Of the host's free memory, what pages may take on a CPU, which other programs use too."""
MARGIN = 128 * 2**20
"""Bytes of each device that are left alone: the runtime's own, and transfers."""
WINDOW_SHARE = 0.5
"""Of the memory for pages, what windows may take where sequences that all are as long as they may be need less."""


def free_bytes(device: jax.Device, reserved: int, share: float | None = None) -> int:
    """Bytes for pages on this device; `reserved` as `reserved_bytes` has it. `share` of what is free; None takes all of
    an accelerator's, and `HOST_SHARE` of a host's."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        free = int(stats["bytes_limit"] - stats["bytes_in_use"]) - reserved - MARGIN
        return free if share is None else int(free * share)
    return int(_host_free() * (HOST_SHARE if share is None else share))


def pages_per_group(
    config: EngineConfig, layout: PagedLayout, page_bytes: Sequence[int], free: int | None
) -> tuple[int, ...]:
    """Return the number of pages of each group, the null page included, that fill `free` bytes.

    Groups with a window or a chunk have pages for the windows of as many running sequences as can be, and for one step;
    those that keep everything have the rest. `free` None takes `config.num_pages` for the largest group.

    Raises:
        RequestError: not even one sequence of `max_model_len` tokens fits.
    """
    spans = tuple(group.window or group.chunk for group in layout.groups)
    if not spans:
        return ()
    demand = Demand(
        spans,
        config.page_size or 1,
        config.max_model_len or 1,
        config.max_num_seqs or 1,
        config.max_num_batched_tokens or 1,
    )
    if config.num_pages is not None:
        most = demand.counts(demand.sequences, demand.whole * demand.sequences)
        counts = [min(config.num_pages, count + 1) for count in most]
        counts[0] = config.num_pages
        return tuple(max(count, 2) for count in counts)
    assert free is not None
    smallest = _bytes(demand.counts(1, demand.whole), page_bytes)
    if smallest > free:
        given = config.kv_cache_memory is not None
        found = f"kv_cache_memory is {_size(free)}: raise it, " if given else f"{_size(max(free, 0))} are free: "
        raise RequestError(
            f"one sequence of {demand.length:,} tokens needs {_size(smallest)} for its keys and values on each device, "
            f"but {found}{_advice(demand, page_bytes, free)}use more devices, or a smaller kv_cache_dtype."
        )
    return tuple(count + 1 for count in _shared_out(demand, page_bytes, free))


@dataclass(frozen=True)
class Demand:
    """The pages that sequences need. `spans` are each group's window or chunk in tokens, None for groups that keep
    everything; a sequence has at most `length` tokens, a step at most `step`."""

    spans: tuple[int | None, ...]
    page_size: int
    length: int
    sequences: int
    step: int

    @property
    def whole(self) -> int:
        """The number of pages of the longest sequence."""
        return self.blocks(self.length)

    def blocks(self, tokens: int) -> int:
        """Return the number of pages for `tokens` tokens."""
        return -(-tokens // self.page_size)

    def counts(self, running: int, full: int) -> list[int]:
        """Pages of each group: `full` where everything is kept, elsewhere those of the windows of `running` sequences,
        each of which may begin inside a page, and of a step's tokens."""
        return [full if span is None else self._of_windows(span, running) for span in self.spans]

    def _of_windows(self, span: int, running: int) -> int:
        one = min(self.whole, self.blocks(span) + 1)
        return min(self.whole * running, one * running + self.blocks(self.step))


def _shared_out(demand: Demand, page_bytes: Sequence[int], free: int) -> list[int]:
    """Pages of each group where the least fits.

    How long sequences will be is not known. Where all are as long as they may be, few run, and few windows are enough;
    where they are short, as many run as have windows. Windows are therefore given what those few need, or up to half of
    the memory: whatever comes, about half as many run as could if all of the memory was shared out for it."""
    limited = [size if span is not None else 0 for span, size in zip(demand.spans, page_bytes, strict=True)]
    each_full = sum(page_bytes) - sum(limited)

    def full_beside(running: int) -> int:
        """Pages that are left for each group that keeps everything."""
        left = free - _bytes(demand.counts(running, 0), page_bytes)
        return min(left // each_full, demand.whole * demand.sequences) if each_full else demand.whole

    def is_well(running: int) -> bool:
        full = full_beside(running)
        counts = demand.counts(running, full)
        if _bytes(counts, page_bytes) > free or full < demand.whole:
            return False
        # Sequences never hold more pages of a window than of everything.
        return (
            not each_full
            or full >= demand.whole * running
            or (_bytes(counts, limited) <= free * WINDOW_SHARE and max(counts) == full)
        )

    low, high = 1, demand.sequences
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_well(middle) else (low, middle - 1)
    return demand.counts(low, full_beside(low))


def _advice(demand: Demand, page_bytes: Sequence[int], free: int) -> str:
    """The longest sequence that fits, if any does."""
    low, high = 0, demand.whole
    while low < high:
        middle = (low + high + 1) // 2
        shorter = replace(demand, length=middle * demand.page_size)
        fits = _bytes(shorter.counts(1, shorter.whole), page_bytes) <= free
        low, high = (middle, high) if fits else (low, middle - 1)
    return f"set max_model_len to {low * demand.page_size:,} or less, " if low else ""


def _size(number: int) -> str:
    """A size in words, in GiB with two decimals or in the smaller unit that suits it."""
    return f"{number / GIB:.2f} GiB" if number >= GIB else in_bytes(number)


def _bytes(counts: Sequence[int], page_bytes: Sequence[int]) -> int:
    """Of so many pages of each group, and the null page."""
    return sum((count + 1) * size for count, size in zip(counts, page_bytes, strict=True))


def _host_free() -> int:
    """Bytes of the host's memory that programs may still take."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4 * GIB
