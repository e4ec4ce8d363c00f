"""Tools: described in the prompt, called in the response, streamed as plain. A script plays a model that calls them."""

from __future__ import annotations

import asyncio
import json
from random import Random

import jsonschema
import pytest
from tokenizers import Tokenizer

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.errors import DecoderFailed, InvalidParameter, UnsupportedParameter
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_core.protocol import ChatRequest
from dashinfer_vlm_core.protocol.sampling import SAMPLING_PARAMETERS
from dashinfer_vlm_core.structured_output.tool_parser import (
    ContentDelta,
    ToolCallArgumentsDelta,
    ToolCallParser,
    ToolCallStart,
)
from dashinfer_vlm_core.testing import EVERYTHING, Script, scripted_engine, scripted_registry
from dashinfer_vlm_core.tokenization.hermes import parse_tool_arguments
from tests.cases import cases
from tests.waiting import until

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city"],
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Reports it.", "parameters": PARAMETERS}}
PING = {"type": "function", "function": {"name": "ping"}}
ASKED = [{"role": "user", "content": "How is it in Rome?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "weather"}}
BOTH_KINDS = pytest.mark.parametrize("guided", [True, False], ids=["guided", "free"])


class Player:
    """An engine whose decoder returns `answer`. The tests share two: starting one takes longer than a test."""

    def __init__(self, supported_params):
        self.answer = ""
        self.engine = scripted_engine(lambda _: self.answer, supported_params=supported_params)


PLAYERS = {}


@pytest.fixture(scope="module", autouse=True)
def _players():
    PLAYERS.update({True: Player(EVERYTHING), False: Player(SAMPLING_PARAMETERS)})
    with PLAYERS[True].engine, PLAYERS[False].engine:
        yield


def play(answer, *, guided=True, **fields):
    """Return the plain response, and the same response collected from a stream."""
    player = PLAYERS[guided]
    player.answer = answer
    request = {"messages": ASKED, "tools": [WEATHER, PING], **fields}
    plain = player.engine.chat(request).choices[0]
    chunks = [chunk.choices[0] for chunk in player.engine.stream({**request, "stream": True})]
    assert collected(chunks) == (plain.message.content or None, calls_of(plain), plain.finish_reason)
    return plain, chunks


def calls_of(choice):
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]


def collected(chunks):
    """Collect chunks as OpenAI's clients do."""
    content, calls, names = None, {}, set()
    for delta in (chunk.delta for chunk in chunks):
        if delta.content:
            content = (content or "") + delta.content
        for piece in delta.tool_calls or ():
            if piece.id:
                assert (piece.type, piece.function.arguments) == ("function", "")
                assert piece.index == len(calls)
                names.add(piece.id)
                calls[piece.index] = [piece.function.name, ""]
            else:
                assert piece.function.name is None
                calls[piece.index][1] += piece.function.arguments
    assert len(names) == len(calls)
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    return content, list(map(tuple, calls.values())), chunks[-1].finish_reason


# Parsing the output


@BOTH_KINDS
def test_tool_call(guided):
    choice, chunks = play(CALL, guided=guided)
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert calls_of(choice) == [("weather", '{"city": "Rome", "days": 3}')]
    assert choice.message.tool_calls[0].id.startswith("call_")
    assert chunks[0].delta.role == "assistant"


@BOTH_KINDS
def test_text_before_two_calls(guided):
    choice, _ = play(f"Let me see.\n{CALL}\n{OTHER}", guided=guided)
    assert choice.message.content == "Let me see."
    assert calls_of(choice) == [("weather", '{"city": "Rome", "days": 3}'), ("ping", "{}")]
    assert len({call.id for call in choice.message.tool_calls}) == 2


def test_special_tokens_around_a_call_are_text_on_request():
    choice, _ = play(f"<|im_start|>Let me see.\n{CALL}", guided=False, skip_special_tokens=False)
    assert choice.message.content == "<|im_start|>Let me see."
    assert calls_of(choice) == [("weather", '{"city": "Rome", "days": 3}')]
    assert play(f"<|im_start|>{CALL}", guided=False)[0].message.content is None


def test_guided_arguments_are_streamed_incrementally():
    _, chunks = play(CALL)
    assert len([chunk for chunk in chunks if chunk.delta.tool_calls]) > 5


def test_parallel_tool_calls_false_gives_one_call():
    """Unguided, the response ends there; guided, a second call is masked."""
    choice, _ = play(f"{CALL}\n{OTHER}", guided=False, parallel_tool_calls=False)
    assert [name for name, _ in calls_of(choice)] == ["weather"]
    assert choice.finish_reason == "tool_calls"
    with pytest.raises(DecoderFailed, match="violates the requested format"):
        play(f"{CALL}\n{OTHER}", parallel_tool_calls=False)


BROKEN = [
    "a <tool_call>\nfoo\n</tool_call> b",
    'a\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"',
    '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "weather", "arguments": "Rome"}</tool_call>',
    '<tool_call>{"name": "weather", "arguments": {"days": NaN}}</tool_call>',
    '<tool_call>["weather"]</tool_call>',
    '<tool_call>{"name": ["weather"], "arguments": {}}</tool_call>',
    "<tool_call>" + "[" * 3000 + "</tool_call>",
    "1 < 2 and <tool",
    "<tool_call><tool_call></tool_call></tool_call>",
]


@cases("text", BROKEN)
def test_malformed_call_is_returned_as_text(text):
    choice, _ = play(text, guided=False)
    assert choice.message.content == text
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"


def test_call_without_end_tag_is_a_call():
    choice, _ = play(CALL.removesuffix("\n</tool_call>"), guided=False)
    assert calls_of(choice) == [("weather", '{"city": "Rome", "days": 3}')]


def test_broken_call_does_not_hide_next_call():
    choice, _ = play(f"<tool_call>\nfoo\n</tool_call>\n{OTHER}\n", guided=False)
    assert choice.message.content == "<tool_call>\nfoo\n</tool_call>"
    assert calls_of(choice) == [("ping", "{}")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{"tool_choice": "required"}, {"tool_choice": NAMED}, {"tool_choice": "auto"}], ids=str
)
def test_truncated_call_is_no_content(fields):
    arguments, found = '{"city": "Rome", "days": 3}', set()
    begin = len(TOKENIZER.encode("<tool_call>", add_special_tokens=False).ids) if "auto" in fields.values() else 1
    for max_tokens in range(begin, len(TOKENIZER.encode(CALL, add_special_tokens=False).ids)):
        choice, _ = play(CALL, max_tokens=max_tokens, **fields)
        assert not choice.message.content
        assert choice.finish_reason == "length"
        for name, beginning in calls_of(choice):
            assert (name, arguments.startswith(beginning)) == ("weather", True)
        found.update(calls_of(choice) or [None])
    assert {None, ("weather", ""), ("weather", '{"')} < found


def test_truncated_response_can_be_sent_back():
    choice, _ = play(CALL, max_tokens=1, tool_choice="required")
    assert (choice.message.content, choice.message.tool_calls) == ("", None)
    play("Hello", messages=[*ASKED, choice.message.to_dict(), *ASKED])


def test_second_call_is_truncated():
    first, second = calls_of(play(f"{CALL}\n{OTHER}", tool_choice="required")[0])
    tokens = len(TOKENIZER.encode(f"{CALL}\n<tool_call>", add_special_tokens=False).ids)
    choice, _ = play(f"{CALL}\n{OTHER}", max_tokens=tokens - 2)
    assert (choice.message.content, calls_of(choice)) == (None, [first])
    assert second == ("ping", "{}")


def test_first_delta_of_a_call_has_no_content():
    for answer, fields, content in (
        (CALL, {}, None),
        (CALL, {"tool_choice": "required"}, None),
        ("Hello", {}, ""),
        ("Hello", {"tools": []}, ""),
    ):
        first = play(answer, **fields)[1][0].delta.to_dict()
        assert first == {"role": "assistant", "content": content, "refusal": None}


def test_without_tools_the_tags_are_text():
    for fields in ({"tools": []}, {"tool_choice": "none"}):
        choice, _ = play(CALL, **fields)
        assert (choice.message.content, choice.finish_reason) == (CALL, "stop")


def test_logprobs_cover_content_only():
    choice, chunks = play(f"Let me see.\n{CALL}", logprobs=True)
    assert "".join(entry.token for entry in choice.logprobs.content) == "Let me see."
    listed = [entry.token for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content]
    assert "".join(listed) == "Let me see."


@cases("seed", range(50))
def test_parsing_is_independent_of_chunking(seed):
    rng = Random(seed)
    parts = [
        rng.choice([CALL, OTHER, "text ", "\n", "<", "<tool_call>", "</tool_call>", '{"a"', "\n\n"]) for _ in range(6)
    ]
    text = "".join(parts)

    def read(pieces):
        reader = ToolCallParser({"weather": PARAMETERS, "ping": None}, guided=False)
        events = [event for piece in pieces for event in reader.feed(piece)] + reader.flush()
        said = "".join(event.text for event in events if isinstance(event, ContentDelta))
        positions = [(event.begin, event.text) for event in events if isinstance(event, ContentDelta)]
        assert all(text[begin : begin + len(piece)] == piece for begin, piece in positions)
        return said, [(event.index, event.name) for event in events if isinstance(event, ToolCallStart)], [
            event.text for event in events if isinstance(event, ToolCallArgumentsDelta)
        ]  # fmt: skip

    whole = read([text])
    assert read(list(text)) == whole
    cuts = sorted(rng.sample(range(len(text)), 3))
    assert read([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole


# Forced calls


def test_forced_call():
    for choice in ("required", NAMED):
        assert [name for name, _ in calls_of(play(CALL, tool_choice=choice)[0])] == ["weather"]
    with pytest.raises(DecoderFailed, match="violates the requested format"):
        play("No.", tool_choice="required")
    for answer in (OTHER, f"{CALL}\n{CALL}"):  # a tool that is forced by name is called once
        with pytest.raises(DecoderFailed, match="violates the requested format"):
            play(answer, tool_choice=NAMED)
    assert len(calls_of(play(f"{CALL}\n{CALL}", tool_choice="required")[0])) == 2


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["\n", "weather", "}", "<tool_call>"])
def test_stop_strings_do_not_match_calls(stop):
    """Clients see neither the tags nor how the name and the arguments are written."""
    for choice in ("auto", "required", NAMED):
        plain, _ = play(CALL, tool_choice=choice, stop=[stop])
        assert calls_of(plain) == calls_of(play(CALL, tool_choice=choice)[0]) != []
        assert plain.finish_reason == "tool_calls"


def test_stop_string_in_the_text_after_a_call():
    plain, _ = play(f"{CALL}Done. Well done.", stop=[" Well"], guided=False)
    assert len(calls_of(plain)) == 1
    assert (plain.message.content, plain.finish_reason) == ("Done.", "tool_calls")


def allowed(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_only_allowed_tools_are_described_and_called(demo):
    required = allowed("required", "weather")
    assert [name for name, _ in calls_of(play(CALL, tool_choice=required)[0])] == ["weather"]
    for answer in (OTHER, "No."):
        with pytest.raises(DecoderFailed, match="violates the requested format"):
            play(answer, tool_choice=required)
    assert play("No.", tool_choice=allowed("auto", "weather"))[0].message.content == "No."
    prompts = [
        prompt_of(demo, messages=ASKED, **fields)[0]
        for fields in (
            {"tools": [WEATHER]},
            {"tools": [WEATHER, PING], "tool_choice": allowed("auto", "weather")},
        )
    ]
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        (allowed("auto", "weather", "other"), "tool_choice.allowed_tools.tools[1].function.name"),
        (allowed("auto"), "tool_choice.allowed_tools.tools"),
        (allowed("none", "weather"), "tool_choice.allowed_tools.mode"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
    ],
)
def test_invalid_allowed_tools_are_rejected(choice, param):
    with pytest.raises(InvalidParameter) as caught:
        ChatRequest.parse({"messages": ASKED, "tools": [WEATHER], "tool_choice": choice})
    assert caught.value.param == param


def test_format_and_tools_can_be_combined():
    form = {"response_format": {"type": "json_object"}}
    assert play('{"a":1}', **form)[0].message.content == '{"a":1}'
    assert calls_of(play(CALL, **form)[0])
    with pytest.raises(DecoderFailed, match="violates the requested format"):
        play("Hello", **form)


@pytest.fixture(scope="module")
def demo():
    with Engine(EngineConfig()) as engine:
        yield engine


@pytest.mark.supports("tools", backend="torch-cpu")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_bundled_model_makes_forced_call(demo, seed, choice):
    request = {"messages": ASKED, "tools": [WEATHER, PING], "tool_choice": choice, "seed": seed, "temperature": 1.5}
    request["parallel_tool_calls"] = seed % 2 == 0
    answer = demo.chat(request).choices[0]
    assert answer.finish_reason == "tool_calls"
    for name, arguments in calls_of(answer):
        assert choice == "required" or name == "weather"
        jsonschema.validate(json.loads(arguments), PARAMETERS if name == "weather" else {"maxProperties": 0})
    chunks = [chunk.choices[0] for chunk in demo.stream({**request, "stream": True})]
    assert choice == "required" or len(calls_of(answer)) == 1
    assert collected(chunks) == (answer.message.content, calls_of(answer), answer.finish_reason)


def test_decoder_without_masks_accepts_only_unforced_tools():
    with scripted_engine(CALL, supported_params=SAMPLING_PARAMETERS) as engine:
        strict = {"type": "function", "function": {**PING["function"], "strict": True}}
        for fields, param in (
            ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice"),
            ({"tools": [WEATHER], "tool_choice": NAMED}, "tool_choice"),
            ({"tools": [WEATHER, strict]}, "tools[1].function.strict"),
        ):
            with pytest.raises(UnsupportedParameter) as caught:
                engine.chat({"messages": ASKED, **fields})
            assert caught.value.param == param


NOT_GUARANTEED = {
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "look-around": ({"type": "array", "items": {"type": "string", "pattern": "(?=a)"}}, "items.pattern"),
    "an unknown type": ({"type": "any"}, "type"),
    "a reference to nothing": ({"$ref": "#/components/schemas/A"}, "$ref"),
    "draft 4": ({"items": {"minimum": 0, "exclusiveMinimum": True}}, "items.exclusiveMinimum"),
}


@cases(("schema", "place"), NOT_GUARANTEED.values())
@cases("tool_choice", ["auto", "required"])
def test_tool_that_cannot_be_guaranteed_is_rejected_only_if_strict(schema, place, tool_choice):
    parameters = {"type": "object", "properties": {"a": schema}}
    call = '<tool_call>\n{"name": "f", "arguments": {"a": []}}\n</tool_call>'
    for strict in ({}, {"strict": None}, {"strict": False}):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters, **strict}}
        assert calls_of(play(call, tools=[PING, tool], tool_choice=tool_choice)[0])
    tool["function"]["strict"] = True
    with pytest.raises(InvalidParameter) as caught:
        play(call, tools=[PING, tool], tool_choice=tool_choice)
    assert caught.value.param == "tools[1].function.parameters"
    assert f"properties.a.{place}" in caught.value.message


def test_arguments_of_a_widened_tool_are_an_object():
    for parameters in ({"type": "any"}, {"type": ["object", "null"]}, {"$ref": "#"}, {"properties": {}, "not": {}}):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        call = '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call>'
        assert calls_of(play(call.format("{}"), tools=[tool])[0]) == [("f", "{}")]
        with pytest.raises(DecoderFailed, match="violates the requested format"):
            play(call.format("[]"), tools=[tool])


@pytest.mark.parametrize("parameters", [{"properties": 5}, {"type": "string"}, {"type": 5}, {"properties": {"a": []}}])
def test_parameters_that_are_no_schema_of_an_object_are_rejected(parameters):
    for strict in (False, True):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}
        with pytest.raises(InvalidParameter) as caught:
            play("Hello", tools=[PING, tool])
        assert caught.value.param == "tools[1].function.parameters"


def test_response_format_that_cannot_be_guaranteed_is_rejected_only_if_strict():
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    assert play("[1, 1]", response_format=form, tools=[])[0].message.content == "[1, 1]"
    with pytest.raises(DecoderFailed, match="violates the requested format"):
        play('["a"]', response_format=form, tools=[])
    strict = {**form, "json_schema": {**form["json_schema"], "strict": True}}
    for fields in ({"response_format": strict}, {"guided_json": schema}):
        with pytest.raises(InvalidParameter, match="uniqueItems"):
            play("[1]", tools=[], **fields)


# Rendering the prompt


TOKENIZER = Tokenizer.from_file(str(load_plugins().models["demo"] / "tokenizer.json"))


def prompt_of(engine, **fields):
    ids = asyncio.run(engine.atokenize(fields))
    return TOKENIZER.decode(ids, skip_special_tokens=False), ids


HISTORY = [
    *ASKED,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": f"call_{city}", "type": "function", "function": {"name": "weather", "arguments": arguments}}
            for city, arguments in (("Rome", '{"city": "Rome"}'), ("Köln", '{"city": "K\\u00f6ln"}'))
        ],
    },
    {"role": "tool", "tool_call_id": "call_Rome", "content": "sunny"},
    {"role": "tool", "tool_call_id": "call_Köln", "content": [{"type": "text", "text": "rain"}]},
]  # fmt: skip


def test_prompt_matches_qwen25_template(demo):
    """Compare with the text of Qwen2.5's published template for the same tools and messages."""
    text, _ = prompt_of(demo, messages=HISTORY, tools=[WEATHER])
    tool = json.dumps(WEATHER)
    assert text == (
        "<|im_start|>system\nYou are a helpful assistant.\n\n# Tools\n\n"
        "You may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{tool}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nHow is it in Rome?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_tools_follow_system_message_of_request(demo):
    for content in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
        text, _ = prompt_of(demo, messages=[{"role": "developer", "content": content}, *ASKED], tools=[PING])
        assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n\n")
        assert text.count("<|im_start|>system") == 1


def test_disabled_tools_are_not_in_prompt(demo):
    assert "# Tools" not in prompt_of(demo, messages=ASKED, tools=[PING], tool_choice="none")[0]


def test_template_with_tool_support_gets_tools(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% for message in messages %}{{ message.role }}: {{ message.content }}"
        "{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %};{% endfor %}"
    )
    with scripted_engine("a", chat_template=template) as engine:
        text, _ = prompt_of(engine, messages=HISTORY[:3], tools=[PING])
    reported = json.dumps([{**PING, "function": {"name": "ping", "parameters": {"type": "object", "properties": {}}}}])
    assert text == f'{reported}user: How is it in Rome?;assistant: {{"city": "Rome"}}{{"city": "Köln"}};tool: sunny;'


def test_empty_arguments_of_a_call_are_an_object():
    call = {"id": "c", "type": "function", "function": {"name": "ping", "arguments": ""}}
    (message,) = parse_tool_arguments([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    "arguments", ['{"city": "<|im_end|>"}', '{"city": "\\u003c|im_end|>"}', '{"<|im_end|>": 1}', "<|im_end|>"]
)
def test_control_tokens_in_tools_and_results_stay_text(demo, arguments):
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    tool = {
        "type": "function",
        "function": {"name": "f", "description": "<|im_end|>", "parameters": {"title": "<|im_end|>"}},
    }
    messages = [
        *ASKED,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "</tool_response><|im_end|>"},
    ]
    end = TOKENIZER.token_to_id("<|im_end|>")
    text, ids = prompt_of(demo, messages=messages, tools=[tool])
    assert ids.count(end) == 4  # system, user, assistant and tool result, one each
    assert text.count("<|im_end|>") > 7


# Several choices


def test_choices_use_consecutive_seeds(demo):
    request = {"messages": ASKED, "temperature": 2, "max_tokens": 12, "ignore_eos": True}
    together = demo.chat({**request, "n": 4, "seed": 2**63 - 2})
    alone = [demo.chat({**request, "seed": (2**63 - 2 + i + 2**63) % 2**64 - 2**63}) for i in range(4)]
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    assert [choice.message for choice in together.choices] == [answer.choices[0].message for answer in alone]
    assert len({choice.message.content for choice in together.choices}) > 1
    assert together.usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert together.usage.completion_tokens == sum(answer.usage.completion_tokens for answer in alone)
    assert together.usage.total_tokens == together.usage.prompt_tokens + together.usage.completion_tokens


def test_choices_are_streamed_by_index(demo):
    request = {"messages": ASKED, "temperature": 1.8, "max_tokens": 12, "n": 3, "seed": 4, "stop": ["e"]}
    plain = demo.chat(request)
    chunks = list(demo.stream({**request, "stream": True, "stream_options": {"include_usage": True}}))
    assert chunks.pop().usage == plain.usage
    for choice in plain.choices:
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert mine[0].delta.role == "assistant"
        assert collected(mine) == (choice.message.content or None, [], choice.finish_reason)


def test_each_choice_takes_a_slot():
    with scripted_engine("a", max_batch_size=2, max_waiting=1) as engine:
        assert len(engine.chat({"messages": ASKED, "n": 3}).choices) == 3
        with pytest.raises(InvalidParameter) as caught:
            engine.chat({"messages": ASKED, "n": 4})
        assert caught.value.param == "n"


def test_failed_choice_ends_the_others():
    script = Script("a " * 50, "b " * 50, DecoderFailed("It broke."), delay=0.01)
    with Engine(EngineConfig(decoder="scripted"), registry=scripted_registry(script)) as engine:
        with pytest.raises(DecoderFailed, match="It broke"):
            engine.chat({"messages": ASKED, "n": 3})
        until(lambda: script.running == 0)


def test_closing_stream_ends_every_choice():
    script = Script("word " * 200, delay=0.1)
    with Engine(EngineConfig(decoder="scripted"), registry=scripted_registry(script)) as engine:
        chunks = engine.stream({"messages": ASKED, "n": 3, "stream": True})
        next(chunks)
        assert script.running == 3
        chunks.close()
        until(lambda: script.running == 0)
