"""Rule 34: arguments of tool calls are bounded before they are parsed."""

from __future__ import annotations

import json

import pytest

from dashinfer_vlm_core import EngineConfig
from dashinfer_vlm_core.errors import ContextLengthExceeded
from dashinfer_vlm_core.models.qwen2_vl.config import read_spec
from dashinfer_vlm_core.models.qwen2_vl.prompt_layout import Qwen2VLPromptLayout
from dashinfer_vlm_core.preprocessing.prompt import PromptBuilder
from dashinfer_vlm_core.protocol import ChatRequest
from dashinfer_vlm_core.protocol.json_limits import MAX_CHARACTERS, MAX_DEPTH, MAX_VALUES
from dashinfer_vlm_demo import CHECKPOINT
from tests.security.conftest import LEAKS


def nested(depth):
    return "[" * depth + "]" * depth


def lists(count):
    return "[" + ",".join(["[]"] * count) + "]"


def call(number, arguments):
    return {"id": f"call_{number}", "type": "function", "function": {"name": "f", "arguments": arguments}}


def chat(*arguments):
    calls = [call(number, each) for number, each in enumerate(arguments)]
    return {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": calls}]}


def responses(*arguments):
    calls = [
        {"type": "function_call", "call_id": f"call_{number}", "name": "f", "arguments": each}
        for number, each in enumerate(arguments)
    ]
    return {"input": [{"role": "user", "content": "Hi"}, *calls], "model": "demo"}


HOSTILE = {
    "empty lists": ([lists(MAX_VALUES)], "more than 250000 values"),
    "numbers": (["[" + "1," * MAX_VALUES + "1]"], "more than 250000 values"),
    "strings": (["[" + '"",' * MAX_VALUES + '""]'], "more than 250000 values"),
    "nesting": ([nested(MAX_DEPTH + 1)], "nested too deeply"),
    "nesting near Python's limit": (['{"a":' * 700 + "1" + "}" * 700], "nested too deeply"),
    "brackets without an end": (["[" * 100_000], "nested too deeply"),
    "a long text": (['{"a": "' + "a" * MAX_CHARACTERS + '"}'], "exceeds 8388608 characters"),
    "two calls together": (["{}", lists(MAX_VALUES // 3), lists(MAX_VALUES // 3)], "more than 250000 values"),
}


@pytest.mark.parametrize(("arguments", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_security_34_arguments_are_bounded_before_they_are_parsed(default_server, arguments, reason):
    last = len(arguments) - 1
    for path, body, param in (
        ("/v1/chat/completions", chat(*arguments), f"messages[1].tool_calls[{last}].function.arguments"),
        ("/v1/responses", responses(*arguments), f"input[{last + 1}].arguments"),
    ):
        response = default_server.post(json.dumps(body), path)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), error
        assert f"`{param}`" in error["message"]
        assert reason in error["message"]
        assert not LEAKS.search(error["message"])


def test_security_34_arguments_within_the_limits_are_accepted(default_server):
    for arguments in (nested(MAX_DEPTH), '{"text": "' + "[{:," * 200 + '"}', "no JSON", ""):
        response = default_server.post(json.dumps({**chat(arguments), "max_tokens": 1}))
        assert response.status_code == 200, response.json()


def test_security_34_rendered_arguments_are_bounded_before_tokenization():
    """The text of the arguments is not certainly too long for the context, but its rendering, which has spaces, is."""
    spec, max_model_len = read_spec(CHECKPOINT), 10_000
    prompts = PromptBuilder.load(spec, Qwen2VLPromptLayout(spec), EngineConfig(), max_model_len=max_model_len)
    longest = max(map(len, prompts.tokenizer.get_vocab(with_added_tokens=True)))
    arguments = lists(max_model_len * longest * 9 // 10 // len("[],"))
    with pytest.raises(ContextLengthExceeded, match="have at least"):
        prompts.build(ChatRequest.parse(chat(arguments)), ())


def test_arguments_with_half_of_a_surrogate_pair_stay_text(default_server):
    for path, body in (("/v1/chat/completions", chat), ("/v1/responses", responses)):
        response = default_server.post(json.dumps(body('{"a": "\\ud800"}')), path)
        assert response.status_code == 200, response.json()
