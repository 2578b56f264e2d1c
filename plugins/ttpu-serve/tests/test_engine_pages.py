"""Pages and block tables: who holds what, what can be found again, and what is given back."""

from __future__ import annotations

import numpy as np
import pytest

from ttpu_core.errors import RequestError
from ttpu_core.generation.sampling_params import SamplingParams
from ttpu_serve.scheduling.block_pool import BlockPool
from ttpu_serve.scheduling.block_table import BlockTables, PageGroup
from ttpu_serve.scheduling.prefix_cache import extend_hashes
from ttpu_serve.scheduling.request import Request

HASHES = [bytes([number]) * 16 for number in range(12)]
NOBODY = [0, 0]


def hybrid(pages: int = 20) -> BlockTables:
    """Two rows of twelve pages of four tokens, in a group that sees all and one that sees ten positions."""
    return BlockTables([PageGroup("full", pages), PageGroup("window", pages, window=10)], 2, 48, 4)


def fill(tables: BlockTables, slot: int, tokens: int) -> None:
    """A row whose full pages are registered."""
    tables.admit(slot, [], tokens)
    tables.extend(slot, tokens)
    tables.register(slot, HASHES, tokens // 4)


# pools


def test_a_pool_gives_every_page_but_the_one_that_is_nobodys() -> None:
    pool = BlockPool(5)
    assert sorted(pool.take(4)) == [1, 2, 3, 4] and pool.available == 0 and pool.in_use == 4


def test_a_shared_page_is_free_when_its_last_holder_releases_it() -> None:
    pool = BlockPool(3)
    (page,) = pool.take(1)
    pool.register(page, HASHES[0])
    pool.share(page)
    pool.release([page])
    assert pool.in_use == 1
    pool.release([page])
    assert pool.in_use == 0 and pool.cached == {HASHES[0]: page}


def test_free_pages_are_taken_before_cached_ones_and_the_longest_unused_is_forgotten_first() -> None:
    pool = BlockPool(5)
    pages = pool.take(3)
    for page, digest in zip(pages, HASHES, strict=False):
        pool.register(page, digest)
    pool.release([pages[1]])
    pool.release([pages[0]])
    pool.release([pages[2]])
    assert pool.take(1)[0] not in pages
    pool.share(pages[1])  # used again, so that the next is the longest unused
    pool.release([pages[1]])
    assert pool.take(2) == [pages[0], pages[2]]
    assert list(pool.cached) == [HASHES[1]]


def test_a_page_with_known_content_is_found_under_its_first_page_alone() -> None:
    pool = BlockPool(4)
    first, second = pool.take(2)
    pool.register(first, HASHES[0])
    pool.register(second, HASHES[0])
    pool.release([second])
    assert pool.cached == {HASHES[0]: first} and pool.take(1) == [second]


def test_a_reset_forgets_content_but_takes_no_page_from_its_holder() -> None:
    pool = BlockPool(4)
    held, idle = pool.take(2)
    pool.register(held, HASHES[0])
    pool.register(idle, HASHES[1])
    pool.release([idle])
    pool.reset()
    assert not pool.cached and pool.in_use == 1 and held not in pool.take(2)


# hashes


def hashes_of(prompt: list[int], pages: int, salt: bytes = b"", known: list[bytes] | None = None) -> list[bytes]:
    request = Request("a", prompt, SamplingParams(), salt=salt)
    hashes = list(known or [])
    extend_hashes(hashes, request, pages, 4)
    return hashes


def test_a_pages_hash_tells_all_tokens_up_to_its_end_and_the_salt() -> None:
    prompt = list(range(12))
    whole = hashes_of(prompt, 3)
    assert len(set(whole)) == 3 and hashes_of(prompt, 3, known=whole[:1]) == whole
    assert hashes_of([*prompt[:8], 1, 1, 1, 1], 3)[:2] == whole[:2]
    changed = hashes_of([5, *prompt[1:]], 3)
    assert not set(changed) & set(whole), "a page after another beginning holds other keys"
    assert not set(hashes_of(prompt, 3, b"salt")) & set(whole)


# tables


def test_tables_name_the_pages_of_the_positions_in_order() -> None:
    tables = hybrid()
    tables.admit(1, [], 9)
    tables.extend(1, 9)
    full, window = tables.tables
    assert full.dtype == np.int32 and full.shape == (2, 12)
    assert len(set(full[1, :3].tolist())) == 3 and (full[1, :3] > 0).all() and not full[1, 3:].any()
    assert (window[1, :3] > 0).all() and not full[0].any()
    assert tables.pages_in_use == (3, 3)


def test_pages_for_the_whole_prompt_are_set_aside_where_all_is_seen() -> None:
    tables = hybrid()
    tables.admit(0, [], 40)
    assert tables.pages_in_use == (10, 0)


@pytest.mark.parametrize("position, kept", [(9, 0), (12, 0), (13, 1), (17, 2), (40, 7)])
def test_pages_wholly_behind_the_window_are_given_back(position: int, kept: int) -> None:
    tables = hybrid()
    fill(tables, 0, 44)
    tables.trim(np.array([0]), np.array([position]))
    assert not tables.tables[1][0, :kept].any() and tables.tables[1][0, kept:11].all()
    assert tables.tables[0][0, :11].all() and tables.pages_in_use == (11, 11 - kept)


def test_pages_behind_the_chunk_are_given_back_when_the_next_chunk_begins() -> None:
    tables = BlockTables([PageGroup("chunk", 20, chunk=10)], 1, 48, 4)
    tables.extend(0, 24)
    for position, kept in ((9, 0), (10, 2), (19, 2), (20, 5)):
        tables.trim(np.array([0]), np.array([position]))
        assert np.flatnonzero(tables.tables[0][0]).tolist() == list(range(kept, 6))


def test_rows_are_extended_together_where_they_lack_a_page() -> None:
    tables = hybrid()
    for slot, tokens in ((0, 8), (1, 9)):
        tables.admit(slot, [], tokens)
        tables.extend(slot, tokens)
    slots, positions = np.array([0, 1]), np.array([8, 9])
    assert tables.lacking(slots, positions).tolist() == [0]
    tables.extend_by_one(slots, positions)
    assert tables.pages_in_use == (6, 6) and not len(tables.lacking(slots, positions))


def test_the_capacity_of_a_row_is_bound_by_the_scarcest_group_and_the_context() -> None:
    tables = BlockTables([PageGroup("full", 9), PageGroup("window", 5, window=10)], 1, 24, 4)
    assert tables.capacity(0) == 16 and tables.capacity(0, [0, 2]) == 8 and tables.capacity(0, [9, 9]) == 0
    assert BlockTables([PageGroup("full", 9)], 1, 24, 4).capacity(0) == 24


def test_a_released_row_is_empty_and_its_prefix_forgotten_from_the_end() -> None:
    tables = hybrid(pages=7)
    fill(tables, 0, 24)
    tables.release(0)
    assert not tables.tables[0].any() and tables.pages_in_use == (0, 0) and tables.pages_cached == (6, 6)
    tables.extend(1, 8)
    assert tables.match(HASHES[:6]) == 4


# prefixes


def test_a_prefix_is_matched_up_to_the_first_page_that_is_not_cached() -> None:
    tables = hybrid()
    fill(tables, 0, 26)
    assert tables.match(HASHES[:6]) == 6 and tables.match([*HASHES[:3], b"other", *HASHES[4:6]]) == 3
    assert tables.match([]) == 0 and tables.match([b"other"]) == 0


def test_a_window_matches_where_the_pages_inside_it_are_cached() -> None:
    tables = hybrid()
    fill(tables, 0, 44)
    window = tables.pools[1]
    for page in (0, 1, 5):  # the token at position 40 sees 31 to 40: pages 7 to 9
        del window.cached[HASHES[page]]
    assert tables.match(HASHES[:10]) == 10
    assert tables.match(HASHES[:8]) == 5  # without page 5; the token at position 20 sees pages 2 to 4
    assert tables.match(HASHES[:4]) == 0  # the token at position 16 sees page 1


def test_pages_that_are_found_are_shared_and_those_before_the_window_left_out() -> None:
    tables = hybrid()
    fill(tables, 0, 44)
    tables.admit(1, HASHES[:10], 45)
    full, window = tables.tables
    assert (
        full[1, :10].tolist() == full[0, :10].tolist() and len({*full[0, :11].tolist(), *full[1, :12].tolist()}) == 13
    )
    assert window[1].tolist() == [*[0] * 7, *window[0, 7:10].tolist(), 0, 0]
    assert tables.pages_in_use == (13, 11)


def test_pages_found_idle_count_against_what_a_request_may_take() -> None:
    tables = hybrid(pages=13)
    fill(tables, 0, 40)
    tables.release(0)
    found = HASHES[:10]
    assert tables.fits(found, 48, NOBODY, whole=False) and not tables.fits(found, 48, [1, 0], whole=False)
    assert tables.fits(found, 48, [0, 7], whole=False)  # its window of ten positions takes four pages at most
    assert not tables.fits(found, 48, [0, 9], whole=False) and tables.fits([], 48, NOBODY, whole=True)


@pytest.mark.parametrize(
    "span, tokens, pages", [(1, 48, 1), (2, 48, 2), (5, 48, 2), (6, 48, 3), (10, 48, 4), (10, 8, 2)]
)
def test_one_sequence_goes_on_with_the_pages_that_one_token_can_see(span: int, tokens: int, pages: int) -> None:
    tables = BlockTables([PageGroup("window", 20, window=span)], 1, 48, 4)
    assert tables.blocks_needed(0, tokens, whole=False) == pages
    assert tables.blocks_needed(0, tokens, whole=True) == tokens // 4
    touched = [len({seen // 4 for seen in range(max(end - span, 0), end)}) for end in range(1, tokens + 1)]
    assert max(touched) == pages


@pytest.mark.parametrize(
    "values, message",
    [
        ({"num_pages": 1}, "'g' has 1 pages, but one is kept for padding"),
        ({"num_pages": 4, "window": 4, "chunk": 4}, "a window and a chunk"),
        ({"num_pages": 4, "window": 0}, "window 0"),
    ],
)
def test_groups_that_make_no_sense_are_refused(values: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        PageGroup("g", **values)
