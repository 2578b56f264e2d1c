"""Measures an engine without a server: the throughput of a whole load, or the latency of one batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ttpu_serve.bench.summary import PERCENTILES, Distribution

ServeAll = Callable[[], tuple[int, int]]
"""Serves all prompts once; returns the numbers of prompt and output tokens."""


@dataclass(frozen=True)
class OfflineSummary:
    """`seconds` holds the time of each repetition of the whole load; `latency` is their distribution in milliseconds.
    Rates are per second of the median repetition."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: tuple[float, ...]
    latency: Distribution
    request_rate: float
    output_token_rate: float
    total_token_rate: float


def measure(
    serve_all: ServeAll,
    requests: int,
    *,
    warmups: int,
    rounds: int,
    percentiles: Sequence[float] = PERCENTILES,
    on_round: Callable[[], None] | None = None,
) -> OfflineSummary:
    """Run the load `warmups` times without timing, then `rounds` times with timing.

    Args:
        serve_all: serves the whole load and returns its numbers of prompt tokens and output tokens.
        requests: number of requests of the load.
        warmups: repetitions without timing.
        rounds: repetitions with timing.
        percentiles: percentiles of the latency to compute.
        on_round: called after each repetition.
    """
    seconds: list[float] = []
    prompt_tokens = output_tokens = 0
    for number in range(warmups + rounds):
        began = time.perf_counter()
        prompt_tokens, output_tokens = serve_all()
        if number >= warmups:
            seconds.append(time.perf_counter() - began)
        if on_round is not None:
            on_round()
    latency = Distribution.of((one * 1e3 for one in seconds), (*percentiles, 50.0))
    assert latency is not None
    median = latency.percentiles[50.0] / 1e3
    return OfflineSummary(
        requests=requests,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        seconds=tuple(seconds),
        latency=latency,
        request_rate=requests / median,
        output_token_rate=output_tokens / median,
        total_token_rate=(prompt_tokens + output_tokens) / median,
    )
