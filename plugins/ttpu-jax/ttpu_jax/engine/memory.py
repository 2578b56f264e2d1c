"""How many pages there is room for. In: what a device has, holds and needs while a step runs; out: pages per group. On
accelerators all of that is measured, after the weights are loaded and the largest step is compiled."""

from __future__ import annotations

from collections.abc import Sequence

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
    config: EngineConfig, layout: PagedLayout, page_bytes: Sequence[int], free: int | None, most: int | None = None
) -> tuple[int, ...]:
    """Pages of each group, with the page that is nobody's: as many sequences of one length as `free` bytes hold.

    A group with a window needs, for each running sequence, the pages of the window and of one step, whatever the
    length; the rest goes to groups that keep everything. `free` None takes `config.num_pages` for the largest group.

    Raises:
        RequestError: not even one sequence of `max_model_len` tokens fits.
    """
    size, length, sequences = config.page_size or 1, config.max_model_len or 1, config.max_num_seqs or 1
    whole = -(-length // size)

    def needed(group_span: int | None, tokens: int) -> int:
        pages = -(-tokens // size)
        if group_span is None:
            return pages
        return min(pages, -(-(group_span + (config.max_num_batched_tokens or 1)) // size) + 1)

    spans = [group.window or group.chunk for group in layout.groups]
    if not spans:
        return ()
    if config.num_pages is not None:
        counts = [min(config.num_pages, max(needed(span, length) * sequences + 1, 2)) for span in spans]
        if spans[0] is None or len(spans) == 1:
            counts[0] = config.num_pages
    else:
        assert free is not None
        one = [needed(span, length) for span in spans]
        smallest = sum(count * size_of for count, size_of in zip(one, page_bytes, strict=True))
        if smallest + sum(page_bytes) > free:
            fits = max(0, int(length * (free - sum(page_bytes)) / max(smallest, 1)))
            raise RequestError(
                f"one sequence of {length:,} tokens needs {smallest / GIB:.2f} GiB for its keys and values on each device, "
                f"but {max(free, 0) / GIB:.2f} GiB are free: set max_model_len to about {fits:,}, use more devices, or a "
                "smaller kv_cache_dtype."
            )
        # As many sequences as fit if all had one length: windows bind little, so they are given what they can use.
        low, high = 1, whole * sequences
        while low < high:
            middle = (low + high + 1) // 2
            if _total(middle, whole, sequences, size, spans, page_bytes, needed) <= free:
                low = middle
            else:
                high = middle - 1
        counts = [count + 1 for count in _counts(low, whole, sequences, size, spans, needed)]
    return tuple(max(count, 2) for count in counts)


def _counts(pages, whole, sequences, size, spans, needed):  # type: ignore[no-untyped-def]
    """Pages of each group where the groups that keep everything have `pages`."""
    running = max(1, min(sequences, pages))
    tokens = min(whole, max(1, pages)) * size
    return [pages if span is None else max(needed(span, tokens), min(needed(span, tokens) * running, pages)) for span in spans]


def _total(pages, whole, sequences, size, spans, page_bytes, needed):  # type: ignore[no-untyped-def]
    counts = _counts(pages, whole, sequences, size, spans, needed)
    return sum((count + 1) * each for count, each in zip(counts, page_bytes, strict=True))


def _host_free() -> int:
    """Bytes of the host's memory that programs may still take."""
    try:
        with open("/proc/meminfo") as file:  # noqa: PTH123
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4 * GIB
