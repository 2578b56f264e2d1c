"""The page pool of one group: reference counts, lookup of full pages by hash, and LRU eviction. It handles page numbers
only; the contents are on the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from ttpu_serve.runner import NULL_PAGE


class BlockPool:
    """Pages 1 to num_pages - 1 (`NULL_PAGE` is the null page). A page is free, held by `refs[page]` sequences, or idle:
    held by none, but cached under its hash until it is evicted (least recently used first)."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.refs = [0] * num_pages
        self.cached: dict[bytes, int] = {}
        self._hashes: list[bytes | None] = [None] * num_pages
        self._free = [page for page in range(num_pages - 1, -1, -1) if page != NULL_PAGE]
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest first

    @property
    def available(self) -> int:
        """Pages that can be taken now."""
        return len(self._free) + len(self._idle)

    @property
    def in_use(self) -> int:
        """Pages that sequences hold."""
        return self.num_pages - 1 - self.available

    def take(self, count: int) -> list[int]:
        """Take `count` pages with one reference each, evicting the least recently used idle pages if too few are free.
        The caller has checked `available`."""
        free = self._free
        while len(free) < count:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
            free.append(page)
        pages = free[len(free) - count :]
        del free[len(free) - count :]
        for page in pages:
            self.refs[page] = 1
        return pages

    def share(self, page: int) -> None:
        """Add a reference to a cached page."""
        if self.refs[page] == 0:
            del self._idle[page]
        self.refs[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference of each page. Pages that become idle are evicted in the given order."""
        for page in pages:
            self.refs[page] -= 1
            if self.refs[page] == 0:
                if self._hashes[page] is None:
                    self._free.append(page)
                else:
                    self._idle[page] = None

    def register(self, page: int, digest: bytes) -> None:
        """Cache a held, full page under `digest`, unless another page with the same content is cached."""
        if digest not in self.cached and self._hashes[page] is None:
            self.cached[digest] = page
            self._hashes[page] = digest

    def reset(self) -> None:
        """Drop all cached pages; pages in use stay with their holders."""
        self._hashes = [None] * self.num_pages
        self.cached.clear()
        self._free.extend(self._idle)
        self._idle.clear()

    def _forget(self, page: int) -> None:
        digest = self._hashes[page]
        assert digest is not None
        del self.cached[digest]
        self._hashes[page] = None
