"""Quantized checkpoints and tool calls of Qwen3.5, through an engine; what it shares with Qwen3-VL is tested in
tests/models."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from tests.conversations import CONVERSATIONS, as_openai
from tests.quantized_checkpoints import LAYOUTS, write_quantized
from tests.qwen3_vl.oracle import Oracle
from tests.recorder import recorded_engine

from .test_text_model import PUBLISHED_MODULES

MESSAGES = CONVERSATIONS["one picture"]
REQUEST = {"messages": as_openai(MESSAGES), "temperature": 0, "max_tokens": 16}
TOOL = {
    "type": "function",
    "function": {
        "name": "paint",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "color": {"type": "string", "maxLength": 5},
                "sizes": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2},
            },
            "required": ["color", "sizes"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.slow
@pytest.mark.supports("quantized-checkpoints", backend="torch-cpu", family="qwen3_5")
@pytest.mark.parametrize("layout", ["awq", "fp8-block"])
def test_quantized_checkpoint_equals_transformers(dense, tmp_path, layout):
    written = write_quantized(dense, tmp_path, LAYOUTS[layout], modules=PUBLISHED_MODULES)
    ids, _ = Oracle(written.twin).generate(MESSAGES, 16)
    engine, recorder = recorded_engine(written.quantized)
    with engine:
        assert recorder.tokens[engine.chat(REQUEST).id] == ids


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "moe"])
def test_forced_tool_call_is_written_in_xml(request, name):
    folder = request.getfixturevalue(name)
    engine, recorder = recorded_engine(folder)
    body = REQUEST | {"max_tokens": 200, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    with engine:
        done = engine.chat(body)
        chunks = [chunk.choices[0].delta.tool_calls or [] for chunk in engine.stream(body)]
    (call,) = done.choices[0].message.tool_calls
    arguments = json.loads(call.function.arguments)
    text = AutoTokenizer.from_pretrained(folder).decode(recorder.tokens[done.id])
    assert text.startswith(
        f"<tool_call>\n<function=paint>\n<parameter=color>\n{arguments['color']}\n</parameter>\n<parameter=sizes>\n"
    )
    assert len(arguments["sizes"]) == 2
    assert "".join(part.function.arguments or "" for calls in chunks for part in calls) == call.function.arguments
