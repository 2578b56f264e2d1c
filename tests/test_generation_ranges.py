"""One table says which numbers decoding takes, however they are asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ttpu_core.cli.options import NUMBERS, Decoding
from ttpu_core.errors import RequestError
from ttpu_core.generation.options import options_from, output_length
from ttpu_core.generation.ranges import RANGES
from ttpu_core.generation.sampling_params import SamplingParams

WRONG = [
    ("temperature", -1.0), ("temperature", float("nan")), ("temperature", float("inf")), ("top_k", -2), ("top_p", 0.0),
    ("top_p", 1.5), ("min_p", -0.1), ("repetition_penalty", 0.0), ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5), ("seed", -1), ("seed", 2**32),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_number_out_of_range_is_refused_by_every_way_of_asking(name: str, value: Any) -> None:
    for ask in (lambda **given: options_from(given), SamplingParams, Decoding):
        with pytest.raises(RequestError) as refused:
            ask(**{name: value})
        assert RANGES[name].allowed in str(refused.value)


def test_the_checkpoints_own_length_is_no_argument() -> None:
    with pytest.raises(RequestError, match="it takes max_new_tokens, max_length, do_sample, ") as refused:
        options_from({"foo": 1})
    assert "usual_new_tokens" not in str(refused.value)
    for given in (({"usual_new_tokens": 5},), ({}, {"usual_new_tokens": 5})):
        with pytest.raises(RequestError, match=r"was given usual_new_tokens=5, which this backend does not do"):
            options_from(*given)
    assert options_from({}, None, {"max_new_tokens": 7, "usual_new_tokens": 5}).usual_new_tokens == 7


def test_numbers_of_numpy_are_numbers_and_truth_values_are_not() -> None:
    assert RANGES["top_k"].holds(np.int64(3)) and RANGES["temperature"].holds(np.float32(0.5))
    assert not any(RANGES["top_k"].holds(value) for value in (True, np.bool_(True), 1.5, "3", None))


def test_the_command_line_has_a_range_for_each_of_its_numbers() -> None:
    assert set(NUMBERS) == set(RANGES) - {"logprobs"}


@pytest.mark.parametrize(
    ("given", "length"),
    [
        ({}, 128),
        ({"usual": 40}, 40),
        ({"usual": 4000}, 990),
        ({"total": 30, "usual": 40}, 20),
        ({"total": 2000}, 990),
        ({"asked": 5, "total": 30}, 5),
    ],
)
def test_an_answer_is_as_long_as_asked_for_and_cut_at_the_contexts_end_otherwise(
    given: dict[str, int], length: int
) -> None:
    limits: dict[str, int | None] = {"asked": None, "total": None, "usual": None}
    assert output_length(10, 1000, **limits | given) == length
