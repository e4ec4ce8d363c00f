"""Chat templates: rendered as in transformers, and sandboxed."""

from __future__ import annotations

import json

import pytest

from dashinfer_vlm_core.errors import CheckpointError, ConfigError, InvalidParameter
from dashinfer_vlm_core.tokenization.chat_template import ChatTemplate, read_chat_template
from dashinfer_vlm_core.tokenization.tokenizer import read_tokenizer
from dashinfer_vlm_demo import CHECKPOINT
from tests.cases import cases
from tests.tiny import TEMPLATE, write_tokenizer

NAMES = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
SYSTEM = {"role": "system", "content": "Be <brief> & \u201ckind\u201d."}
USER = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What\nis it?"}, {"type": "video"}]}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": "caf\u00e9", "times": 2}}}
CONVERSATIONS = {
    "plain": [{"role": "user", "content": "Hi"}],
    "system": [SYSTEM, USER],
    "turns": [USER, {"role": "assistant", "content": "A star."}, USER],
    "calls": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "red"},
    ],
}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
TEMPLATES = {
    "tiny": TEMPLATE,
    "demo": json.loads((CHECKPOINT / "chat_template.json").read_text())["chat_template"],
    "blocks on lines of their own": """
    {% for message in messages %}
        {%- if message.tool_calls %}
            {% for call in message.tool_calls %}
  {{ call.function | tojson }} {{- call.function.arguments | tojson(indent=2) }}
            {% endfor %}
        {% endif %}
    {{ message.role }}: {{ message.content | default("nothing") }}
    {% endfor %}
    {{ tools | tojson(sort_keys=true, ensure_ascii=true) }}{{ documents }}""",
    "names": "{{ eos_token }}{{ bos_token }}{{ pad_token }}{% if add_generation_prompt %}!{% endif %}",
    "what a message has": "{% for m in messages %}{{ m.keys() | list }}{{ 'content' in m }}{% endfor %}",
    "state of a loop": (
        "{% set ns = namespace(count=0, self=1) %}{% for m in messages %}{% if m.role == 'assistant' %}{% continue %}"
        "{% endif %}{% set ns.count = ns.count + 1 %}{% endfor %}{{ ns.count }}{{ ns.self }}"
    ),
    "ended loop": "{% for m in messages %}{{ m.role }}{% break %}{% endfor %}",
    "what the model wrote": (
        "{% set a = 1 %}{% for m in messages %}{%- generation %}{{ m.role }}\n{% endgeneration -%} {% endfor %}"
        "{% generation %}{{ a }}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}"
    ),
    "macro": "{% macro say(m) %}[{{ m.role | upper }}]{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}",
    "the year": "{{ strftime_now('%Y') }}",
    "dictionaries": "{% set d = dict(a=1, **{'b': 2}) %}{{ d.items() | list }}{{ d | length }}",
    "many": "{{ messages[::-1] | map(attribute='role') | join(',') }}{{ messages | length * 2 }}",
}


@pytest.fixture(scope="module")
def published():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(CHECKPOINT)


@cases("tools", [(), TOOLS])
@cases("conversation", CONVERSATIONS)
@cases("name", TEMPLATES)
def test_rendered_text_equals_transformers(published, name, conversation, tools):
    messages = CONVERSATIONS[conversation]
    expected = published.apply_chat_template(
        messages, tools=tools or None, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=True
    )
    assert ChatTemplate({"default": TEMPLATES[name]}, NAMES).render(messages, tools) == expected


def test_named_templates_equal_transformers(published, tmp_path):
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with {{ tools | length }}"}]
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": named}))
    theirs = type(published).from_pretrained(tmp_path)
    ours = read_chat_template(tmp_path, None, read_tokenizer(tmp_path).chat_templates, NAMES)
    assert ours.supports_tools
    for tools in ((), TOOLS):
        expected = theirs.apply_chat_template(
            CONVERSATIONS["plain"], tools=tools or None, tokenize=False, add_generation_prompt=True
        )
        assert ours.render(CONVERSATIONS["plain"], tools) == expected
        assert expected == ("with 1" if tools else "plain")


@pytest.mark.parametrize(
    ("files", "plain", "with_tools"),
    [
        ({}, "own", "own tools"),
        ({"chat_template.jinja": "file"}, "file", "file"),
        ({"chat_template.json": '{"chat_template": "wrapped"}'}, "wrapped", "wrapped"),
        ({"chat_template.jinja": "file", "chat_template.json": '{"chat_template": "wrapped"}'}, "file", "file"),
        ({"chat_template.jinja": "file", "additional_chat_templates/tool_use.jinja": "tools"}, "file", "tools"),
        ({"additional_chat_templates/tool_use.jinja": "tools"}, "own", "tools"),
    ],
)
def test_separate_template_files_override_tokenizer_config(tmp_path, files, plain, with_tools):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    template = read_chat_template(tmp_path, None, {"default": "own", "tool_use": "own tools"}, NAMES)
    assert template.render(CONVERSATIONS["plain"]) == plain
    assert template.render(CONVERSATIONS["plain"], TOOLS) == with_tools


@pytest.mark.parametrize(
    ("source", "knows"),
    [
        ("{% if tools %}{% endif %}", True),
        ("{{ messages }}", False),
        ("tools {{ '{{ tools }}' }}{# tools #}", False),
        ("{% set tools = 1 %}{{ tools }}", False),
        ("{% for m in messages %}{% if m.tool_calls and tools is defined %}{% break %}{% endif %}{% endfor %}", True),
    ],
)
def test_tool_support_of_template(source, knows):
    assert ChatTemplate({"default": source}, {}).supports_tools is knows


def test_templates_without_default_are_setup_error():
    with pytest.raises(ConfigError, match=r"named rag, tool_use, but none named default.*--chat-template"):
        ChatTemplate({"tool_use": "a", "rag": "b"}, {})


def test_checkpoint_without_template_is_reported(tmp_path):
    with pytest.raises(CheckpointError, match="no chat template"):
        read_chat_template(tmp_path, None, {}, {})


@pytest.mark.parametrize("source", ["{{ messages", "{% for %}", "{% nothing %}", "{% generation %}"])
def test_invalid_template_is_reported_at_load(source):
    with pytest.raises(ConfigError, match="The chat template cannot be used"):
        ChatTemplate({"default": source}, {})


@cases(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ (''['__class__'] | attr('__base__')).x }}",
        "{{ dict.__base__ }}{{ dict.mro() }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ strftime_now.__globals__.json }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(namespace) }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ namespace(__class__=1) }}",
        "{{ namespace({'_Namespace__attrs': 1}) }}",
        "{% set n = namespace(a=1) %}{% set n._Namespace__attrs = 1 %}{{ n.a }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{% for a in range(10 ** 9) %}{% endfor %}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ lipsum.__globals__['os'] }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_template_cannot_access_python_internals(source):
    with pytest.raises(InvalidParameter, match="cannot render these messages"):
        ChatTemplate({"default": source}, {}).render([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    "source",
    ["{{ 1 / 0 }}", "{{ 'a' + 1 }}", "{{ [1][5] + 1 }}", "{{ strftime_now(1) }}", "{{ messages | tojson(indent=[]) }}"],
)
def test_any_template_failure_names_messages(source):
    with pytest.raises(InvalidParameter, match="cannot render these messages") as caught:
        ChatTemplate({"default": source}, {}).render([{"role": "user", "content": "Hi"}])
    assert caught.value.param == "messages"
