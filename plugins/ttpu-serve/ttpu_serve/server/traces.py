"""One OpenTelemetry span for each request, where an endpoint for them was given and the SDK is installed."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from ttpu_core.errors import MissingDependencyError, RequestError
from ttpu_serve.api.outputs import OutputDelta

PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}


@dataclass
class RequestTrace:
    """What a request's span tells. Times are those of `time.monotonic`."""

    began: float = field(default_factory=time.monotonic)
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_token: float | None = None
    reasons: list[str] = field(default_factory=list)

    def see(self, delta: OutputDelta, now: float, *, first: bool) -> None:
        """Count a delta, which may be the first one of its prompt."""
        if delta.token_ids and self.first_token is None:
            self.first_token = now
        self.output_tokens += len(delta.token_ids)
        self.prompt_tokens += delta.num_prompt_tokens if first else 0
        if delta.finish_reason is not None:
            self.reasons.append(delta.finish_reason)


TRACE: ContextVar[RequestTrace | None] = ContextVar("TRACE", default=None)
"""Of the running request; None where nobody traces."""


class Tracer:
    """Makes and sends the spans of one server.

    Args:
        exporter: an exporter of OpenTelemetry's SDK.
    """

    def __init__(self, exporter: Any) -> None:
        resource = import_module("opentelemetry.sdk.resources").Resource.create({"service.name": "ttpu"})
        self._trace = import_module("opentelemetry.trace")
        self._propagate = import_module("opentelemetry.propagate")
        self._provider = import_module("opentelemetry.sdk.trace").TracerProvider(resource=resource)
        batches = import_module("opentelemetry.sdk.trace.export").BatchSpanProcessor(exporter)
        self._provider.add_span_processor(batches)
        self._tracer = self._provider.get_tracer("ttpu")

    def end(self, trace: RequestTrace, headers: Mapping[str, str], path: str, status: int, name: str) -> None:
        """Make the span of a request that has ended.

        Args:
            trace: what was noted of it.
            headers: of the request, whose `traceparent` names the span that it belongs to.
            path: the route's path.
            status: the response's HTTP status.
            name: the request's id.
        """
        now, ended = time.monotonic(), time.time_ns()
        seconds = now - trace.began
        told: dict[str, Any] = {
            "http.route": path,
            "http.response.status_code": status,
            "gen_ai.request.id": name,
            "gen_ai.usage.prompt_tokens": trace.prompt_tokens,
            "gen_ai.usage.completion_tokens": trace.output_tokens,
            "gen_ai.latency.e2e": seconds,
        }
        if trace.first_token is not None:
            told["gen_ai.latency.time_to_first_token"] = trace.first_token - trace.began
        if trace.reasons:
            told["gen_ai.response.finish_reasons"] = trace.reasons
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagate.extract(headers),
            kind=self._trace.SpanKind.SERVER,
            attributes=told,
            start_time=ended - int(seconds * 1e9),
        )
        if status >= 500:
            span.set_status(self._trace.StatusCode.ERROR)
        span.end(ended)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def tracer_for(endpoint: str) -> Tracer:
    """Return a tracer that sends spans to an OTLP endpoint.

    Raises:
        RequestError: the variable of the protocol names an unknown one.
        MissingDependencyError: the SDK or the protocol's exporter is not installed.
    """
    protocol = os.environ.get(PROTOCOL_VARIABLE, "grpc")
    if protocol not in EXPORTERS:
        raise RequestError(f"{PROTOCOL_VARIABLE} is {protocol!r}, but {' and '.join(EXPORTERS)} are known: set one.")
    try:
        return Tracer(import_module(EXPORTERS[protocol]).OTLPSpanExporter(endpoint=endpoint))
    except ImportError as error:
        raise MissingDependencyError(
            f"traces were to be sent to {endpoint} by {protocol}, but OpenTelemetry cannot be imported ({error}): "
            "`pip install 'ttpu-serve[trace]'` brings it."
        ) from error
