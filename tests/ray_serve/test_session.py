"""Requests about one image, and the turns of one conversation, have one session."""

from __future__ import annotations

import pytest

from dashinfer_vlm_core.protocol import ChatRequest, EmbeddingRequest, RerankRequest, ScoreRequest
from dashinfer_vlm_core.protocol.client import NO_CLIENT, Client
from dashinfer_vlm_ray.session import pooling_session_id, session_id
from tests.cases import cases
from tests.samples import image_url

RED, BLUE = image_url(seed=1), image_url(seed=2)


def image(url, **options):
    return {"type": "image_url", "image_url": {"url": url}, **options}


def video(*frames):
    return {"type": "video_url", "video_url": {"url": list(frames)}}


def text(words):
    return {"type": "text", "text": words}


def user(*parts):
    return {"role": "user", "content": [text(part) if isinstance(part, str) else part for part in parts]}


ANSWER = {"role": "assistant", "content": "Yes."}
SYSTEM = {"role": "system", "content": "Be brief."}


def session(*messages, client=NO_CLIENT, **options):
    return session_id(ChatRequest.parse({"messages": list(messages), **options}), client)


@cases(
    ("one", "other"),
    [
        ([user("What is it?", image(RED))], [user(image(RED), "And why?")]),
        ([user(image(RED))], [user(image(RED)), ANSWER, user("Again.")]),
        ([user(image(RED))], [user(image(RED), image(BLUE))]),
        ([user(image(RED, uuid="a"))], [user({"type": "image_url", "uuid": "a"})]),
        ([user("Hello!")], [user("Hello!"), ANSWER, user("Again.")]),
        ([SYSTEM, user("Hello!")], [SYSTEM, user("Hello!"), ANSWER, user("Again.")]),
        ([user(video(RED, BLUE))], [user(video(RED, BLUE), "What happens?")]),
    ],
)
def test_equal_content_has_one_session(one, other):
    assert session(*one) == session(*other)


@cases(
    ("one", "other"),
    [
        ([user(image(RED))], [user(image(BLUE))]),
        ([user(image(RED))], [user(video(RED))]),
        ([user(image(RED, uuid="a"))], [user(image(RED, uuid="b"))]),
        ([user(video(RED, BLUE))], [user(video(BLUE, RED))]),
        ([user("Hello!")], [user("Goodbye!")]),
        ([user("Hello!")], [SYSTEM, user("Hello!")]),
    ],
)
def test_other_content_has_another_session(one, other):
    assert session(*one) != session(*other)


def test_requests_that_share_no_cache_have_different_sessions():
    message = user(image(RED))
    ours, theirs = Client(cache_namespace="ours"), Client(cache_namespace="theirs")
    found = {
        session(message),
        session(message, cache_salt="a"),
        session(message, client=ours),
        session(message, client=theirs),
    }
    assert len(found) == 4
    assert session(message, client=ours) == session(message, client=ours)


def pooling_session(kind, **fields):
    return pooling_session_id(kind.parse(fields), NO_CLIENT)


def test_embeddings_and_scores_of_one_image_have_one_session():
    """An image is encoded once, also under several instructions and with several documents."""
    embedded = pooling_session(EmbeddingRequest, messages=[user(image(RED))])
    assert embedded == pooling_session(EmbeddingRequest, messages=[user("What?", image(RED))], instruction="Find it.")
    assert embedded == session(user(image(RED)))
    ranked = pooling_session(RerankRequest, query={"image": RED}, documents=["a", {"image": BLUE}])
    assert embedded == ranked == pooling_session(ScoreRequest, text_1="a", text_2=["b", {"image": RED}])
    assert embedded != pooling_session(EmbeddingRequest, messages=[user(image(BLUE))])
    assert embedded != pooling_session(EmbeddingRequest, messages=[user(image(RED))], cache_salt="other")


@pytest.mark.parametrize(
    ("kind", "fields"),
    [(EmbeddingRequest, {"input": ["a", "b"]}), (EmbeddingRequest, {"messages": [user("a")]}),
     (RerankRequest, {"query": "a", "documents": ["b"]})],
)  # fmt: skip
def test_texts_go_to_any_replica(kind, fields):
    assert pooling_session(kind, **fields) == ""
