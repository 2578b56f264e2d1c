"""Summarizes the timelines of all requests as rates, distributions of latencies in milliseconds, and goodput."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ttpu_core.errors import RequestError
from ttpu_serve.bench.client import Timeline

PERCENTILES = (50.0, 90.0, 99.0)
OBJECTIVES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True)
class Distribution:
    """Statistics of `count` values; `percentiles` maps per cent to values, interpolated linearly."""

    count: int
    mean: float
    minimum: float
    maximum: float
    percentiles: Mapping[float, float]

    @classmethod
    def of(cls, values: Iterable[float | None], percentiles: Sequence[float] = PERCENTILES) -> Distribution | None:
        """Return the distribution of the non-None values, or None if there are none."""
        there = np.array([value for value in values if value is not None], float)
        if not there.size:
            return None
        points = np.percentile(there, list(percentiles))
        return cls(
            count=int(there.size),
            mean=float(there.mean()),
            minimum=float(there.min()),
            maximum=float(there.max()),
            percentiles={float(p): float(value) for p, value in zip(percentiles, points, strict=True)},
        )


@dataclass(frozen=True)
class ServeSummary:
    """Rates and latencies of the successful requests. Rates are per second of `seconds`, the time from the first due
    request to the end of the last complete response. Latencies are in milliseconds:

    ttft: from sending to the first token. tpot: (last token − first token) / (output tokens − 1) of each request.
    itl: between successive chunks of a response; fewer than tokens if the server sends several tokens per chunk. e2e:
    from sending to the end. held: from the due time to sending, caused by max_concurrency or a slow client.
    goodput: requests per second that met every objective; None without objectives.
    tokens_counted: whether the server counted its output tokens; otherwise each chunk counts as one.
    """

    requests: int
    completed: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    tokens_counted: bool
    request_rate: float
    output_token_rate: float
    total_token_rate: float
    peak_concurrency: int
    mean_concurrency: float
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2e: Distribution | None
    held: Distribution | None
    objectives: Mapping[str, float]
    goodput: float | None
    errors: Mapping[str, int]

    @property
    def failed(self) -> int:
        """Requests without a complete response."""
        return self.requests - self.completed


def parse_objectives(text: str | None) -> dict[str, float]:
    """Parse objectives in milliseconds, as in `ttft:200,tpot:50`.

    Raises:
        RequestError: a name is unknown, or a value is not a positive number.
    """
    objectives: dict[str, float] = {}
    for part in (text or "").split(","):
        name, _, number = part.strip().partition(":")
        if not part.strip():
            continue
        try:
            limit = float(number)
        except ValueError:
            limit = 0.0
        if name not in OBJECTIVES or not limit > 0:
            raise RequestError(
                f"--slo {text!r} was given, but {' and '.join(OBJECTIVES)} can be limited, in milliseconds, as in "
                "ttft:200,tpot:50: correct it."
            )
        objectives[name] = limit
    return objectives


def summarize(
    timelines: Sequence[Timeline],
    *,
    objectives: Mapping[str, float] | None = None,
    percentiles: Sequence[float] = PERCENTILES,
) -> ServeSummary:
    """Summarize the timelines of all requests."""
    whole = [line for line in timelines if line.error is None]
    # A request that failed late, as by a timeout, is no work that the others' rates are to be divided by.
    last = max((line.end for line in whole or timelines), default=0.0)
    seconds = last - min((line.due for line in timelines), default=0.0)
    prompt_tokens = sum(line.prompt_tokens or 0 for line in whole)
    output_tokens = sum(line.output_tokens for line in whole)

    def rate(number: float) -> float:
        return number / seconds if seconds > 0 else 0.0

    def spread(values: Iterable[float | None]) -> Distribution | None:
        return Distribution.of((None if value is None else value * 1e3 for value in values), percentiles)

    good = sum(_meets(line, objectives or {}) for line in whole)
    return ServeSummary(
        requests=len(timelines),
        completed=len(whole),
        seconds=seconds,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        tokens_counted=all(line.counted for line in whole),
        request_rate=rate(len(whole)),
        output_token_rate=rate(output_tokens),
        total_token_rate=rate(prompt_tokens + output_tokens),
        peak_concurrency=_peak(timelines),
        mean_concurrency=rate(sum(max(0.0, min(line.end, last) - line.sent) for line in timelines)),
        ttft=spread(line.ttft for line in whole),
        tpot=spread(line.tpot for line in whole),
        itl=spread(gap for line in whole for gap in line.gaps),
        e2e=spread(line.latency for line in whole),
        held=spread(line.sent - line.due for line in timelines),
        objectives=dict(objectives or {}),
        goodput=rate(good) if objectives else None,
        errors=dict(Counter(line.error for line in timelines if line.error is not None).most_common()),
    )


def _meets(line: Timeline, objectives: Mapping[str, float]) -> bool:
    """Whether a response meets the objectives. A response of one token has no time per token; one without text has no
    time to first token."""
    found = {"ttft": line.ttft, "tpot": line.tpot, "e2e": line.latency}
    return all(found[name] is None or found[name] * 1e3 <= limit for name, limit in objectives.items())  # type: ignore[operator]


def _peak(timelines: Sequence[Timeline]) -> int:
    """Return the maximum number of requests in flight at one time."""
    changes = sorted([(line.sent, 1) for line in timelines] + [(line.end, -1) for line in timelines])
    running = peak = 0
    for _, change in changes:
        running += change
        peak = max(peak, running)
    return peak
