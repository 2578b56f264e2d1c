"""What /metrics says: names and kinds that dashboards rely on, and numbers that are right."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from fake_core import FakeCore, tokenizer
from prometheus_client.parser import text_string_to_metric_families
from serving import running

from ttpu_core.errors import RequestError
from ttpu_serve.api.outputs import OutputDelta
from ttpu_serve.execution.stats import EngineStats
from ttpu_serve.server import ServerSettings
from ttpu_serve.server.endpoints import RECENT_SECONDS
from ttpu_serve.server.metrics import SECONDS, TOKENS, WINDOW_SECONDS, EngineCollector, Metrics

NAMES = {
    "requests_waiting": "gauge",
    "requests_running": "gauge",
    "programs_pending": "gauge",
    "kv_cache_usage": "gauge",
    "kv_cache_pages_in_use": "gauge",
    "asleep": "gauge",
    "mfu": "gauge",
    "mbu": "gauge",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "preemptions": "counter",
    "draft_tokens": "counter",
    "accepted_tokens": "counter",
    "accepted_tokens_at": "counter",
    "recompiles": "counter",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "requests_finished": "counter",
    "http_requests": "counter",
    "time_to_first_token_seconds": "histogram",
    "time_per_output_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
}


VLLM_NAMES = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "num_preemptions": "counter",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "request_success": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "spec_decode_num_draft_tokens": "counter",
    "spec_decode_num_accepted_tokens": "counter",
    "spec_decode_num_accepted_tokens_per_pos": "counter",
}
LABELS = ("reason", "finished_reason", "path", "status", "place", "position", "group", "le")


def samples(text: str) -> dict[str, Any]:
    """Values by name and those labels that tell samples apart, and the kinds of all metrics."""
    found: dict[str, Any] = {"kinds": {}}
    for family in text_string_to_metric_families(text):
        found["kinds"][family.name] = family.type
        for sample in family.samples:
            labels = [f"{key}={sample.labels[key]}" for key in LABELS if key in sample.labels]
            found[",".join([sample.name, *labels])] = sample.value
    return found


def test_the_page_is_told_the_median_of_the_times_to_a_first_token(bytes_tokenizer: Any) -> None:
    with running(FakeCore(bytes_tokenizer)) as server:
        assert server.http().get("/stats").json()["ttft_p50"] is None
        recent = server.server.config.app.state.service.metrics.recent
        now = time.monotonic()
        recent.extend([(now - RECENT_SECONDS - 1, 60.0), *((now, seconds) for seconds in (0.5, 0.1, 0.3, 0.2, 0.4))])
        assert server.http().get("/stats").json()["ttft_p50"] == 0.3


def test_a_rate_is_known_from_the_second_snapshot_on() -> None:
    engine = Metrics("m").of_engine
    engine.update(EngineStats(output_tokens=10), 100.0)
    assert engine.rate("output_tokens") == 0
    engine.update(EngineStats(output_tokens=60), 110.0)
    assert engine.rate("output_tokens") == 5


def test_the_bounds_of_histograms_ascend_from_the_quick_to_the_slow() -> None:
    assert SECONDS[0] == 0.005 and SECONDS[-1] == 320 and TOKENS[0] == 1 and TOKENS[-1] == 2**17
    assert all(1.5 <= more / less <= 2.5 for less, more in (*pairwise(SECONDS), *pairwise(TOKENS)))


def test_all_of_them_are_there_and_right(tmp_path: Any) -> None:
    core = FakeCore(tokenizer(tmp_path), seconds=0.05)
    core.counts = replace(
        core.counts, kv_usage=0.25, pages_in_use={"full": 3}, drafted=10, accepted=7, accepted_at=(5, 2), preemptions=2,
        recompiles=1, prefix_queries=50, prefix_hits=20, peak_flops=1e12, peak_bytes=1e12,
    )  # fmt: skip
    with running(core) as server:
        unused = samples(server.http().get("/metrics").text)
        assert unused["ttpu:inter_token_latency_seconds_count"] == unused["vllm:inter_token_latency_seconds_count"] == 0
        asked = {"model": "fake", "messages": [{"role": "user", "content": "say: four"}], "n": 2}
        server.http().post("/v1/chat/completions", json=asked)
        server.http().post("/v1/nothing")
        found = samples(server.http().get("/metrics").text)
    assert {name.removeprefix("ttpu:"): kind for name, kind in found["kinds"].items()}.items() >= NAMES.items()
    assert {name.partition(":")[0] for name in found["kinds"] if ":" in name} == {"ttpu", "vllm"}
    assert {"process_resident_memory_bytes", "process_cpu_seconds"} <= found["kinds"].keys()
    assert found["ttpu:kv_cache_usage"] == 0.25 and found["ttpu:kv_cache_pages_in_use,group=full"] == 3
    assert found["ttpu:accepted_tokens_at_total,place=1"] == 2 and found["ttpu:recompiles_total"] == 1
    assert found["ttpu:requests_finished_total,reason=stop"] == 2
    assert found["ttpu:time_to_first_token_seconds_count"] == found["ttpu:e2e_request_latency_seconds_count"] == 2
    assert found["ttpu:request_generation_tokens_sum"] == 10, "four letters and the end, twice"
    assert found["ttpu:http_requests_total,path=/v1/chat/completions,status=200"] == 1
    assert found["ttpu:http_requests_total,path=other,status=404"] == 1, "labels do not grow with what clients invent"
    kinds = {name.removeprefix("vllm:"): kind for name, kind in found["kinds"].items() if name.startswith("vllm:")}
    assert kinds.items() >= VLLM_NAMES.items()
    assert found["vllm:kv_cache_usage_perc"] == 0.25 and found["vllm:num_preemptions_total"] == 2
    assert found["vllm:request_success_total,finished_reason=stop"] == 2
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total,position=1"] == 2
    assert found["vllm:e2e_request_latency_seconds_bucket,le=+Inf"] == 2
    assert found["vllm:inter_token_latency_seconds_count"] > 0


@pytest.mark.parametrize(("prefix", "others"), [("ttpu", "vllm:"), ("vllm", "ttpu:")])
def test_metrics_have_the_names_that_were_asked_for(prefix: Any, others: str) -> None:
    metrics = Metrics("m", prefix)
    metrics.watch(time.monotonic(), 1).see(OutputDelta("r", 0, "a", [1], None, "stop", num_output_tokens=1))
    text = metrics.text().decode()
    assert f"{prefix}:time_to_first_token_seconds_count" in text and others not in text
    if prefix == "vllm":
        assert 'vllm:e2e_request_latency_seconds_count{engine="0",model_name="m"} 1.0' in text
    with pytest.raises(RequestError, match="metrics_prefix"):
        ServerSettings(metrics_prefix="prometheus")  # type: ignore[arg-type]


def test_an_answers_times() -> None:
    metrics = Metrics("m")
    arrival = time.monotonic() - 3.0
    watch = metrics.watch(arrival, 2)
    watch.see(OutputDelta("r", 0, "a", [1], None, None, num_output_tokens=1))
    watch.see(OutputDelta("r", 0, "b", [2, 3], None, "stop", num_prompt_tokens=4, num_output_tokens=3))
    watch.end("abort")
    watch.end("abort")
    found = samples(metrics.text().decode())
    assert found["ttpu:time_to_first_token_seconds_sum"] == pytest.approx(3.0, abs=0.2)
    assert found["ttpu:time_to_first_token_seconds_bucket,le=2.5"] == 0
    assert found["ttpu:time_per_output_token_seconds_count"] == 1
    assert found["ttpu:inter_token_latency_seconds_count"] == 1 and found["ttpu:inter_token_latency_seconds_sum"] < 1.0
    assert found["ttpu:requests_finished_total,reason=stop"] == found["ttpu:requests_finished_total,reason=abort"] == 1


@pytest.mark.parametrize("idle", [0, 30, 57])
def test_rates_are_of_the_last_seconds(idle: int) -> None:
    """Work begins after `idle` seconds of 60; what lies before the window does not count."""
    collector = EngineCollector({"model_name": "m"})
    stats = EngineStats(peak_flops=100.0, peak_bytes=1000.0)
    for second in range(61):
        work = 50.0 * max(second - idle, 0)
        collector.update(replace(stats, model_flops=work, hbm_bytes=work), now=float(second))
    busy = min((60 - idle) / WINDOW_SECONDS, 1.0)
    assert collector.utilization == {"mfu": pytest.approx(0.5 * busy), "mbu": pytest.approx(0.05 * busy)}


def test_unknown_hardware_has_no_utilization() -> None:
    collector = EngineCollector({"model_name": "m"})
    collector.update(EngineStats(), now=0.0)
    assert collector.utilization == {} and "ttpu:mfu" not in {metric.name for metric in collector.collect()}
