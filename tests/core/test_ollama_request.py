"""Requests of Ollama's API: their validation, and the paths in errors."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dashinfer_vlm_core.errors import RequestError
from dashinfer_vlm_core.protocol.fields import REJECTED_FIELDS
from dashinfer_vlm_core.protocol.ollama import (
    REJECTED_IN_GENERATE,
    REJECTED_IN_OLLAMA,
    OllamaChatRequest,
    OllamaGenerateRequest,
)
from dashinfer_vlm_core.protocol.ollama_models import OllamaEmbeddingsRequest, OllamaEmbedRequest
from dashinfer_vlm_core.protocol.ollama_options import REJECTED_OPTIONS, IgnoredOptions, OllamaOptions, is_zero
from tests.cases import cases
from tests.core.test_schema import JSON

HELLO = {"role": "user", "content": "Hello"}
CALL = {"function": {"name": "f", "arguments": {"a": [1.5, "ü", None]}}}


def chat(*messages, **fields):
    return OllamaChatRequest.parse({"model": "m", "messages": list(messages) or [HELLO], **fields})


def generate(**fields):
    return OllamaGenerateRequest.parse({"model": "m", "prompt": "Hello", **fields})


KINDS = [(chat, REJECTED_IN_OLLAMA), (generate, REJECTED_IN_GENERATE)]


@cases(
    ("request_of", "name", "value"),
    [
        (kind, name, value)
        for kind, rejected in KINDS
        for name, (neutral, _) in rejected.items()
        for value in [*neutral, None]
    ],
)
def test_field_without_effect_is_accepted(request_of, name, value):
    assert request_of(**{name: value}).to_chat().chat == request_of().to_chat().chat


IGNORED_VALUES = {"int | None": 5, "float | None": 0.5, "bool | None": True}


@cases(
    ("name", "value"),
    [(name, value) for name, (neutral, _) in REJECTED_OPTIONS.items() for value in [*neutral, None]]
    + [(name, IGNORED_VALUES[str(field.annotation)]) for name, field in IgnoredOptions.model_fields.items()]
    + [("seed", -1), ("stop", [])],
)
def test_option_without_effect_is_accepted(name, value):
    assert chat(options={name: value}).to_chat().chat == chat().to_chat().chat


@cases(
    ("request_of", "name"),
    [(kind, name) for kind, rejected in KINDS for name in sorted(rejected.keys() | REJECTED_FIELDS.keys())],
)
def test_field_with_another_value_is_rejected(request_of, name):
    with pytest.raises(RequestError) as caught:
        request_of(**{name: "odd"}).to_chat()
    assert caught.value.param == name


def test_fields_become_those_of_a_chat_request():
    request = chat(
        options={"temperature": 0.5, "top_k": 3, "num_predict": 9, "repeat_penalty": 1.1, "stop": "a", "seed": 4},
        format="json",
        think="low",
        logprobs=True,
        top_logprobs=2,
        cache_salt="s",
        stream=False,
    ).to_chat().chat  # fmt: skip
    assert (request.temperature, request.top_k, request.max_tokens, request.repetition_penalty) == (0.5, 3, 9, 1.1)
    assert (request.stop_strings, request.seed, request.reasoning_effort) == (("a",), 4, "low")
    assert (request.logprobs, request.top_logprobs, request.cache_salt) == (True, 2, "s")
    assert (request.output_constraint.kind, request.stream, request.include_usage) == ("json_object", True, True)
    assert not chat(format={"type": "object"}).to_chat().chat.output_constraint.strict


def test_tool_calls_without_ids_get_different_ones():
    result = {"role": "tool", "tool_name": "f", "content": "1"}
    messages = [HELLO, {"role": "assistant", "tool_calls": [CALL, CALL]}, result, result]
    request = chat(*messages, {"role": "assistant", "tool_calls": [{**CALL, "id": "x"}, CALL]}, result).to_chat().chat
    ids = [call.id for message in request.messages for call in message.tool_calls]
    assert ids == ["call_0", "call_1", "x", "call_3"]
    assert [message.name for message in request.messages] == [None, None, "f", "f", None, "f"]
    assert request.messages[1].tool_calls[0].function.arguments == '{"a": [1.5, "ü", null]}'


@cases(
    ("duration", "zero"),
    [(0, True), (-1, False), (300, False), ("0", True), ("0s", True), ("1h0m", False), ("-1m", False), (None, False)],
)
def test_keep_alive_is_a_duration_or_a_number(duration, zero):
    request = chat(keep_alive=duration)
    assert request.unloads is is_zero(duration) is zero


def test_embedding_requests_truncate_unless_they_must_not():
    for request, limit in (
        (OllamaEmbedRequest.parse({"model": "m", "input": "a"}), -1),
        (OllamaEmbedRequest.parse({"model": "m", "input": ["a", "b"], "truncate": False, "dimensions": 0}), None),
        (OllamaEmbeddingsRequest.parse({"model": "m", "prompt": "a"}), -1),
    ):
        embedding = request.to_embedding("n")
        found = embedding.model, embedding.inputs, embedding.truncate_prompt_tokens
        assert found == ("n", tuple(request.texts), limit)
    assert not OllamaEmbedRequest.parse({"model": "m"}).texts


OPTIONS = st.dictionaries(st.sampled_from(sorted(OllamaOptions.model_fields)), JSON, max_size=3)
NAMES = st.sampled_from(["role", "content", "images", "tool_calls", "thinking", "tool_name"])
MESSAGES = st.lists(st.dictionaries(NAMES, JSON), max_size=2)


@pytest.mark.parametrize("kind", [OllamaChatRequest, OllamaGenerateRequest])
@given(JSON, MESSAGES, OPTIONS)
@example({"keep_alive": []}, [HELLO], {})
@settings(max_examples=30, deadline=None)
def test_any_request_is_parsed_or_rejected(kind, fields, messages, options):
    given = fields if isinstance(fields, dict) else {}
    try:
        request = kind.parse({"model": "m", "messages": messages, "prompt": "a", "options": options, **given})
        if not request.is_empty:
            request.to_chat()
    except RequestError as error:
        assert error.message  # noqa: PT017  any other error fails the test
