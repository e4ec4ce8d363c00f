"""Every client with every feature, against an engine with a scripted decoder; docs/clients.md shows the results."""

from __future__ import annotations

import functools
import operator

import openai
import pytest

from dashinfer_vlm_core.protocol import body
from dashinfer_vlm_core.protocol.name_log import NameLog
from tests.clients import table
from tests.clients.drivers import DRIVERS, TOOL, Color, openai_messages, responses_input, weather
from tests.clients.features import CALL, CHECKS, IMAGE, RESPONSE, TEXT, cells, serve_script
from tests.waiting import HANG

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tiny_checkpoint):
    with serve_script(str(tiny_checkpoint)) as served:
        yield served


# Variants, whose parts other tests cover.
SLOW = {"litellm-server", "langchain-server", "chat-openai", "chat-openai-responses"}
# Ctrl-C, which ends the requests of `VLM`, is tested in tests/core/test_offline.py.
CELLS = [cell for cell in cells(list(DRIVERS), slow=SLOW) if cell.id != "vllm-style-cancel"]


@pytest.mark.parametrize(("client", "feature"), CELLS)
def test_client_supports_feature(served, client, feature):
    CHECKS[feature](DRIVERS[client], served)


# Conversations: what a client returns for one turn is sent back in the next one.

CONTENT = openai_messages([IMAGE, TEXT])
FUNCTION = {**TOOL["function"], "strict": True}
FUNCTION["parameters"] = {**FUNCTION["parameters"], "additionalProperties": False}


def openai_client(served):
    http = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(base_url=served.url, api_key="none", max_retries=0, timeout=HANG, http_client=http)


def converse_with_openai(served):
    tools = [{"type": "function", "function": FUNCTION}]
    with openai_client(served) as client:
        messages = list(CONTENT)

        def say(**options):
            message = client.chat.completions.parse(model="tiny", messages=messages, **options).choices[0].message
            messages.append(message.model_dump(warnings=False))
            return message

        call = say(tools=tools, logprobs=True).tool_calls[0]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "Sunny."}]
        say(response_format=Color)
        messages += [{"role": "user", "content": "And now?", "name": "me"}]
        with client.chat.completions.stream(model="tiny", messages=messages) as stream:
            messages += [stream.get_final_completion().choices[0].message.model_dump(), *CONTENT]
        return say().content


def converse_with_responses(served):
    with openai_client(served) as client:
        items = [{"role": "user", "content": "Hello", "type": "message"}]

        def say(**options):
            include = ["message.output_text.logprobs"]
            response = client.responses.parse(model="tiny", input=items, include=include, **options)
            items.extend(item.model_dump(warnings=False) for item in response.output)
            return response

        call = say(tools=[{"type": "function", **FUNCTION}]).output[0]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "Sunny.", "status": None}]
        say(text_format=Color)
        with client.responses.stream(model="tiny", input=items) as stream:
            items += stream.get_final_response().output
        items += responses_input([IMAGE, TEXT])
        return say().output_text


def converse_with_litellm(served):
    import litellm

    with openai_client(served) as client:
        messages = list(CONTENT)

        def say(**options):
            return litellm.completion("openai/tiny", messages=messages, client=client, **options)

        message = say(tools=[TOOL]).choices[0].message
        messages += [message.model_dump(), {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "1"}]
        messages += [say().choices[0].message, *CONTENT]
        messages += [litellm.stream_chunk_builder(list(say(stream=True))).choices[0].message.model_dump(), *CONTENT]
        return say().choices[0].message.content


def converse_with_langchain(served, *, uses_responses_api=False):
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    options = {"model": "tiny", "base_url": served.url, "api_key": "none", "max_retries": 0}
    with openai.DefaultHttpxClient(trust_env=False) as http:
        chat = ChatOpenAI(http_client=http, use_responses_api=uses_responses_api, **options)
        messages = [HumanMessage("Hello")]
        messages += [chat.bind_tools([weather]).invoke(messages)]
        messages += [ToolMessage("Sunny.", tool_call_id=messages[-1].tool_calls[0]["id"], name="weather")]
        messages += [chat.invoke(messages), HumanMessage("And now?", name="me", id="a")]
        messages += [functools.reduce(operator.add, chat.stream(messages)), HumanMessage(CONTENT[0]["content"])]
        return chat.invoke(messages).text


def converse_with_langchain_responses(served):
    return converse_with_langchain(served, uses_responses_api=True)


CONVERSATIONS = [
    converse_with_openai,
    converse_with_responses,
    converse_with_litellm,
    converse_with_langchain,
    converse_with_langchain_responses,
]


@pytest.mark.filterwarnings("ignore:Accessing the 'model_")  # LiteLLM, in streams
@pytest.mark.parametrize("converse", CONVERSATIONS)
def test_fields_of_responses_can_be_sent_back(served, converse, monkeypatch, caplog):
    monkeypatch.setattr(body, "_LOG", NameLog(body.logger, "%s", "No more."))
    served.script.play(CALL, '{"color": "green"}', "No.", RESPONSE)
    assert converse(served) == RESPONSE
    assert len(served.script.requests) == 4
    assert [record.getMessage() for record in caplog.records if record.name == body.__name__] == []


@pytest.mark.parametrize(
    ("number", "clients", "features"),
    [(0, table.CLIENTS, table.FEATURES), (1, table.POOLING_CLIENTS, table.POOLING_FEATURES)],
)
def test_page_has_a_result_or_a_reason_for_every_cell(number, clients, features):
    text = table.PAGE.read_text(encoding="utf-8").split("| Client | ")[number + 1]
    rows = [line.strip("| \n").split(" | ") for line in text.splitlines()[1:] if line.startswith("| ")]
    found = {row[0]: dict(zip(features, row[1:], strict=True)) for row in rows}
    assert found.keys() == set(clients.values())
    for client, title in clients.items():
        for feature, cell in found[title].items():
            assert cell.startswith("no (") == ((client, feature) in table.REASONS)
            assert cell.startswith(("yes", "no ("))


REPORT = """\
<testsuites><testsuite>
<testcase name="a"><properties><property name="client" value="openai text yes"/></properties></testcase>
<testcase name="b"><properties><property name="client" value="llama-index text yes"/></properties><skipped/></testcase>
<testcase name="c"><properties><property name="client" value="openai image yes"/></properties><failure/></testcase>
</testsuite></testsuites>
"""


def test_page_is_rendered_from_reports(tmp_path):
    (tmp_path / "results.xml").write_text(REPORT)
    outcomes = table.read_properties(tmp_path / "results.xml", table.PROPERTY)
    assert outcomes == {
        ("openai", "text"): "yes",
        ("llama-index", "text"): "not run",
        ("openai", "image"): "failed",
    }
    page = table.render(outcomes, "openai 2.54.0.", "On a test machine.")
    assert "| [openai](openai.md) | yes | failed | - |" in page
    assert "| LlamaIndex `OpenAILike` | not run | - | no (2) |" in page
    assert "\n2. LlamaIndex does not" in page


def test_unknown_client_of_mark_is_named():
    with pytest.raises(KeyError, match="'openia', which is not one of openai"):
        table.mark_property("openia", "text")
