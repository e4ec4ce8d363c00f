"""Tests of models that reason before they respond."""

from __future__ import annotations

import json
import random
from itertools import groupby

import pytest
from tokenizers import Tokenizer

from dashinfer_vlm_core.errors import InvalidParameter, UnsupportedParameter
from dashinfer_vlm_core.response.reasoning_parser import ReasoningDelta, ReasoningParser
from dashinfer_vlm_core.structured_output.tool_parser import ContentDelta
from dashinfer_vlm_core.testing import scripted_engine
from dashinfer_vlm_core.tokenization.conversation import HERMES
from tests.cases import cases

QUESTION = [{"role": "user", "content": "What is this?"}]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['reasoning_content'] %}<think>\n{{ message['reasoning_content'] }}\n</think>\n\n{% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
)
THOUGHT = "It has {wheels}.\n\nSo it is a car."
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture
def engine(tiny_checkpoint, tmp_path):
    """Start an engine whose chat template ends with `<think>`, and whose decoder returns the given responses."""
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    engines = []

    def start(*responses, template=path):
        options = {} if template is None else {"chat_template": template}
        engines.append(scripted_engine(*responses, model=str(tiny_checkpoint), **options).start())
        return engines[-1]

    yield start
    for started in engines:
        started.close()


def parse(text, *, started=True, pieces=None):
    """Feed `text` in pieces; return the reasoning, and the text after it, whose position is checked."""
    parser, fed = ReasoningParser(HERMES, started=started), pieces or [text]
    events = [*(event for piece in fed for event in parser.feed(piece)), *parser.flush()]
    after = [event for event in events if isinstance(event, ContentDelta)]
    for event in after:
        assert text[event.begin : event.begin + len(event.text)] == event.text
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    return reasoning, "".join(event.text for event in after)


@cases(
    ("text", "started", "expected"),
    [
        (f"{THOUGHT}\n</think>\n\nA car.", True, (THOUGHT, "A car.")),
        (f"\n {THOUGHT} \n\n</think>A\n", True, (THOUGHT, "A\n")),
        (f"<think>\n{THOUGHT}\n</think>\n\nA car.", False, (THOUGHT, "A car.")),
        ("\n<think></think>A car.", False, ("", "A car.")),
        ("A car.", False, ("", "A car.")),
        ("  <thin", False, ("", "  <thin")),
        ("A <think>b</think>", False, ("", "A <think>b</think>")),
        ("It has </thinwheels \n", True, ("It has </thinwheels", "")),
        ("a</think>b</think> <think>c", True, ("a", "b</think> <think>c")),
        ("</think>", True, ("", "")),
        ("", True, ("", "")),
        ("", False, ("", "")),
    ],
)
def test_reasoning_is_split_from_text_however_it_arrives(text, started, expected):
    assert parse(text, started=started) == expected
    rng = random.Random(text)
    for _ in range(20):
        cuts = sorted(rng.choices(range(len(text) + 1), k=4))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parse(text, started=started, pieces=pieces) == expected


def test_reasoning_is_returned_separately_and_counted(engine):
    running = engine(f"{THOUGHT}\n</think>\n\nA car.")
    request = {"messages": QUESTION, "stop": ["wheels", "."], "logprobs": True}
    message = running.chat(request)
    (choice,) = message.choices
    assert choice.message.reasoning_content == THOUGHT
    assert choice.message.content == "A car"  # stop strings concern the text after the reasoning only
    assert choice.finish_reason == "stop"
    assert "".join(entry.token for entry in choice.logprobs.content) == "A car"
    counts = message.usage
    assert 0 < counts.completion_tokens_details.reasoning_tokens < counts.completion_tokens


def test_tokens_of_reasoning_count_toward_the_minimum(engine):
    running = engine(f"{THOUGHT}\n</think>\n\nA car. A car.")
    total = running.chat({"messages": QUESTION}).usage.completion_tokens
    for min_tokens, content in ((5, "A"), (total - 3, "A car. A"), (total, "A car. A car.")):
        choice = running.chat({"messages": QUESTION, "min_tokens": min_tokens, "stop": " car"}).choices[0]
        assert choice.message.content == content


def test_streamed_reasoning_equals_plain(engine):
    running = engine(f"{THOUGHT}\n</think>\n\n{CALL}")
    request = {"messages": QUESTION, "tools": [TOOL], "stream_options": {"include_usage": True}}
    deltas = [choice.delta for chunk in running.stream({**request, "stream": True}) for choice in chunk.choices]
    reasoning = [delta.reasoning_content for delta in deltas if getattr(delta, "reasoning_content", None)]
    assert "".join(reasoning) == THOUGHT
    assert len(reasoning) > 5
    (call,) = running.chat({"messages": QUESTION, "tools": [TOOL]}).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    assert "".join(d.tool_calls[0].function.arguments for d in deltas if d.tool_calls) == call.function.arguments


def test_special_tokens_are_text_on_request(engine):
    running = engine("It <|im_start|>rolls.\n</think>\n\nA <|im_start|>car.")
    for skip, mark in ((True, ""), (False, "<|im_start|>")):
        message = running.chat({"messages": QUESTION, "skip_special_tokens": skip}).choices[0].message
        assert (message.reasoning_content, message.content) == (f"It {mark}rolls.", f"A {mark}car.")


def test_unfinished_reasoning_has_no_content(engine):
    (choice,) = engine(THOUGHT).chat({"messages": QUESTION, "max_tokens": 5}).choices
    assert choice.finish_reason == "length"
    assert choice.message.content is None
    assert THOUGHT.startswith(choice.message.reasoning_content)


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
        {"thinking": {"type": "disabled"}},
        {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_reasoning_can_be_switched_off(engine, fields):
    running = engine("A car.")
    request = {"messages": QUESTION, **fields}
    message = running.chat(request).choices[0].message
    assert message.content == "A car."
    assert not hasattr(message, "reasoning_content")
    assert running.chat({**request, "response_format": {"type": "text"}}).choices[0].message.content == "A car."


@pytest.mark.parametrize(
    ("response", "fields", "content"),
    [
        ('{"a": 1} or 2?\n</think>\n\n{"a": 12}', {"response_format": SCHEMA}, '{"a": 12}'),
        ('<think>no</think>{"a": 12}', {"response_format": SCHEMA}, '{"a": 12}'),
        (f"{CALL}?\n</think>\n\n{CALL}", {"tools": [TOOL], "tool_choice": "required"}, None),
    ],
)
def test_format_applies_after_reasoning(engine, response, fields, content):
    message = engine(response).chat({"messages": QUESTION, **fields}).choices[0].message
    assert message.content == content
    assert message.reasoning_content == response.partition("</think>")[0].strip()
    assert len(message.tool_calls or ()) == ("tools" in fields)


def test_format_applies_at_once_without_reasoning(engine):
    request = {"messages": QUESTION, "response_format": SCHEMA, "reasoning_effort": "none"}
    assert engine('{"a": 12}').chat(request).choices[0].message.content == '{"a": 12}'
    request = {"messages": QUESTION, "response_format": SCHEMA}
    assert engine('{"a": 12}', template=None).chat(request).choices[0].message.content == '{"a": 12}'


def prompt_of(engine, tiny_checkpoint, request, **options):
    """Return the text of a request's prompt, with every special token replaced by its id in brackets."""
    received = []
    engine(lambda decoded: received.append(decoded) or "A car.", **options).chat(request)
    tokenizer = Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))
    special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    pieces = groupby(received[0].token_ids.tolist(), key=special.__contains__)
    return "".join(f"[{ids}]" if found else tokenizer.decode(ids) for found, (*ids,) in pieces)


def test_reasoning_of_earlier_messages_reaches_the_template_as_text(engine, tiny_checkpoint):
    earlier = {"role": "assistant", "content": "A car.", "reasoning_content": "It has <|im_end|> wheels."}
    text = prompt_of(engine, tiny_checkpoint, {"messages": [*QUESTION, earlier, *QUESTION]})
    assert "<think>\nIt has <|im_end|> wheels.\n</think>\n\nA car." in text


def test_template_variables_reach_the_template_as_text(engine, tiny_checkpoint, tmp_path):
    path = tmp_path / "name.jinja"
    path.write_text("{{ name }}<|im_end|>")
    request = {"messages": QUESTION, "chat_template_kwargs": {"name": "a<|im_end|>b"}}
    assert prompt_of(engine, tiny_checkpoint, request, template=path).partition("[")[0] == "a<|im_end|>b"


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"chat_template_kwargs": {"thinking": True}}, InvalidParameter, "Variables of the template: enable_thinking"),
        ({"chat_template_kwargs": {"messages": 1}}, InvalidParameter, "not a variable"),
        ({"chat_template_kwargs": {"raise_exception": 1}}, InvalidParameter, "not a variable"),
        ({"chat_template_kwargs": {"enable_thinking": [1]}}, InvalidParameter, "enable_thinking"),
        ({"reasoning_effort": "high"}, UnsupportedParameter, "cannot change how much the model reasons"),
        ({"reasoning_effort": "much"}, InvalidParameter, "reasoning_effort"),
        ({"thinking": {"type": "much"}}, InvalidParameter, "'enabled', 'disabled' or 'adaptive'"),
    ],
)
def test_unknown_options_are_rejected(engine, fields, error, words):
    with pytest.raises(error, match=words) as caught:
        engine("A car.").chat({"messages": QUESTION, **fields})
    assert caught.value.param.startswith(next(iter(fields)))


def test_model_without_reasoning_rejects_effort_and_keeps_tags(engine):
    running = engine("<think>a</think>b", template=None)
    message = running.chat({"messages": QUESTION, "reasoning_effort": "none"})
    assert message.choices[0].message.content == "<think>a</think>b"
    assert message.usage.completion_tokens_details is None
    for kind in ("disabled", "adaptive"):
        assert running.chat({"messages": QUESTION, "thinking": {"type": kind}}).choices == message.choices
    for fields in ({"reasoning_effort": "low"}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}):
        with pytest.raises(UnsupportedParameter, match="does not have a reasoning phase"):
            running.chat({"messages": QUESTION, **fields})
