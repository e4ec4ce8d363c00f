"""Tool calls in XML: parsed, guided by a grammar, and rendered, for a chat template like that of Qwen3.5."""

from __future__ import annotations

import asyncio
import json
from random import Random
from types import SimpleNamespace

import jsonschema
import pytest

from dashinfer_vlm_core.errors import DecoderFailed, InvalidParameter
from dashinfer_vlm_core.protocol import ChatRequest
from dashinfer_vlm_core.protocol.sampling import SAMPLING_PARAMETERS
from dashinfer_vlm_core.structured_output.call_syntax import call_syntax
from dashinfer_vlm_core.structured_output.grammar.rules import Rules
from dashinfer_vlm_core.structured_output.grammar_compiler import GrammarCompiler
from dashinfer_vlm_core.structured_output.output_grammar import grammar_for_request
from dashinfer_vlm_core.structured_output.tool_parser import ContentDelta, ToolCallParser, ToolCallStart
from dashinfer_vlm_core.testing import EVERYTHING, scripted_engine
from dashinfer_vlm_core.tokenization.chat_template import ChatTemplate
from dashinfer_vlm_core.tokenization.conversation import HERMES, QWEN_XML, ConversationFormat
from dashinfer_vlm_core.tokenization.hermes import parse_tool_arguments, render_tools_as_text
from tests.cases import cases
from tests.core.test_grammar import SIZE, STOP, TOKENIZER, accepts, random_output
from tests.core.test_tools import ASKED, NAMED, PING, WEATHER, calls_of, collected
from tests.schemas import damaged, random_schema

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}"
    "<tool_call>\n<function=name>\n<parameter=name>\nvalue\n</parameter>\n</function>\n</tool_call><|im_end|>\n"
    "{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ '\n\n' if loop.first and message.content else '' }}"
    "<tool_call>\n<function={{ call.function.name }}>\n{% for name, value in call.function.arguments | items %}"
    "<parameter={{ name }}>\n{{ value if value is string else value | tojson }}\n</parameter>{{ '\n' }}{% endfor %}"
    "</function>\n</tool_call>{{ '' if loop.last else '\n' }}{% endfor %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{{ '<think>\n\n</think>\n\n' if enable_thinking is false else '<think>\n' }}"
)
NO_THOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "when": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "flag": {"type": "boolean"},
        "list": {"$ref": "#/$defs/list"},
        "any": {},
        "many": {"anyOf": [{"type": "integer"}, *[{"type": "string"}] * 300]},
    },
    "$defs": {"list": {"type": "array", "items": {"type": "string"}}},
}
TOOLS = {"f": SCHEMA, "g": None}


def call(_tool="f", **parameters):
    """Write a call with these texts as its parameters."""
    texts = "".join(f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in parameters.items())
    return f"<tool_call>\n<function={_tool}>\n{texts}</function>\n</tool_call>"


CALL = call("weather", city="Rome", days="3")


def read(pieces, *, guided=False, tools=TOOLS):
    """Feed text in pieces; return the content, whose positions are checked, and the calls."""
    parser = ToolCallParser(tools, guided=guided, conversation=QWEN_XML)
    events = [*(event for piece in pieces for event in parser.feed(piece)), *parser.flush()]
    content, calls = "", []
    for event in events:
        if isinstance(event, ContentDelta):
            assert "".join(pieces)[event.begin :].startswith(event.text)
            content += event.text
        elif isinstance(event, ToolCallStart):
            calls.append((event.name, []))
        else:
            calls[event.index][1].append(event.text)
    return content, [(name, "".join(arguments)) for name, arguments in calls]


def cut(rng, text):
    cuts = sorted(rng.choices(range(len(text) + 1), k=4))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


# Parsing


VALUES = [
    ("text", "5", "5"),
    ("text", "", ""),
    ("text", "null", "null"),
    ("text", '\n"a" <b>\n\n</parameter', '\n"a" <b>\n\n</parameter'),
    ("text", "größe \\ 𝄞", "größe \\ 𝄞"),
    ("count", "5", 5),
    ("count", "\n 5 \n", 5),
    ("count", "five", "five"),
    ("when", "5", "5"),
    ("when", "null", None),
    ("when", "None", None),
    ("when", '"now"', '"now"'),
    ("flag", "true", True),
    ("flag", "False", False),
    ("list", '["a", "</function>"]', ["a", "</function>"]),
    ("list", "[1", "[1"),
    ("any", "5", 5),
    ("any", "NaN", "NaN"),
    ("any", "nothing", "nothing"),
    ("any", '{"a": [1.50, null]}', {"a": [1.5, None]}),
    ("many", "5", 5),
    ("other", "1e3", 1000.0),
    ("other", "[" * 100_000, "[" * 100_000),
]


@cases(("name", "text", "value"), VALUES)
@cases("guided", [True, False])
def test_type_of_a_value_is_that_of_the_schema(name, text, value, guided):
    content, ((tool, arguments),) = read([call(**{name: text})], guided=guided)
    assert (content, tool, json.loads(arguments)) == ("", "f", {name: value})


CONTENTS = [
    (f"Look.\n\n{call(count='1')}\n{call('g')}\n", "Look.", [("f", '{"count": 1}'), ("g", "{}")]),
    (f"Look.\n{call('g')} Done.", "Look. Done.", [("g", "{}")]),
    ("<tool_call><function=f><parameter=text>a</parameter></function></tool_call>", "", [("f", '{"text": "a"}')]),
    (call(text="a", count="1").removesuffix("\n</tool_call>"), "", [("f", '{"text": "a", "count": 1}')]),
    (call(text="a</parameter>\n<parameter=text>\nb"), "", [("f", '{"text": "b"}')]),
    (f"{call('h')}\n{call('g')}", call("h"), [("g", "{}")]),
    *[
        (text, text, [])
        for text in (
            call("unknown"),
            call(text="a").replace("</parameter>", ""),
            call(text="a").replace("</function>", ""),
            call(text="a").replace("\n</function>", " and b\n</function>"),
            call(text="a").replace("</function>\n</tool_call>", ""),
            '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
            "1 < 2\n\n<tool",
            "<tool_call></tool_call>",
        )
    ],
]


@cases(("text", "content", "calls"), CONTENTS)
def test_malformed_call_is_content(text, content, calls):
    assert read([text]) == (content, calls)


def test_parsing_is_independent_of_chunking():
    rng = Random(0)
    texts = [text for text, *_ in CONTENTS] + [call(**{name: text}) for name, text, _ in VALUES[:-1]]
    for text in texts:
        whole = read([text])
        assert read(list(text)) == whole
        assert all(read(cut(rng, text)) == whole for _ in range(5))
    for name, text, _ in VALUES[:-1]:
        pieces = list(f"Look.\n\n{call(**{name: text, 'last': '5'})}\n{call('g')}")
        assert read(pieces, guided=True) == read(pieces)


@pytest.mark.parametrize("name", ["list", "text"])
def test_characters_of_a_long_value_are_looked_at_once(name):
    reader = call_syntax(QWEN_XML, TOOLS).arguments("f")
    value, pending, looked_at, arguments = json.dumps(["a\n"] * 1000), "", 0, ""
    for character in call(**{name: value}).partition("<function=f>\n")[2]:
        pending += character
        looked_at += len(pending)
        piece = reader.read(pending)
        pending = pending[piece.length :]
        arguments += piece.arguments
    assert piece.is_last
    assert json.loads(arguments)[name] == (value if name == "text" else json.loads(value))
    assert looked_at < 2 * len(value)


# Grammars


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(TOKENIZER, SimpleNamespace(vocab_size=SIZE, tokens=SimpleNamespace(stop=(STOP,))))


def compiled(compiler, schema, *, strict=True, **fields):
    """Return the grammar of one call of a tool with this schema."""
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}
    request = {"messages": ASKED, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, **fields}
    grammar = grammar_for_request(ChatRequest.parse(request), QWEN_XML, rules=Rules(compiler.compiles))
    return compiler.compile(grammar.rules, grammar.start, param=grammar.param)


def nested(seed):
    """Return a schema whose root combines others."""
    schema = random_schema(seed)
    definitions = schema.pop("$defs")
    schema.pop("maxProperties", None)
    kinds = {"kind": {"const": "a"}}, {"kind": {"enum": ["b", 1, None]}}
    roots = [
        {"$ref": "#/$defs/root"},
        {"allOf": [{"$ref": "#/$defs/root"}, {"properties": {"extra": {"type": ["string", "number"]}}}]},
        {"oneOf": [{"type": "object", "properties": kind, "required": ["kind"]} for kind in kinds]},
        {"type": "object", "additionalProperties": {"type": ["string", "boolean"]}},
    ]
    return {**roots[seed % 4], "$defs": {**definitions, "root": {**schema, "additionalProperties": True}}}


@pytest.mark.slow
@pytest.mark.parametrize("make", [random_schema, nested])
@pytest.mark.parametrize("seed", range(20))
def test_guided_call_is_valid(compiler, make, seed):
    schema = make(seed)
    text = random_output(compiled(compiler, schema), seed)
    content, ((_, arguments),) = read(list(text), guided=True, tools={"f": schema})
    assert content == ""
    jsonschema.validate(json.loads(arguments), schema)
    assert read([text], tools={"f": schema}) == ("", [("f", arguments)])


@pytest.mark.slow
def test_many_guided_calls_are_valid(compiler):
    for seed in range(20, 50):
        for make in (random_schema, nested):
            test_guided_call_is_valid(compiler, make, seed)


STRINGS = [
    ({"type": "string"}, ["", "5", "null", "a\n\nb\n", "<b> </param", "é"], ["</parameter>", "a</parameter>b", "\0"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "a\n", "ßßß"], ["a", "abcd"]),
    ({"type": "string", "pattern": "^a/b|c$"}, ["a/b", "a/bx", "x\nc"], ["x", "xa/b", "cx"]),
    ({"type": "string", "pattern": r"[/|]{2}\d"}, ["a//1", "|/12"], ["/1", "//"]),
    ({"type": "string", "pattern": "(a|b)c", "maxLength": 3}, ["ac", "xbc"], ["c", "xxac"]),
    ({"type": "string", "format": "date"}, ["2028-02-29"], ["2028-13-01", "2028-02-29 "]),
    ({"type": "string", "format": "uri"}, ["any text"], []),
    ({"type": ["string", "null"]}, ["null", "nul", "5", "[1"], ["None", " null"]),
    (
        {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer", "minimum": 10}]},
        ["abc", "1000"],
        ["1", "1.5"],
    ),
    ({"type": ["string", "array"], "items": {"type": "integer"}}, ["[1, 2]", "a[1]", "{"], ["[a]", "[1", " [1]"]),
    ({"enum": ["a", "5", 5, None, "</parameter>"]}, ["a", "5", "null"], ["</parameter>", "b"]),
    ({}, ["5", "true", "[1]", '{"a": 1}', "text", '"text"'], ["True", "None", "[1,", '{"a"']),
]


@cases(("schema", "good", "bad"), STRINGS)
def test_texts_allowed_for_a_parameter(compiler, schema, good, bad):
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    grammar = compiled(compiler, parameters)
    for text in good:
        assert accepts(grammar, call(a=text)), text
        ((_, arguments),) = read([call(a=text)], tools={"f": parameters})[1]
        jsonschema.validate(json.loads(arguments), parameters)
    assert not any(accepts(grammar, call(a=text)) for text in bad)


FORMATS = {
    "date-time": (["2028-01-31T23:59:59Z", "2028-01-31T23:59:59.5+01:00"], ["2028-01-31 23:59:59Z", "2028-01-31"]),
    "time": (["23:59:59Z"], ["24:00:00Z", "23:59"]),
    "duration": (["P1Y2M3DT4H5M6S", "PT5M", "P2W", "P1MT1S"], ["P", "PT", "P1YT", "P1D2M", "P1W2D"]),
    "email": (["ada.l+x@example.org"], ["ada@", "a b@example.org", "@example.org"]),
    "hostname": (["a-1.example.org", "localhost"], ["-a", "a..b", "a_b"]),
    "ipv4": (["255.0.10.1"], ["256.0.0.1", "1.2.3", "01.2.3.4"]),
    "ipv6": (["::", "::1", "1::", "1:2:3:4:5:6:7:8", "1::7:8"], [":", "1:2:3", "1::2::3", "1:2:3:4:5:6:7:8:9"]),
    "uuid": (["12345678-9abc-DEF0-1234-56789abcdef0"], ["12345678-9abc-def0-1234-56789abcdefg"]),
}


@cases("name", FORMATS)
def test_formats_of_strings(compiler, name):
    good, bad = FORMATS[name]
    grammar = compiled(compiler, {"properties": {"a": {"type": "string", "format": name}}, "required": ["a"]})
    assert all(accepts(grammar, call(a=text)) for text in good)
    assert not any(accepts(grammar, call(a=text)) for text in bad)


def test_properties_are_in_order_and_required(compiler):
    boolean = {"type": "boolean"}
    schema = {"type": "object", "properties": {"a": boolean, "b": boolean}, "required": ["b"]}
    for others, more in (({}, False), ({"additionalProperties": {"type": "integer"}}, True)):
        grammar = compiled(compiler, {**schema, **others})
        allowed = [{"b": "true"}, {"a": "true", "b": "false"}]
        assert all(accepts(grammar, call(**parameters)) for parameters in allowed)
        refused = [{}, {"a": "true"}, {"b": "true", "a": "true"}, {"b": "true", "c": "x"}]
        assert not any(accepts(grammar, call(**parameters)) for parameters in refused)
        assert accepts(grammar, call(b="true", c="1", bb="2")) == more


def test_names_of_properties_can_be_listed(compiler):
    grammar = compiled(compiler, {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "null"}})
    assert all(accepts(grammar, call(**dict.fromkeys(names, "null"))) for names in ("", "a", "b", "ab"))
    assert not any(accepts(grammar, call(**dict.fromkeys(names, "null"))) for names in ("c", "ac", "ba"))


NOT_GUARANTEED = {
    "a name with a tag": ({"properties": {"a>": {"type": "null"}}}, "properties.a>"),
    "an enum of objects": ({"enum": [{"a": 1}]}, "enum"),
    "names with a pattern": ({"propertyNames": {"pattern": "a"}}, "propertyNames"),
    "a number of properties": ({"properties": {"a": {}}, "minProperties": 1}, "minProperties"),
    "a pattern with the tag": ({"properties": {"a": {"pattern": "</parameter>"}}}, "properties.a.pattern"),
    "a pattern with an anchor within": ({"properties": {"a": {"pattern": "a^b"}}}, "properties.a.pattern"),
    "a string or a multiple": (
        {"properties": {"a": {"type": ["string", "integer"], "multipleOf": 7, "minimum": 0, "maximum": 10**9}}},
        "properties.a.multipleOf",
    ),
}


@cases(("schema", "place"), NOT_GUARANTEED.values())
def test_schema_that_cannot_be_written_in_xml_is_rejected_only_if_strict(compiler, schema, place):
    assert accepts(compiled(compiler, schema, strict=False), call())
    with pytest.raises(InvalidParameter) as caught:
        compiled(compiler, schema)
    assert f"at {place!r}" in caught.value.message


def test_schema_that_is_too_complex_is_widened_unless_it_is_strict(compiler):
    texts = [{"$ref": "#/$defs/" + "/" * length + "text"} for length in range(10)]
    schema = {"properties": {"a": {"anyOf": texts}}, "$defs": {"text": {"enum": ["x"] * 12_000}}}
    assert accepts(compiled(compiler, schema, strict=False), call(a="5"))
    assert read([call(a="5")], tools={"f": schema}) == ("", [("f", '{"a": 5}')])
    with pytest.raises(InvalidParameter, match="makes the request too complex"):
        compiled(compiler, schema)


@pytest.mark.slow
def test_calls_of_damaged_schemas_are_rejected_or_end(compiler):
    followed = 0
    for seed in range(300):
        rng = Random(seed)
        schema = damaged(rng, random_schema(seed), 0.05)
        schema = {**schema, "type": "object"} if isinstance(schema, dict) else {}
        try:
            grammar = compiled(compiler, schema, strict=seed % 2 == 0)
        except InvalidParameter:
            continue
        followed += 1
        read(list(random_output(grammar, seed)), guided=True, tools={"f": schema})
    assert followed > 50


# Engines


ANSWER = {True: "", False: ""}
ENGINES = {}


@pytest.fixture(scope="module", autouse=True)
def _engines(tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    for guided, params in ((True, EVERYTHING), (False, SAMPLING_PARAMETERS)):
        ENGINES[guided] = scripted_engine(
            lambda _, guided=guided: ANSWER[guided], supported_params=params, chat_template=template
        )
    with ENGINES[True], ENGINES[False]:
        yield


def play(answer, *, guided=True, **fields):
    """Return the plain response, which is that of a stream, and the chunks of the stream."""
    ANSWER[guided] = answer
    request = {"messages": ASKED, "tools": [WEATHER, PING], **fields}
    plain = ENGINES[guided].chat(request).choices[0]
    chunks = [chunk.choices[0] for chunk in ENGINES[guided].stream({**request, "stream": True})]
    assert collected(chunks) == (plain.message.content or None, calls_of(plain), plain.finish_reason)
    return plain, chunks


@cases("fields", [{}, {"tool_choice": "required"}, {"tool_choice": NAMED}])
@cases("thought", ["", "A city.\n</think>\n\n"])
def test_call_is_streamed(fields, thought):
    plain, chunks = play(thought + CALL, **fields, **({} if thought else NO_THOUGHT))
    assert calls_of(plain) == [("weather", '{"city": "Rome", "days": 3}')]
    assert (plain.message.content, plain.finish_reason) == (None, "tool_calls")
    assert getattr(plain.message, "reasoning_content", "") == thought.partition("\n")[0]
    assert len([chunk for chunk in chunks if chunk.delta.tool_calls]) > 4


def test_calls_of_a_decoder_without_masks():
    plain, _ = play(f"A city.\n</think>\n\nLook.\n\n{CALL}\n{call('ping')}", guided=False)
    assert plain.message.content == "Look."
    assert calls_of(plain) == [("weather", '{"city": "Rome", "days": 3}'), ("ping", "{}")]


@pytest.mark.parametrize(
    "answer", [call("ping"), "Rome", call("weather"), call("weather", city="Rome", days="10"), f"{CALL}\n{CALL}"]
)
def test_other_answer_violates_forced_call(answer):
    with pytest.raises(DecoderFailed, match="violates the requested format"):
        play(answer, tool_choice=NAMED, **NO_THOUGHT)


@pytest.mark.slow
def test_truncated_call_has_the_arguments_so_far():
    length = len(TOKENIZER.encode(CALL, add_special_tokens=False).ids)
    whole, found = '{"city": "Rome", "days": 3}', set()
    for max_tokens in range(1, length):
        plain, _ = play(CALL, max_tokens=max_tokens, tool_choice="required", **NO_THOUGHT)
        assert not plain.message.content
        assert plain.finish_reason == "length"
        assert all(name == "weather" and whole.startswith(arguments) for name, arguments in calls_of(plain))
        found.update(calls_of(plain))
    assert {("weather", ""), ("weather", '{"city": "R'), ("weather", '{"city": "Rome", "days": 3')} <= found


# The history


def history(*arguments):
    calls = [
        {"id": f"c{index}", "type": "function", "function": {"name": "f", "arguments": text}}
        for index, text in enumerate(arguments)
    ]
    return [*ASKED, {"role": "assistant", "content": "Look.", "tool_calls": calls}]


ARGUMENTS = [
    ('{"text": "5\\n", "count": 5, "list": ["ß"]}', {"text": "5\n", "count": "5", "list": '["ß"]'}),
    ("{}", {}),
    ("", {}),
    ("Rome", {"arguments": "Rome"}),
    ('["Rome"]', {"arguments": '["Rome"]'}),
    ('{"city": "Ro', {"arguments": '{"city": "Ro'}),
    ('{"city": "\\ud800"}', {"arguments": '{"city": "\\ud800"}'}),
]


@cases(("arguments", "parameters"), ARGUMENTS)
def test_arguments_in_the_history_reach_the_prompt(arguments, parameters):
    messages = history(arguments, "{}")
    ids = asyncio.run(ENGINES[True].atokenize({"messages": messages, "tools": [WEATHER]}))
    text = TOKENIZER.decode(ids, skip_special_tokens=False)
    written = f"Look.\n\n{call(**parameters)}\n{call()}"
    assert f"<|im_start|>assistant\n{written}<|im_end|>\n" in text
    plain = render_tools_as_text(parse_tool_arguments(messages, QWEN_XML), [WEATHER], QWEN_XML)
    assert plain[-1] == {"role": "assistant", "content": written}
    assert "<function=function-name>" in plain[0]["content"]


def test_syntax_is_that_of_the_chat_template():
    others = ConversationFormat(call_begin="<use>", call_end="</use>")
    for source, default, expected in (
        (TEMPLATE, HERMES, QWEN_XML),
        (TEMPLATE, others, others),
        ("{{ tools }}<function=name>{}</function>", HERMES, HERMES),
        ("{{ messages }}", QWEN_XML, QWEN_XML),
    ):
        assert ChatTemplate({"default": source}, {}).conversation(default) == expected
