"""OpenTelemetry spans: one for a client's request, one for each leg, sent by OTLP over HTTP.

Each leg's engine gets the leg's span as its parent by the W3C header `traceparent`, so that an engine's own
spans hang below it. Without an endpoint nothing of this is imported, and the client's headers go to both legs
as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvferry.errors import UsageError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

_SERVICE = "kvferry-router"


class Tracing:
    """Makes traces; `close` sends what has not been sent."""

    def __init__(self, exporter: SpanExporter) -> None:
        # An optional package, and slow to import.
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

        self._provider = TracerProvider(resource=Resource.create({"service.name": _SERVICE}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(_SERVICE)

    def request(self, path: str, request_id: str, headers: Mapping[bytes, bytes]) -> Trace:
        """Begin the span of a client's request, below the client's own if it names one."""
        return Trace(self._tracer, path, request_id, headers)

    def close(self) -> None:
        """Send what has not been sent; takes as long as the exporter does."""
        self._provider.shutdown()


class Trace:
    """The spans of one client request."""

    def __init__(self, tracer: Tracer, path: str, request_id: str, headers: Mapping[bytes, bytes]) -> None:
        from opentelemetry.trace import SpanKind  # noqa: PLC0415

        carrier = {
            name: headers[name.encode()].decode("latin-1")
            for name in ("traceparent", "tracestate")
            if name.encode() in headers
        }
        attributes = {"http.request.method": "POST", "url.path": path, "kvferry.request_id": request_id}
        self._tracer = tracer
        self._span = tracer.start_span(
            f"POST {path}", _propagator().extract(carrier), SpanKind.SERVER, attributes
        )

    @contextmanager
    def leg(self, role: str, worker: str) -> Iterator[dict[str, str]]:
        """The span of a leg for as long as the block runs; the headers that its engine gets."""
        from opentelemetry.trace import SpanKind, set_span_in_context  # noqa: PLC0415

        above = set_span_in_context(self._span)
        attributes = {"kvferry.leg": role, "kvferry.worker": worker}
        span = self._tracer.start_span(role, above, SpanKind.CLIENT, attributes)
        headers: dict[str, str] = {}
        _propagator().inject(headers, set_span_in_context(span))
        try:
            yield headers
        except BaseException as error:
            _failed(span, str(error) or type(error).__name__)
            raise
        finally:
            span.end()

    def end(self, status: int, outcome: Mapping[str, str], stages: Mapping[str, float]) -> None:
        """End the request's span."""
        self._span.set_attribute("http.response.status_code", status)
        for name, value in outcome.items():
            self._span.set_attribute(f"kvferry.{name}", value)
        for stage, seconds in stages.items():
            self._span.set_attribute(f"kvferry.{stage}_seconds", seconds)
        if status >= 500:
            _failed(self._span, outcome.get("cause", ""))
        self._span.end()


def open_tracing(endpoint: str) -> Tracing | None:
    """Send spans to `endpoint`; None when it is empty.

    Raises:
        UsageError: the packages for it are not installed.
    """
    if not endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    except ImportError as error:
        raise UsageError(
            f"--otlp-endpoint: needs {error.name}; install kvferry with its extra: kvferry[otel]"
        ) from error
    return Tracing(OTLPSpanExporter(endpoint=endpoint))


def _failed(span: Span, reason: str) -> None:
    from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415

    span.set_status(Status(StatusCode.ERROR, reason))


def _propagator() -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

    return TraceContextTextMapPropagator()
