"""Rows hold whole sequences, none twice and none left out, whatever the order."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
from data_cases import sequences_in, token_file

from ttpu_core.errors import DataError, RequestError
from ttpu_train.data.packing import RowPlanner, best_fit, permutation
from ttpu_train.data.settings import DataSettings
from ttpu_train.data.token_files import TokenFile

LENGTHS = np.random.default_rng(0).integers(2, 65, 200)


def rows_of(*files: TokenFile, epoch: int = 0, **settings: Any) -> list[tuple[list[int], list[float]]]:
    given = DataSettings(**settings)
    planner = RowPlanner(files, given)
    plan = planner.plan(epoch)
    return sequences_in(planner.batch(plan, 0, plan.rows, plan.rows))


@pytest.mark.parametrize("shuffle", [False, True])
def test_packed_sequences_are_the_unpacked_ones_token_for_token(shuffle: bool) -> None:
    file = token_file(*LENGTHS)
    packed = rows_of(file, max_length=64, packing=True, shuffle=shuffle)
    plain = rows_of(file, max_length=64, packing=False, shuffle=shuffle)
    assert sorted(packed) == sorted(plain)
    tokens = [token for sequence, _ in plain for token in sequence]
    assert sorted(tokens) == file.tokens.tolist()
    assert (tokens == file.tokens.tolist()) is not shuffle
    assert all(weights == [0.0] + [1.0] * (len(sequence) - 1) for sequence, weights in packed)


def test_best_fit_wastes_little() -> None:
    rows = best_fit(LENGTHS, 64)
    assert sorted(np.concatenate(rows).tolist()) == list(range(len(LENGTHS)))
    assert max(int(LENGTHS[row].sum()) for row in rows) <= 64
    least = -(-int(LENGTHS.sum()) // 64)
    assert (
        least <= len(rows) <= 11 / 9 * least + 6 / 9
    )  # the bound of D. S. Johnson's thesis (MIT, 1973), tight by Dosa
    assert [row.tolist() for row in best_fit(np.array([4, 3, 5, 1, 6]), 8)] == [[0], [1, 2], [3, 4]]


def test_long_text_is_split_so_that_each_token_is_predicted_once() -> None:
    found = rows_of(token_file(20, 8, 9), max_length=8, packing=True)
    predicted = Counter(
        token for tokens, weights in found for token, weight in zip(tokens, weights, strict=True) if weight
    )
    begin = {100, 120, 128}  # the first token of a document has nothing before it
    assert predicted == dict.fromkeys(set(range(100, 137)) - begin, 1)
    context = {tokens[0] for tokens, _ in found}
    assert context == begin | {107, 114, 135}  # parts begin with the last token of the part before


def test_long_conversations_are_cut_and_counted() -> None:
    with pytest.warns(UserWarning, match="1 conversations or completions have more than 8 tokens"):
        found = rows_of(token_file(20, 4, divisible=False), max_length=8, shuffle=False)
    assert [tokens for tokens, _ in found] == [list(range(100, 108)), list(range(120, 124))]
    assert len(rows_of(token_file(20, 4, divisible=False), max_length=8, overlong="split")) == 4
    with pytest.raises(DataError, match=r"document 0 .*20 tokens, but max_length is 8"):
        rows_of(token_file(20, 4), max_length=8, overlong="refuse")
    with pytest.raises(DataError, match="none has a token to be trained on"):
        rows_of(token_file(1, 1), max_length=8)


def test_sequences_without_weight_are_left_out() -> None:
    file = token_file(4, 12, 4, divisible=False)
    late = TokenFile(file.tokens, file.weights, file.offsets, np.array([1, 9, -1]), file.divisible, "late")
    with pytest.warns(UserWarning, match="max_length"):
        assert [tokens for tokens, _ in rows_of(late, max_length=8, shuffle=False)] == [[100, 101, 102, 103]]


def test_texts_have_no_assistant() -> None:
    with pytest.warns(UserWarning, match="assistant_only_loss was given, but it has no effect"):
        rows_of(token_file(4), max_length=8, assistant_only_loss=True)
    with warnings.catch_warnings(action="error"):
        rows_of(token_file(4), token_file(4, divisible=False), max_length=8, assistant_only_loss=True)


def test_parts_without_weight_are_left_out() -> None:
    file = token_file(20, 4, divisible=False)
    weights = np.ones(24, np.uint8)
    weights[:13] = 0  # a prompt of almost two parts, the second of which ends with the completion's beginning
    asked = TokenFile(file.tokens, weights, file.offsets, np.array([13, 1]), file.divisible, "asked")
    found = rows_of(asked, max_length=8, overlong="split", shuffle=False)
    assert [(tokens[0], sum(weights)) for tokens, weights in found] == [(107, 2.0), (114, 5.0), (120, 3.0)]


def test_a_mixture_has_its_shares_all_along_and_reads_long_sources_to_their_end() -> None:
    long, short = token_file(*[4] * 40), token_file(*[4] * 10, first=1000)
    seen = Counter[int]()
    for epoch in range(4):
        found = rows_of(long, short, epoch=epoch, max_length=8, mixture_weights=(1.0, 1.0))
        sources = [tokens[0] >= 1000 for tokens, _ in found]
        assert len(found) == 20
        assert all(sum(sources[start : start + 4]) == 2 for start in range(0, 20, 4))
        seen.update(tokens[0] for tokens, _ in found)
    assert all(seen[token] == 1 for token in range(100, 260, 4))
    assert all(seen[token] == 4 for token in range(1000, 1040, 4))
    assert len(rows_of(long, short, max_length=8)) == 50  # without weights: everything once
    with pytest.raises(RequestError, match="1 weights, but the dataset has 2 sources"):
        rows_of(long, short, mixture_weights=(1.0,))


def test_orders_do_not_depend_on_numpy_release() -> None:
    assert permutation(8, 42, 0).tolist() == PERMUTATION
    assert permutation(8, 42, 1).tolist() != PERMUTATION


PERMUTATION = [0, 1, 4, 2, 6, 5, 7, 3]  # argsort of Philox's raw bits, as of numpy 2.4
