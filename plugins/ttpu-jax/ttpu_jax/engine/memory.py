"""How many pages there is room for. In: what a device has, holds and needs while a step runs; out: pages per group. On
accelerators all of that is measured, after the weights are loaded and the largest step is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from ttpu_core.errors import RequestError
from ttpu_jax.engine.config import EngineConfig
from ttpu_jax.model.paged import PagedLayout

GIB = 2**30
HOST_SHARE = 0.25
"""Of the host's free memory, what pages may take on a CPU, which other programs use too."""
MARGIN = 128 * 2**20
"""Bytes of each device that are left alone: the runtime's own, and transfers."""


def free_bytes(device: jax.Device, needed_by_programs: int) -> int:
    """Bytes for pages on this device; `needed_by_programs` are the temporaries of its largest program."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"] - stats["bytes_in_use"]) - needed_by_programs - MARGIN
    return int(_host_free() * HOST_SHARE)


def pages_per_group(
    config: EngineConfig, layout: PagedLayout, page_bytes: Sequence[int], free: int | None
) -> tuple[int, ...]:
    """Pages of each group, with the page that is nobody's: as many sequences of one length as `free` bytes hold.

    A group with a window needs, for each running sequence, the pages of the window and of one step, whatever the
    length; the rest goes to groups that keep everything. `free` None takes `config.num_pages` for the largest group.

    Raises:
        RequestError: not even one sequence of `max_model_len` tokens fits.
    """
    spans = tuple(group.window or group.chunk for group in layout.groups)
    if not spans:
        return ()
    demand = _Demand(
        spans,
        config.page_size or 1,
        config.max_model_len or 1,
        config.max_num_seqs or 1,
        config.max_num_batched_tokens or 1,
    )
    if config.num_pages is not None:
        most = demand.counts(demand.whole * demand.sequences)
        counts = [min(config.num_pages, count + 1) for count in most]
        counts[0] = config.num_pages
        return tuple(max(count, 2) for count in counts)
    assert free is not None
    length = demand.length
    smallest = _bytes(demand.counts(demand.whole), page_bytes)
    if smallest > free:
        fits = max(0, int(length * free / max(smallest, 1)))
        raise RequestError(
            f"one sequence of {length:,} tokens needs {smallest / GIB:.2f} GiB for its keys and values on each device, "
            f"but {max(free, 0) / GIB:.2f} GiB are free: set max_model_len to about {fits:,}, use more devices, or a "
            "smaller kv_cache_dtype."
        )
    low, high = demand.whole, demand.whole * demand.sequences
    while low < high:
        middle = (low + high + 1) // 2
        if _bytes(demand.counts(middle), page_bytes) <= free:
            low = middle
        else:
            high = middle - 1
    return tuple(count + 1 for count in demand.counts(low))


@dataclass(frozen=True)
class _Demand:
    """What sequences need of each group: `spans` are windows and chunks in tokens, None for groups that keep
    everything; a sequence has at most `length` tokens, a step `step` of them."""

    spans: tuple[int | None, ...]
    page_size: int
    length: int
    sequences: int
    step: int

    @property
    def whole(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.length // self.page_size)

    def counts(self, pages: int) -> list[int]:
        """Pages of each group where those that keep everything have `pages`: a window of each sequence that could then
        run, and one of the longest in any case."""
        return [pages if span is None else self._of_window(span, pages) for span in self.spans]

    def _of_window(self, span: int, pages: int) -> int:
        one = min(self.whole, -(-(span + self.step) // self.page_size) + 1)
        return max(one, min(one * self.sequences, pages))


def _bytes(counts: Sequence[int], page_bytes: Sequence[int]) -> int:
    """Of so many pages of each group, and the one that is nobody's."""
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
