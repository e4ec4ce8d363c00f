"""OpenTelemetry traces: a span per request and per stage, exported with OTLP.

This module is imported only if traces are enabled. No span contains a prompt, an image or a key.
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

from dashinfer_vlm_core import __version__
from dashinfer_vlm_core.engine.observers import RequestObserver, Stage

if TYPE_CHECKING:
    from openai.types import CompletionUsage
    from starlette.types import Scope

    from .request_context import RequestContext


class Tracer(RequestObserver):
    """Creates spans of requests and their stages.

    Args:
        provider: the OpenTelemetry provider that receives the spans.
    """

    def __init__(self, provider: trace.TracerProvider) -> None:
        self._tracer = provider.get_tracer("dashinfer_vlm_server", __version__)

    @contextlib.contextmanager
    def request_span(self, scope: Scope, context: RequestContext) -> Iterator[None]:
        """Create the span of a request, in the trace of its `traceparent` header, if any (W3C Trace Context)."""
        names = (b"traceparent", b"tracestate")
        carrier = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in names}
        parent = TraceContextTextMapPropagator().extract(carrier)
        with self._tracer.start_as_current_span("request", context=parent, kind=SpanKind.SERVER) as span:
            try:
                yield
            finally:
                span.update_name(f"{context.method} {context.route}")
                span.set_attributes(
                    {
                        "http.request.method": context.method,
                        "http.route": context.route,
                        "http.response.status_code": context.status,
                        "dashinfer_vlm.request_id": context.id,
                        "dashinfer_vlm.outcome": context.outcome,
                    }
                )
                if context.status >= 500:
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

    def completed(self, usage: CompletionUsage, seconds: float) -> None:
        trace.get_current_span().set_attributes(
            {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
            }
        )


def create_tracer(endpoint: str) -> Tracer:
    """Create a tracer that exports spans to a collector in batches.

    Args:
        endpoint: OTLP/HTTP endpoint, such as `http://127.0.0.1:4318/v1/traces`.
    """
    provider = TracerProvider(
        resource=Resource.create({SERVICE_NAME: "dashinfer-vlm", SERVICE_VERSION: __version__}),
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracer(provider)
