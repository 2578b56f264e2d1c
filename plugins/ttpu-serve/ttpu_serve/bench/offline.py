"""Measures an engine without a server. In: a function that serves prompts, and prompts; out: rates of a whole load, or
how long one batch takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ttpu_serve.bench.summary import PERCENTILES, Distribution

ServeAll = Callable[[], tuple[int, int]]
"""Serves all prompts once; returns the numbers of prompt and output tokens."""


@dataclass(frozen=True)
class OfflineSummary:
    """Of `seconds`, one number for each repetition of the whole load, and `latency`, their distribution in
    milliseconds. Rates are per second of the median repetition."""

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
    """Run the load `warmups` times for nothing, then `rounds` times on the clock."""
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
