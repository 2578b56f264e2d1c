"""A request is one OpenTelemetry span, a part of its client's own trace."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from fake_core import FakeCore
from serving import running, until

from ttpu_core.errors import MissingDependencyError, RequestError
from ttpu_serve.api.outputs import OutputDelta
from ttpu_serve.server.traces import PROTOCOL_VARIABLE, RequestTrace, Tracer, tracer_for

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_request_is_a_span_of_its_clients_trace(bytes_tokenizer: Any) -> None:
    memory: Any = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    with running(FakeCore(bytes_tokenizer), None, Tracer(exporter)) as server:
        asked = {"model": "fake", "prompt": ["say: ab", "say: abc"], "max_tokens": 9}
        headers = {"traceparent": PARENT, "x-request-id": "mine"}
        assert server.http().post("/v1/completions", json=asked, headers=headers).status_code == 200
        assert server.http().post("/v1/completions", json=asked | {"n": 0}).status_code == 400
        server.http().get("/health")
    until(lambda: len(exporter.get_finished_spans()) == 2)
    served, refused = exporter.get_finished_spans()
    told = served.attributes
    assert (f"{served.context.trace_id:032x}", f"{served.parent.span_id:016x}") == tuple(PARENT.split("-")[1:3])
    assert served.name == "llm_request" and told["gen_ai.request.id"] == "mine"
    assert (told["http.route"], told["http.response.status_code"]) == ("/v1/completions", 200)
    assert (told["gen_ai.usage.prompt_tokens"], told["gen_ai.usage.completion_tokens"]) == (15, 7)
    assert 0 < told["gen_ai.latency.time_to_first_token"] <= told["gen_ai.latency.e2e"]
    assert told["gen_ai.response.finish_reasons"] == ("stop", "stop")
    assert (served.end_time - served.start_time) / 1e9 == pytest.approx(told["gen_ai.latency.e2e"], rel=1e-3)
    assert refused.parent is None and refused.attributes["http.response.status_code"] == 400


def test_the_first_token_is_the_first_delta_with_one() -> None:
    trace = RequestTrace()
    for now, ids in ((1.0, []), (2.0, [7]), (3.0, [8, 9])):
        trace.see(OutputDelta("x", 0, "", ids, None, None, num_prompt_tokens=5), now, first=now == 1)
    assert (trace.first_token, trace.output_tokens, trace.prompt_tokens) == (2.0, 3, 5)


def test_a_span_is_an_error_if_the_server_failed() -> None:
    memory: Any = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    tracer = Tracer(exporter)
    for status in (200, 499, 500, 503):
        tracer.end(RequestTrace(), {}, "/v1/completions", status, "mine")
    tracer.close()
    assert [span.status.is_unset for span in exporter.get_finished_spans()] == [True, True, False, False]


def test_traces_need_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    with pytest.raises(MissingDependencyError, match=r"ttpu-serve\[trace\]"):
        tracer_for("http://127.0.0.1:4317")
    monkeypatch.setenv(PROTOCOL_VARIABLE, "carrier pigeon")
    with pytest.raises(RequestError, match="carrier pigeon"):
        tracer_for("http://127.0.0.1:4317")
