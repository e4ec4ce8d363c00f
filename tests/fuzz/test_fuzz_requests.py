"""Nearly valid requests against the schema and against a whole engine."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dashinfer_vlm_core.errors import RequestError
from dashinfer_vlm_core.protocol import ChatRequest
from dashinfer_vlm_core.protocol.sampling import Sampling
from dashinfer_vlm_core.testing import scripted_engine
from dashinfer_vlm_server.json_body import parse_object
from tests.fuzz.mutations import REQUESTS, damaged_bytes, requests

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # for all cases; each one is timed separately

SHARE = settings.default.max_examples

BODIES = [json.dumps(request).encode() for request in REQUESTS] + [
    b'{"messages": [{"role": "user", "content": "\\ud83d\\ude00"}], "temperature": 1e-5, "seed": -12345678901}',
    json.dumps(REQUESTS[0]).encode("utf-16"),
    b'{"messages":' + b"[" * 2000 + b"]" * 2000 + b"}",
]


def parse_request(make, value):
    """Parse a request and read all its fields; return None where it is rejected with a valid error."""
    try:
        request = ChatRequest.parse(make(value))
    except RequestError as error:
        check_error(error)
        return None
    assert isinstance(request.sampling(), Sampling)
    for media in request.media():
        assert media.has_source or media.uuid
    assert len(request.template_messages()) == len(request.messages)
    return request


def check_error(error):
    assert 10 < len(error.message) < 1000
    assert error.code
    for text in (error.message, error.param or ""):
        text.encode()  # must be sendable


@settings(max_examples=4 * SHARE)
@given(requests())
def test_request_with_faults_is_accepted_or_rejected(monitor, request):
    with monitor.case():
        parse_request(lambda value: value, request)


@settings(max_examples=2 * SHARE)
@given(damaged_bytes(BODIES))
def test_damaged_body_is_accepted_or_rejected(monitor, body):
    with monitor.case():
        parse_request(parse_object, body)


@pytest.fixture(scope="module")
def engine():
    with scripted_engine("Fine.", model="demo", limits={"max_decoded_pixels": 100_000}, max_model_len=1024) as engine:
        yield engine


@settings(max_examples=SHARE)
@given(requests(), st.booleans())
def test_engine_completes_or_rejects_request_with_faults(monitor, engine, request, streamed):
    with monitor.case(), suppress(RequestError):
        if streamed:
            assert list(engine.stream(request))[-1].model
        else:
            assert engine.chat(request).choices[0].message.content is not None


def test_valid_request_is_accepted(engine):
    """The properties above would hold for an engine that rejects everything."""
    for request in (*REQUESTS[:3], REQUESTS[4]):
        assert parse_request(lambda value: value, request)
        assert engine.chat(request).choices[0].finish_reason
