"""Biases, forbidden stop tokens and allowed tokens of one request, as the sampler's arrays."""

import numpy as np
import pytest

from ttpu_core.errors import RequestError
from ttpu_core.generation.sampling_params import GuidedDecoding, SamplingParams
from ttpu_serve.execution.logit_rules import Rules, mask_of, mask_words
from ttpu_serve.scheduling.request import Request

VOCAB, ROWS = 100, 130  # the model's logits are padded


def rules_of(*, stop_ids=(7,), **params):
    request = Request("r", [1], SamplingParams(**{"max_tokens": None, **params}), stop_ids=frozenset(stop_ids))
    return Rules.for_request(request, VOCAB, ROWS)


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


def test_biases_and_stop_tokens_together_have_a_limit():
    request = Request("r", [1], SamplingParams(logit_bias=dict.fromkeys(range(300), 1), min_tokens=1))
    request.stop_ids = frozenset([5])
    Rules.for_request(request, 400, 400)
    request.stop_ids = frozenset([350])
    with pytest.raises(RequestError, match=r"names 300 tokens and min_tokens forbids 1.*at most 300"):
        Rules.for_request(request, 400, 400)
