"""Token counts, and copies of the chat model."""

from __future__ import annotations

import copy
import pickle

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, trim_messages
from pydantic import SecretStr

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.engine.shared import SHARED, SharedEngines
from dashinfer_vlm_core.errors import ContextLengthExceeded, UnsupportedParameter
from dashinfer_vlm_core.testing import Script, scripted_registry
from dashinfer_vlm_langchain import ChatDashInferVLM
from tests.core.test_reasoning import TEMPLATE
from tests.samples import data_url, encode_video, image_url
from tests.server.conftest import serving
from tests.web import NOT_FOUND, serve

IMAGE = {"type": "image", "url": image_url(168, 168)}
VIDEO = {"type": "video", "url": data_url(encode_video(), "video/mp4")}
QUESTION = {"type": "text", "text": "What is this?"}
MESSAGES = [
    SystemMessage("Be brief."),
    HumanMessage([IMAGE, VIDEO, QUESTION]),
    AIMessage("A picture."),
    HumanMessage("And a video?"),
]


def weather(city: str) -> str:
    """Return the weather in a city."""
    return city


@pytest.fixture(params=["in process", "engine", "server"])
def chat(request, scripted, tiny_checkpoint):
    """A chat model with scripted responses, for each way to reach an engine."""
    if request.param == "in process":
        yield scripted("Yes.").chat
        return
    config = EngineConfig(model=str(tiny_checkpoint), served_model_name="tiny", decoder="scripted")
    with Engine(config, registry=scripted_registry(Script("Yes."))) as engine:
        if request.param == "engine":
            yield ChatDashInferVLM(engine=engine)
            return
        with serving(engine) as server:
            yield ChatDashInferVLM(model="tiny", base_url=f"{server.url}/v1")


@pytest.mark.slow
@pytest.mark.parametrize("messages", [MESSAGES, MESSAGES[3:], MESSAGES[2:]])
def test_count_is_that_of_the_prompt(chat, messages):
    assert chat.get_num_tokens_from_messages(messages) == chat.invoke(messages).usage_metadata["input_tokens"]


@pytest.mark.slow
def test_tools_are_counted(chat):
    with_tools = chat.bind_tools([weather]).invoke(MESSAGES).usage_metadata["input_tokens"]
    assert chat.get_num_tokens_from_messages(MESSAGES, tools=[weather]) == with_tools
    assert with_tools > chat.get_num_tokens_from_messages(MESSAGES)


def test_options_for_media_are_counted(scripted):
    chat = scripted("Yes.", mm_processor_kwargs={"max_pixels": 28 * 28 * 9}, max_tokens=2000).chat
    assert chat.get_num_tokens_from_messages(MESSAGES) < scripted("Yes.").chat.get_num_tokens_from_messages(MESSAGES)


def test_options_for_reasoning_are_counted(scripted, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    options = {"thinking": {"type": "disabled"}, "engine_options": {"chat_template": str(template)}}
    chat = scripted("Yes.", **options).chat
    assert chat.get_num_tokens_from_messages(MESSAGES[3:]) == chat.invoke(MESSAGES[3:]).usage_metadata["input_tokens"]


def test_text_is_tokenized_by_the_models_tokenizer(chat, tiny_checkpoint):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    for text in ("Hello there.", "", "naïve 日本語", "<|im_end|>"):
        assert chat.get_token_ids(text) == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert chat.get_num_tokens(text) == len(chat.get_token_ids(text))


def test_own_function_for_token_ids_is_used():
    chat = ChatDashInferVLM(custom_get_token_ids=lambda text: [1, 2, 3])
    assert chat.get_num_tokens("Hello") == 3


@pytest.mark.slow
def test_trim_messages_counts_images(chat):
    """Only the last message fits into the tokens of a single image."""
    limit = chat.get_num_tokens_from_messages([MESSAGES[1]]) - 1
    trimmed = trim_messages(MESSAGES, max_tokens=limit, token_counter=chat, strategy="last", start_on="human")
    assert trimmed == MESSAGES[3:]
    everything = trim_messages(MESSAGES, max_tokens=2000, token_counter=chat)
    assert everything == MESSAGES


@pytest.mark.slow
def test_messages_longer_than_the_context_are_counted(chat):
    long = [HumanMessage("word " * 1000), *MESSAGES]
    assert chat.get_num_tokens_from_messages(long) > 2048
    with pytest.raises(ContextLengthExceeded):
        chat.invoke(long)
    kept = trim_messages(long, max_tokens=400, token_counter=chat, strategy="last", start_on="human")
    assert kept == MESSAGES[1:]


def test_no_messages_have_no_tokens(scripted):
    assert scripted("Yes.").chat.get_num_tokens_from_messages([]) == 0


def test_server_without_tokenize_is_named():
    with serve({"/tokenize": NOT_FOUND}) as web:
        chat = ChatDashInferVLM(model="x", base_url=f"{web.url('/v1')}")
        with pytest.raises(UnsupportedParameter, match="`/tokenize`"):
            chat.get_num_tokens("Hello")


# Copies


def test_pickled_model_is_equal():
    chat = ChatDashInferVLM(
        model="demo",
        temperature=0,
        top_k=3,
        engine_options={"max_model_len": 512},
        stop=["x"],
    )
    for made in (pickle.loads(pickle.dumps(chat)), copy.deepcopy(chat), copy.copy(chat), chat.model_copy(deep=True)):
        assert made.model_dump() == chat.model_dump()
        assert made.engines is SHARED
        assert made._identifying_params == chat._identifying_params


def test_engine_options_are_part_of_the_cache_key_but_not_shown():
    chats = [
        ChatDashInferVLM(engine_options={"embedding_store": f"redis://:{word}@cache"}) for word in ("word", "sesame")
    ]
    keys = [str(chat._identifying_params) for chat in chats]
    assert keys[0] != keys[1]
    assert "sesame" not in keys[1] + repr(chats[1]) + str(chats[1])


def test_pickled_model_keeps_api_key():
    chat = ChatDashInferVLM(base_url="http://127.0.0.1:9/v1", api_key=SecretStr("sk-1"))
    assert pickle.loads(pickle.dumps(chat)).api_key.get_secret_value() == "sk-1"


def test_deep_copy_shares_the_engine(scripted):
    chat = scripted("Yes.").chat
    copied = copy.deepcopy(chat)
    assert copied.engines is chat.engines
    assert copied.engine_options == chat.engine_options
    assert copied.engine_options is not chat.engine_options
    assert copied.invoke("?").content == "Yes."
    bound = copy.deepcopy(chat.bind(max_tokens=1))
    assert bound.invoke("?").usage_metadata["output_tokens"] == 1


def test_model_with_its_own_engine_cannot_be_pickled():
    for chat in (ChatDashInferVLM(engines=SharedEngines()), ChatDashInferVLM(engine=Engine())):
        assert copy.deepcopy(chat).engine is chat.engine
        with pytest.raises(TypeError, match="`engine_options` or `base_url`"):
            pickle.dumps(chat)
