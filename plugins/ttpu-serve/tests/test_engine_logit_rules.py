"""Biases, forbidden stop tokens, allowed tokens and bad words of one request, as the sampler's arrays."""

import itertools

import numpy as np
import pytest

from ttpu_core.errors import RequestError
from ttpu_core.generation.sampling_params import GuidedDecoding, SamplingParams
from ttpu_serve.execution.bad_words import BadWords, sequences_of
from ttpu_serve.execution.logit_rules import Rules, mask_of, mask_of_first, mask_words
from ttpu_serve.scheduling.request import Request

VOCAB, ROWS = 100, 130  # the model's logits are padded


def rules_of(*, stop_ids=(7,), **params):
    request = Request("r", [1], SamplingParams(**{"max_tokens": None, **params}), stop_ids=frozenset(stop_ids))
    return Rules.for_request(request, VOCAB, ROWS, BadWords(request.params.bad_words))


def left_out(mask):
    """The tokens that a mask forbids; none without a mask."""
    return set() if mask is None else set(range(ROWS)) - set(tokens_in(mask)) - set(range(VOCAB, ROWS))


def tokens_in(mask):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def as_dict(bias):
    assert bias is not None
    assert bias[0].dtype == np.int32 and bias[1].dtype == np.float32
    return dict(zip(bias[0].tolist(), bias[1].tolist(), strict=True))


@pytest.mark.parametrize("tokens", [[], [0], [31, 32, 33], [99, 0, 64, 63, 0], range(130)])
def test_a_mask_has_the_bits_of_its_tokens(tokens):
    mask = mask_of(tokens, ROWS)
    assert mask.dtype == np.uint32 and mask.shape == (mask_words(ROWS),) == (5,)
    assert tokens_in(mask) == sorted(set(tokens))


def test_a_request_without_rules_has_no_arrays():
    rules = rules_of()
    assert rules.mask is rules.always is rules.early is rules.bias(0) is None


def test_a_bias_holds_at_every_token():
    rules = rules_of(logit_bias={9: -3.5, 4: 100, 5: 0})
    assert as_dict(rules.bias(0)) == as_dict(rules.bias(1000)) == {4: 100, 9: -3.5}
    assert rules.bias(0)[0].tolist() == [4, 9]


def test_stop_tokens_are_forbidden_before_min_tokens():
    rules = rules_of(min_tokens=3, stop_ids=(7, 8), stop_token_ids=(50,), logit_bias={4: 1, 7: 2})
    for index in range(3):
        assert as_dict(rules.bias(index)) == {4: 1, 7: -np.inf, 8: -np.inf, 50: -np.inf}
    assert as_dict(rules.bias(3)) == {4: 1, 7: 2}
    assert rules_of(min_tokens=2).bias(2) is None


def test_an_end_of_sequence_that_is_ignored_is_not_forbidden():
    assert rules_of(min_tokens=3, stop_ids=()).bias(0) is None


def test_a_guided_requests_stop_tokens_are_left_to_its_guide():
    assert rules_of(min_tokens=3, guided=GuidedDecoding(regex="a")).bias(0) is None


def test_allowed_tokens_are_a_mask_over_all_rows():
    assert tokens_in(rules_of(allowed_token_ids=[99, 3, 3]).mask) == [3, 99]


@pytest.mark.parametrize(
    "params,said",
    [
        ({"logit_bias": {100: 1}}, "logit_bias names token 100, but the model's tokens run from 0 to 99"),
        ({"allowed_token_ids": [5, 129]}, "allowed_token_ids names token 129"),
        ({"stop_token_ids": [1000]}, "stop_token_ids names token 1000"),
        ({"allowed_token_ids": [7], "min_tokens": 1}, "only tokens that end the output, but min_tokens is 1"),
    ],
    ids=str,
)
def test_rules_that_cannot_hold_are_refused(params, said):
    with pytest.raises(RequestError, match=said):
        rules_of(**params)


def test_a_bad_word_of_one_token_is_never_allowed():
    rules = rules_of(bad_words=[[9], [99], [9]])
    assert not rules.follows_output and rules.any and tokens_in(rules.mask) == sorted({*range(VOCAB)} - {9, 99})
    assert [left_out(mask) for mask in rules.masks([1, 2], [3, 4])] == [{9, 99}] * 3
    assert tokens_in(rules_of(bad_words=[[9]], allowed_token_ids=[3, 9]).mask) == [3]


def test_the_last_token_of_a_bad_word_is_forbidden_behind_the_others():
    rules = rules_of(bad_words=[[1, 2], [1, 2, 3], [2, 4], [5, 5, 5, 6], [50]])
    assert rules.follows_output
    for output, forbidden in [
        ([], {50}),
        ([1], {2, 50}),
        ([2], {4, 50}),
        ([1, 2], {3, 4, 50}),
        ([1, 2, 4], {50}),
        ([5, 5], {50}),
        ([9, 5, 5, 5], {6, 50}),
        ([5] * 9, {6, 50}),
    ]:
        assert [left_out(mask) for mask in rules.masks(output)] == [forbidden], output
        # drafts are part of what came before
        for known in range(len(output) + 1):
            assert left_out(rules.masks(output[:known], output[known:])[-1]) == forbidden
    every = rules_of(bad_words=[[1, 2]])
    assert [mask is None for mask in every.masks([1], [2, 1])] == [False, True, False]
    few = rules_of(bad_words=[[1, 2], [1, 4]], allowed_token_ids=[1, 2, 3])
    assert [tokens_in(mask) for mask in few.masks([3], [1])] == [[1, 2, 3], [1, 3]]


@pytest.mark.parametrize(
    "params,said",
    [
        ({"bad_words": [[100]]}, "bad_words names token 100, but the model's tokens run from 0 to 99"),
        ({"bad_words": [[5, 129, 3]]}, "bad_words names token 129"),
        ({"bad_words": [[3], [5]], "allowed_token_ids": [3, 5]}, "forbids every token, or every one of"),
        ({"bad_words": [[token] for token in range(100)]}, "forbids every token"),
        ({"bad_words": [""]}, "a word that is empty"),
        ({"bad_words": [[]]}, "a word that is empty"),
        ({"bad_words": [[-1]]}, "token ids are whole numbers, 0 or more"),
        ({"bad_words": [[True]]}, "token ids are whole numbers, 0 or more"),
        ({"bad_words": [[1] * 65]}, "has 65 tokens, but at most 64"),
        ({"bad_words": ["x" * 257]}, "has 257 characters, but at most 256"),
        ({"bad_words": [3]}, "a word of bad_words is 3: a list is needed"),
        ({"bad_words": [[1]] * 2049}, "2,049 words, but at most 2,048"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_bad_words_that_cannot_hold_are_refused(params, said):
    with pytest.raises(RequestError, match=said):
        rules_of(**params)


class Letters:
    """A tokenizer of two tokens for a word behind a space, one for each letter elsewhere."""

    def __call__(self, texts, *, add_special_tokens, verbose):
        assert not add_special_tokens
        return {"input_ids": [[1, len(text)] if text.startswith(" ") else [*map(ord, text)] for text in texts]}


def test_words_are_written_with_a_space_before_them_and_without():
    assert sequences_of(["ab", "  ab", [7, 8]], Letters()) == ((97, 98), (1, 3), (7, 8))
    assert sequences_of(["\n", "a"], Letters()) == ((97,), (1, 2), (10,)), "a blank is a word as it is"
    assert sequences_of([(3,), [3]], None) == ((3,),)
    with pytest.raises(RequestError, match="no tokenizer: pass each word as a list"):
        sequences_of(["a"], None)
    with pytest.raises(RequestError, match="has 70 tokens, but it may have 1 to 64"):
        sequences_of(["a" * 70], Letters())


def test_the_first_tokens_are_a_mask():
    for count, rows in itertools.product((0, 1, 31, 32, 33, 64, 100), (100, 130)):
        assert mask_of_first(count, rows).tolist() == mask_of(range(count), rows).tolist()


def test_biases_and_stop_tokens_together_have_a_limit():
    request = Request("r", [1], SamplingParams(logit_bias=dict.fromkeys(range(300), 1), min_tokens=1))
    request.stop_ids = frozenset([5])
    Rules.for_request(request, 400, 400)
    request.stop_ids = frozenset([350])
    with pytest.raises(RequestError, match=r"names 300 tokens and min_tokens forbids 1.*at most 300"):
        Rules.for_request(request, 400, 400)
