"""Requests that are nearly right, against the schema and against a whole engine."""

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
from dashinfer_vlm_server.request_body import parse_object
from tests.fuzz.mutations import REQUESTS, damaged, requests

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # of all cases; each is clocked by itself

SHARE = settings.default.max_examples

BODIES = [json.dumps(request).encode() for request in REQUESTS] + [
    b'{"messages": [{"role": "user", "content": "\\ud83d\\ude00"}], "temperature": 1e-5, "seed": -12345678901}',
    json.dumps(REQUESTS[0]).encode("utf-16"),
    b'{"messages":' + b"[" * 2000 + b"]" * 2000 + b"}",
]


def parsed(make, value):
    """The request, read to its last field; None where it is refused as one should be."""
    try:
        request = ChatRequest.parse(make(value))
    except RequestError as error:
        check_words(error)
        return None
    assert isinstance(request.sampling(), Sampling)
    for media in request.media():
        assert media.given or media.uuid
    assert len(request.template_messages()) == len(request.messages)
    return request


def check_words(error):
    assert 10 < len(error.message) < 1000
    assert error.code
    for words in (error.message, error.param or ""):
        words.encode()  # else they could not be sent


@settings(max_examples=4 * SHARE)
@given(requests())
def test_a_request_with_faults_is_taken_or_refused_by_name(watch, request):
    with watch.case():
        parsed(lambda value: value, request)


@settings(max_examples=2 * SHARE)
@given(damaged(BODIES))
def test_a_damaged_body_is_taken_or_refused(watch, body):
    with watch.case():
        parsed(parse_object, body)


@pytest.fixture(scope="module")
def engine():
    with scripted_engine("Fine.", model="demo", max_decoded_pixels=100_000, max_model_len=1024) as engine:
        yield engine


@settings(max_examples=SHARE)
@given(requests(), st.booleans())
def test_an_engine_answers_a_request_with_faults_or_refuses_it(watch, engine, request, streamed):
    with watch.case(), suppress(RequestError):
        if streamed:
            assert list(engine.stream(request))[-1].model
        else:
            assert engine.chat(request).choices[0].message.content is not None


def test_a_sound_request_is_taken(engine):
    """Else the properties above would hold of an engine that refuses everything."""
    for request in (*REQUESTS[:3], REQUESTS[4]):
        assert parsed(lambda value: value, request)
        assert engine.chat(request).choices[0].finish_reason
