"""Beam search over distributions that are known: the beams are those of a search that drops nothing and never stops
early, in fewer steps."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from ttpu_core.errors import RequestError
from ttpu_serve.api.beam_search import BeamSearchParams, search, step_params
from ttpu_serve.api.outputs import Logprob

VOCAB, END, LENGTH, PROMPT = 9, 0, 7, [3, 4]


def distribution(tokens: list[int], seed: int) -> dict[int, Logprob]:
    """The log-probabilities of what follows, likeliest first. With some seeds one token is nearly sure, so that longer
    sequences may come before those that ended."""
    draw = random.Random(f"{seed} {tokens}").uniform
    weights = [draw(0, 3 if token == END else 1) ** (1 + 7 * (seed % 3)) for token in range(VOCAB)]
    values = {token: math.log(weight / sum(weights)) for token, weight in enumerate(weights)}
    return {token: Logprob(values[token]) for token in sorted(values, key=lambda token: -values[token])}


def searched(params: BeamSearchParams, seed: int, ends: frozenset[int] = frozenset({END})) -> tuple[list[Any], int]:
    """The beams and the number of steps."""
    searching, steps = search(PROMPT, params, ends), 1
    given = next(searching)
    while True:
        try:
            given = searching.send([distribution(tokens, seed) for tokens in given])
            steps += 1
        except StopIteration as done:
            return done.value.sequences, steps


def expected(params: BeamSearchParams, seed: int, ends: frozenset[int]) -> list[tuple[list[int], float]]:
    """The rule, written down."""
    running: list[tuple[list[int], float]] = [([], 0.0)]
    ended: list[tuple[list[int], float]] = []

    def score(beam: tuple[list[int], float]) -> float:
        length = len(PROMPT) + len(beam[0]) - (beam[0][-1] in ends)
        return beam[1] / length**params.length_penalty

    for _ in range(params.max_tokens):
        grown = [
            ([*tokens, token], total + value.logprob)
            for tokens, total in running
            for token, value in list(distribution([*PROMPT, *tokens], seed).items())[: 2 * params.beam_width]
        ]
        ended += [beam for beam in grown if beam[0][-1] in ends]
        running = sorted((beam for beam in grown if beam[0][-1] not in ends), key=score)[-params.beam_width :]
        if params.early_stopping is True and len(ended) >= params.beam_width:
            running = []
            break
    return sorted([*ended, *running], key=score, reverse=True)[: params.beam_width]


@pytest.mark.parametrize("penalty", [-2.0, 0.0, 0.7, 1.0, 3.0])
@pytest.mark.parametrize("early", [False, "never", True])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_beams_are_those_of_a_search_that_drops_nothing(width: int, early: Any, penalty: float) -> None:
    params, fewest = BeamSearchParams(width, LENGTH, length_penalty=penalty, early_stopping=early), LENGTH
    for seed in range(25):
        found, steps = searched(params, seed)
        rule = expected(params, seed, frozenset({END}))
        assert [beam.tokens[len(PROMPT) :] for beam in found] == [tokens for tokens, _ in rule]
        assert [beam.cum_logprob for beam in found] == pytest.approx([total for _, total in rule])
        assert [beam.finish_reason for beam in found] == ["stop" if END in beam.tokens else "length" for beam in found]
        fewest = min(fewest, steps)
    assert fewest < LENGTH or penalty == 3, "a search ends when nothing better can come"


def test_beams_that_ignore_ends_do_not_end() -> None:
    params = BeamSearchParams(3, LENGTH, ignore_eos=True)
    found, steps = searched(params, 1)
    assert [beam.tokens[2:] for beam in found] == [tokens for tokens, _ in expected(params, 1, frozenset())]
    assert steps == LENGTH and {beam.finish_reason for beam in found} == {"length"}


def test_a_beam_has_the_log_probabilities_of_its_tokens() -> None:
    for beam in searched(BeamSearchParams(2, LENGTH), 2)[0]:
        new = beam.tokens[len(PROMPT) :]
        assert [next(iter(told)) for told in beam.logprobs] == new, "the token itself is the first"
        for place, told in enumerate(beam.logprobs):
            assert dict(told) == distribution(beam.tokens[: len(PROMPT) + place], 2)
        assert beam.cum_logprob == pytest.approx(
            sum(told[token].logprob for told, token in zip(beam.logprobs, new, strict=True))
        )


def test_where_every_token_ends_a_sequence_the_search_ends() -> None:
    found, steps = searched(BeamSearchParams(2, LENGTH), 3, frozenset(range(VOCAB)))
    assert steps == 1 and [len(beam.tokens) for beam in found] == [3, 3]


def test_a_step_reports_as_much_as_the_beams_and_the_caller_need() -> None:
    params = BeamSearchParams(3, 5)
    assert step_params(params, 20).logprobs == 6 and step_params(params, 20, logprobs=9).logprobs == 9
    assert step_params(params, 6).max_tokens == 1 and step_params(params, 6).ignore_eos
    with pytest.raises(RequestError, match="3 beams were asked for, which needs 6 log-probabilities"):
        step_params(params, 5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"beam_width": 0},
        {"beam_width": True},
        {"max_tokens": 0},
        {"temperature": 0.5},
        {"length_penalty": float("nan")},
        {"length_penalty": 11},
        {"length_penalty": "1"},
        {"early_stopping": "always"},
    ],
    ids=str,
)
def test_parameters_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, **wrong})
