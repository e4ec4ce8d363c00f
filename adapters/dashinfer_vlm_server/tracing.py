"""Traces: a span for each request and one for each of its stages, to a collector of OpenTelemetry's protocol.

Nothing here is imported unless traces are asked for; no span holds a prompt, a picture or a key.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from dashinfer_vlm_core.engine.observers import RequestObserver, Stage
from dashinfer_vlm_core.version import __version__

if TYPE_CHECKING:
    from openai.types import CompletionUsage
    from starlette.types import Scope

    from .request_context import RequestContext


class Tracer(RequestObserver):
    """Spans of requests and their stages.

    Args:
        provider: OpenTelemetry's; where the spans go.
    """

    def __init__(self, provider: trace.TracerProvider) -> None:
        self._tracer = provider.get_tracer("dashinfer_vlm_server", __version__)

    @contextlib.contextmanager
    def request_span(self, scope: Scope, visit: RequestContext) -> Iterator[None]:
        """The span of a request; it continues the trace that the header `traceparent` names (W3C Trace Context)."""
        named = (b"traceparent", b"tracestate")
        carrier = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in named}
        parent = TraceContextTextMapPropagator().extract(carrier)
        with self._tracer.start_as_current_span("request", context=parent, kind=SpanKind.SERVER) as span:
            try:
                yield
            finally:
                span.update_name(f"{scope['method']} {visit.route}")
                span.set_attributes(
                    {
                        "http.request.method": scope["method"],
                        "http.route": visit.route,
                        "http.response.status_code": visit.status,
                        "dashinfer_vlm.request_id": visit.id,
                        "dashinfer_vlm.outcome": visit.outcome,
                    }
                )
                if visit.status >= 500:
                    span.set_status(StatusCode.ERROR)

    @contextlib.contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        span = self._tracer.start_span(stage)
        try:
            yield
        except Exception as error:
            span.set_status(StatusCode.ERROR, type(error).__name__)
            raise
        finally:
            span.end()

    def first_token(self, seconds: float) -> None:
        trace.get_current_span().add_event("first token")

    def answered(self, usage: CompletionUsage, seconds: float) -> None:
        trace.get_current_span().set_attributes(
            {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
            }
        )


def tracer_to(endpoint: str) -> Tracer:
    """A tracer whose spans go to a collector, in batches.

    Args:
        endpoint: of OTLP over HTTP, such as `http://127.0.0.1:4318/v1/traces`.
    """
    provider = TracerProvider(
        resource=Resource.create({SERVICE_NAME: "dashinfer-vlm", SERVICE_VERSION: __version__}),
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracer(provider)
