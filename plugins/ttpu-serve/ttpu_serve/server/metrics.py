"""Metrics for Prometheus and for the page: the engine's counters, the times of requests and the process's own, in a
registry of their own. They are named `ttpu:...`, and those that vLLM has as well also `vllm:...`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ttpu_serve.api.outputs import OutputDelta
from ttpu_serve.server.traces import TRACE

MetricsPrefix = Literal["ttpu", "vllm", "both"]
PREFIXES: tuple[str, ...] = get_args(MetricsPrefix)
WINDOW_SECONDS = 10.0
"""Over which the rates of work (MFU, MBU, tokens per second) are taken."""
SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
TOKENS = tuple(float(2**n) for n in range(18))

_GAUGES = (
    ("requests_waiting", "waiting", "Requests that wait for a place."),
    ("requests_running", "running", "Requests that are running."),
    ("programs_pending", "programs_pending", "Programs that are compiled while the engine serves."),
    ("kv_cache_usage", "kv_usage", "Share of the KV cache's pages in use, from 0 to 1."),
)
_COUNTERS = (
    ("prefix_cache_queries", "prefix_queries", "Prompt tokens looked for in the prefix cache."),
    ("prefix_cache_hits", "prefix_hits", "Prompt tokens found there."),
    ("preemptions", "preemptions", "Requests that lost their pages and were computed again."),
    ("draft_tokens", "drafted", "Tokens that speculative decoding proposed."),
    ("accepted_tokens", "accepted", "Proposed tokens that were right."),
    ("recompiles", "recompiles", "Programs compiled while serving."),
    ("prompt_tokens", "prompt_tokens", "Tokens of prompts."),
    ("generation_tokens", "output_tokens", "Generated tokens."),
    ("steps", "steps", "Steps of the engine."),
    ("device_seconds", "device_seconds", "Seconds in which a step was under way."),
)

VLLM_NAMES: dict[str, tuple[str, ...]] = {
    "requests_running": ("num_requests_running",),
    "requests_waiting": ("num_requests_waiting",),
    "kv_cache_usage": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "prefix_cache_queries": ("prefix_cache_queries",),
    "prefix_cache_hits": ("prefix_cache_hits",),
    "preemptions": ("num_preemptions",),
    "prompt_tokens": ("prompt_tokens",),
    "generation_tokens": ("generation_tokens",),
    "requests_finished": ("request_success",),
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "time_per_output_token_seconds": ("request_time_per_output_token_seconds",),
    "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
    "request_prompt_tokens": ("request_prompt_tokens",),
    "request_generation_tokens": ("request_generation_tokens",),
    "draft_tokens": ("spec_decode_num_draft_tokens",),
    "accepted_tokens": ("spec_decode_num_accepted_tokens",),
    "accepted_tokens_at": ("spec_decode_num_accepted_tokens_per_pos",),
}
"""Metrics by their names here → vLLM's names, newest first."""
_VLLM_LABELS = {"reason": "finished_reason", "place": "position"}


class Metrics:
    """The metrics of one server; `of_engine` holds the engine's own counters. prefix: the names under which they are
    told."""

    def __init__(self, model: str, prefix: MetricsPrefix = "both") -> None:
        self.registry = CollectorRegistry()
        self._prefix = prefix
        self._of_process = ProcessCollector(registry=None)
        self._labels = {"model_name": model}
        self.of_engine = EngineCollector(self._labels)
        self.registry.register(self.of_engine)
        self._first = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", SECONDS)
        self._each = self._histogram(
            "time_per_output_token_seconds", "Mean of a sequence after its first token.", TOKEN_SECONDS
        )
        self._between = self._histogram(
            "inter_token_latency_seconds", "Between two deltas of a sequence.", TOKEN_SECONDS
        )
        self._whole = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", SECONDS)
        self._prompt = self._histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self._output = self._histogram("request_generation_tokens", "Generated tokens of a sequence.", TOKENS)
        self._ended = Counter(
            "ttpu:requests_finished", "Sequences, by finish reason.", ["model_name", "reason"], registry=self.registry
        )
        self._http = Counter("ttpu:http_requests", "HTTP requests.", ["path", "status"], registry=self.registry)
        self._http_time = Histogram(
            "ttpu:http_request_duration_seconds", "Of HTTP requests.", ["path"], buckets=SECONDS, registry=self.registry
        )
        self._batch_lines = Counter(
            "ttpu:batch_requests", "Lines of batches.", ["model_name", "outcome"], registry=self.registry
        )
        self.batch_lines_running = Gauge(
            "ttpu:batch_requests_running", "Lines of batches that are worked on.", list(self._labels),
            registry=self.registry,
        ).labels(**self._labels)
        self.recent: deque[tuple[float, float]] = deque(maxlen=256)
        """When outputs began, and the time to their first token."""

    def http(self, path: str, status: int, seconds: float) -> None:
        """Count an HTTP request."""
        self._http.labels(path, str(status)).inc()
        self._http_time.labels(path).observe(seconds)

    def batch_line(self, succeeded: bool) -> None:
        """Count a line of a batch that was answered."""
        self._batch_lines.labels(outcome="succeeded" if succeeded else "failed", **self._labels).inc()

    def watch(self, arrival: float, sequences: int, *, timed: bool = True) -> RequestWatch:
        """Watch a request with `sequences` sequences that arrived at `arrival` (`time.monotonic`). timed: record how
        long it takes."""
        return RequestWatch(self, arrival, sequences, timed)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' format."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics under the names that were asked for."""
        for metric in self.registry.collect():
            if self._prefix != "vllm":
                yield metric
            if self._prefix != "ttpu":
                for name in VLLM_NAMES.get(metric.name.removeprefix("ttpu:"), ()):
                    yield _as_vllm(metric, f"vllm:{name}")
        yield from self._of_process.collect()

    def observe_first(self, seconds: float) -> None:
        """Record the time to a sequence's first token."""
        self._first.observe(seconds)
        self.recent.append((time.monotonic(), seconds))

    def observe_next(self, seconds: float) -> None:
        """Record the time between two deltas of a sequence."""
        self._between.observe(seconds)

    def observe_end(self, prompt: int, output: int, each: float | None, whole: float | None, reason: str) -> None:
        """Record a finished sequence.

        Args:
            prompt: prompt tokens. output: output tokens.
            each: seconds per token after the first; None if there is only one, or nobody waits.
            whole: seconds from arrival to the end; None if nobody waits.
            reason: the finish reason.
        """
        if each is not None:
            self._each.observe(each)
        if whole is not None:
            self._whole.observe(whole)
        self._prompt.observe(prompt)
        self._output.observe(output)
        self._ended.labels(reason=reason, **self._labels).inc()

    def observe_abort(self, reason: str) -> None:
        """Record a sequence that was aborted, failed or timed out."""
        self._ended.labels(reason=reason, **self._labels).inc()

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        """Return a histogram of the model, which tells zeros until something is observed."""
        whole = Histogram(f"ttpu:{name}", text, list(self._labels), buckets=buckets, registry=self.registry)
        return whole.labels(**self._labels)


def _as_vllm(metric: Metric, name: str) -> Metric:
    """Return a metric under vLLM's name, with vLLM's labels."""
    made = Metric(name, metric.documentation, metric.type)
    for sample in metric.samples:
        labels = {_VLLM_LABELS.get(key, key): value for key, value in sample.labels.items()} | {"engine": "0"}
        made.add_sample(name + sample.name.removeprefix(metric.name), labels, sample.value, sample.timestamp)
    return made


class RequestWatch:
    """Records the times of one request's sequences."""

    def __init__(self, metrics: Metrics, arrival: float, sequences: int, timed: bool = True) -> None:
        self._metrics, self._arrival, self._open, self._timed = metrics, arrival, sequences, timed
        self._began: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._trace, self._seen = TRACE.get(), False

    def see(self, delta: OutputDelta) -> None:
        """Record a delta."""
        now = time.monotonic()
        if delta.token_ids and self._timed:
            if delta.index not in self._began:
                self._began[delta.index] = now
                self._metrics.observe_first(now - self._arrival)
            else:
                self._metrics.observe_next(now - self._last[delta.index])
            self._last[delta.index] = now
        if self._trace is not None:
            self._trace.see(delta, now, first=not self._seen)
            self._seen = True
        if delta.finish_reason is not None:
            self._open -= 1
            began = self._began.get(delta.index, now)
            more = delta.num_output_tokens - 1
            each = (now - began) / more if more > 0 and self._timed else None
            whole = now - self._arrival if self._timed else None
            self._metrics.observe_end(
                delta.num_prompt_tokens, delta.num_output_tokens, each, whole, delta.finish_reason
            )

    def end(self, reason: str) -> None:
        """End unfinished sequences with a reason: abort, error or timeout."""
        for _ in range(self._open):
            self._metrics.observe_abort(reason)
        self._open = 0


class EngineCollector(Collector):
    """The engine's counters as Prometheus metrics; `update` stores a snapshot before they are read."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels
        self._past: deque[tuple[float, Any]] = deque()
        self.stats: Any = None

    def update(self, stats: Any, now: float | None = None) -> None:
        """Store a snapshot of the engine's counters, from which rates are computed."""
        self.stats = stats
        now = time.monotonic() if now is None else now
        self._past.append((now, stats))
        while len(self._past) > 2 and self._past[1][0] <= now - WINDOW_SECONDS:
            self._past.popleft()

    def rate(self, name: str) -> float:
        """Return a counter's growth per second."""
        if len(self._past) < 2:
            return 0.0
        (then, before), (now, after) = self._past[0], self._past[-1]
        seconds = now - then
        return float(getattr(after, name) - getattr(before, name)) / seconds if seconds > 0 else 0.0

    @property
    def utilization(self) -> dict[str, float]:
        """MFU and MBU, if the hardware's peak rates are known."""
        found = {}
        for name, counter, peak in (("mfu", "model_flops", "peak_flops"), ("mbu", "hbm_bytes", "peak_bytes")):
            if most := getattr(self.stats, peak, None):
                found[name] = self.rate(counter) / most
        return found

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the last snapshot."""
        if self.stats is None:
            return
        names, values = list(self._labels), list(self._labels.values())

        def gauge(name: str, text: str, value: float) -> Metric:
            family = GaugeMetricFamily(f"ttpu:{name}", text, labels=names)
            family.add_metric(values, value)
            return family

        for name, field, text in _GAUGES:
            yield gauge(name, text, getattr(self.stats, field))
        for name, field, text in _COUNTERS:
            family = CounterMetricFamily(f"ttpu:{name}", text, labels=names)
            family.add_metric(values, getattr(self.stats, field))
            yield family
        yield gauge("asleep", "Whether the weights are away from the devices.", float(self.stats.asleep))
        texts = {
            "mfu": "Share of the devices' peak FLOP/s that the model's products took.",
            "mbu": "Share of the devices' memory bandwidth that weights and cache took.",
        }
        for name, value in self.utilization.items():
            yield gauge(name, f"{texts[name]} Over the last {WINDOW_SECONDS:g} s.", value)
        pages = GaugeMetricFamily("ttpu:kv_cache_pages_in_use", "Pages by group of layers.", labels=[*names, "group"])
        for group, count in self.stats.pages_in_use.items():
            pages.add_metric([*values, group], count)
        yield pages
        places = CounterMetricFamily(
            "ttpu:accepted_tokens_at", "Accepted tokens by place in the draft.", labels=[*names, "place"]
        )
        for place, count in enumerate(self.stats.accepted_at):
            places.add_metric([*values, str(place)], count)
        yield places

    def describe(self) -> list[Metric]:
        """Return no metrics in advance, because they depend on the engine."""
        return []
