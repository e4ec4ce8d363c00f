"""Traces: a span per request and per stage, and no cost if disabled."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from dashinfer_vlm_server.tracing import Tracer
from tests.samples import image_url
from tests.waiting import HANG, until

SECRET = "a very private prompt"
CHAT = "/v1/chat/completions"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BODY = {
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": SECRET}, {"type": "image_url", "image_url": {"url": image_url()}}],
        }
    ]
}


@pytest.fixture
def spans():
    return InMemorySpanExporter()


@pytest.fixture
def tracer(spans):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    yield Tracer(provider)
    provider.shutdown()


def finished(spans, count):
    """Wait for this number of spans. The request's span is last, and can end after the client read the response."""
    until(lambda: len(spans.get_finished_spans()) == count)
    return spans.get_finished_spans()


@pytest.mark.parametrize("stream", [False, True])
def test_request_and_stages_share_the_callers_trace(scripted, tracer, spans, stream):
    with scripted("Fine.", settings={"tracer": tracer}).server.http() as client:
        client.post(CHAT, json=BODY | {"stream": stream}, headers={"traceparent": PARENT, "X-Request-Id": "one"})
    *stages, request = finished(spans, 6)
    assert [span.name for span in stages] == ["grammar", "media", "prompt", "vision", "decode"]
    assert request.name == f"POST {CHAT}"
    assert format(request.context.trace_id, "032x") == PARENT.split("-")[1]
    assert format(request.parent.span_id, "016x") == PARENT.split("-")[2]
    assert all(span.parent.span_id == request.context.span_id for span in stages)
    assert request.attributes["dashinfer_vlm.request_id"] == "one"
    assert request.attributes["gen_ai.usage.output_tokens"] > 0
    assert SECRET not in "".join(span.to_json() for span in [*stages, request])


def test_failed_stage_is_marked(scripted, tracer, spans):
    def broken(_request):
        raise ValueError(SECRET)

    with scripted(broken, settings={"tracer": tracer}).server.http() as client:
        assert client.post(CHAT, json=BODY).status_code == 500
    marked = {span.name for span in finished(spans, 6) if span.status.status_code is StatusCode.ERROR}
    assert marked == {"decode", f"POST {CHAT}"}
    assert SECRET not in "".join(span.to_json() for span in spans.get_finished_spans())


def test_invalid_traceparent_starts_a_new_trace(scripted, tracer, spans):
    with scripted("Fine.", settings={"tracer": tracer}).server.http() as client:
        client.get("/version", headers={"traceparent": "00-nonsense-01"})
    (span,) = finished(spans, 1)
    assert span.parent is None
    assert span.name == "GET /version"


@pytest.mark.slow
def test_opentelemetry_is_not_imported_unless_enabled():
    """FastAPI imports only the API package of OpenTelemetry, if it is installed."""
    script = "import sys, dashinfer_vlm_server.serving; sys.exit('opentelemetry.sdk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=HANG, check=False).returncode == 0
