"""The chat model's four ways to ask, what can be set, and who may leave when."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from langchain_core.callbacks import BaseCallbackHandler, get_usage_metadata_callback
from langchain_core.messages import AIMessageChunk, HumanMessage
from pydantic import ValidationError

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.engine.shared import SHARED
from dashinfer_vlm_core.errors import (
    ConfigError,
    ContextLengthExceeded,
    DeadlineExceeded,
    DecoderFailed,
    EngineClosed,
    EngineError,
    InvalidParameter,
    ModelNotFound,
    QueueFull,
    UnsupportedParameter,
)
from dashinfer_vlm_core.testing import SAMPLING_PARAMETERS, Script, scripted_engine, scripted_registry
from dashinfer_vlm_langchain import ChatDashInferVLM
from tests.server.conftest import serving
from tests.waiting import until

SHAPES = "Which shapes do you know?"
NOWHERE = "http://127.0.0.1:9/v1"
LONG = "A long answer that goes on and on and on. " * 20


def added(chunks):
    first, *rest = chunks
    return sum(rest, first)


async def collect(chunks):
    return [chunk async for chunk in chunks]


def four_ways(chat, question, **options):
    return [
        chat.invoke(question, **options),
        asyncio.run(chat.ainvoke(question, **options)),
        added(chat.stream(question, **options)),
        added(asyncio.run(collect(chat.astream(question, **options)))),
    ]


def told(message):
    """What has to be the same however it was asked."""
    about = {key: value for key, value in message.response_metadata.items() if key != "id"}
    return message.content, message.tool_calls, message.usage_metadata, about


# Ask


def test_the_four_ways_give_the_engines_answer(demo):
    expected = SHARED.get(EngineConfig()).chat({"messages": [{"role": "user", "content": SHAPES}], "temperature": 0})
    answers = four_ways(demo, SHAPES)
    assert answers[0].content == expected.choices[0].message.content
    assert answers[0].usage_metadata["input_tokens"] == expected.usage.prompt_tokens
    assert answers[0].response_metadata["finish_reason"] == "stop"
    assert answers[0].response_metadata["model_name"] == "demo"
    for answer in answers[1:]:
        assert told(answer) == told(answers[0])


def test_usage_tells_what_was_found_in_the_prefix_cache(demo):
    question = "Say something else that nobody has said here before."
    before, after = (demo.invoke(question).usage_metadata for _ in range(2))
    streamed = added(demo.stream(question)).usage_metadata
    assert before["input_token_details"]["cache_read"] < before["input_tokens"] - 1
    assert after["input_token_details"]["cache_read"] == after["input_tokens"] - 1
    assert streamed["input_token_details"]["cache_read"] == after["input_tokens"] - 1


def test_one_chunk_alone_holds_the_usage_and_what_is_said_once(scripted):
    chunks = list(scripted("Yes, and no.").chat.stream("?"))
    assert len(chunks) > 3
    assert [chunk.chunk_position for chunk in chunks] == [None] * (len(chunks) - 1) + ["last"]
    assert [chunk for chunk in chunks if chunk.usage_metadata or chunk.response_metadata] == chunks[-1:]
    assert chunks[-1].usage_metadata["output_tokens"] > 3
    silent = added(scripted("Yes, and no.", stream_usage=False).chat.stream("?"))
    assert silent.usage_metadata is None


def test_invoke_streams_inside_where_callbacks_want_tokens(scripted):
    seen = MediaPreview()
    answer = scripted("Yes, and no.", streaming=True).chat.invoke("?", config={"callbacks": [seen]})
    assert "".join(seen.tokens) == answer.content == "Yes, and no."
    assert len(seen.tokens) > 3


def test_batches_answer_each_question_for_itself(scripted):
    provider = scripted(lambda request: f"{len(request.token_ids)} tokens")
    questions = ["a " * size for size in range(20)]
    answers = [*provider.chat.batch(questions), *asyncio.run(provider.chat.abatch(questions))]
    assert all(answer.content == f"{answer.usage_metadata['input_tokens']} tokens" for answer in answers)
    assert len({answer.content for answer in answers}) == 20


def test_several_answers_come_from_generate_and_count_the_prompt_once(demo):
    with get_usage_metadata_callback() as counted:
        result = demo.generate([[HumanMessage(SHAPES)]], n=3, temperature=1, seed=1)
    first, *others = [generation.message for generation in result.generations[0]]
    assert len(others) == 2
    assert not any(message.usage_metadata for message in others)
    assert counted.usage_metadata["demo"]["input_tokens"] == first.usage_metadata["input_tokens"]
    with pytest.raises(UnsupportedParameter) as caught:
        next(demo.stream(SHAPES, n=3))
    assert caught.value.param == "n"


def test_log_probabilities_come_with_both_kinds_of_answer(demo):
    answers = four_ways(demo, SHAPES, logprobs=True, top_logprobs=2, max_tokens=4)
    listed = [
        [(entry["token"], len(entry["top_logprobs"])) for entry in answer.response_metadata["logprobs"]["content"]]
        for answer in answers
    ]
    assert [len(entries) for entries in listed] == [4] * 4
    assert all(entries == listed[0] for entries in listed)
    assert answers[2].response_metadata["finish_reason"] == "length"


# What can be set


def test_arguments_reach_the_decoder_and_those_of_a_call_come_first(scripted):
    options = {
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 4,
        "max_tokens": 9,
        "top_k": 7,
        "model_kwargs": {"min_tokens": 2},
    }
    provider = scripted("Yes.", **options, extra_body={"presence_penalty": 0.2})
    provider.chat.invoke("?")
    sampling = provider.script.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.max_tokens) == (0.5, 0.9, 4, 9)
    assert (sampling.top_k, sampling.min_tokens, sampling.presence_penalty) == (7, 2, 0.2)
    provider.chat.bind(temperature=1.5).invoke("?", max_completion_tokens=5, top_k=3)
    sampling = provider.script.requests[-1].sampling
    assert (sampling.temperature, sampling.seed, sampling.max_tokens, sampling.top_k) == (1.5, 4, 5, 3)


def test_langchains_other_names_are_taken(tiny_checkpoint):
    chat = ChatDashInferVLM(
        model_name=str(tiny_checkpoint), max_completion_tokens=9, stop_sequences=["x"], request_timeout=3, api_key="k"
    )
    assert (chat.model, chat.model_name, chat.max_tokens) == (str(tiny_checkpoint), str(tiny_checkpoint), 9)
    assert (chat.stop, chat.timeout) == (["x"], 3)
    assert "'k'" not in repr(chat)


def test_a_stop_string_ends_the_answer(scripted):
    chat = scripted("One, two, three.", stop=[" three"]).chat
    assert chat.invoke("?").content == "One, two,"
    assert [answer.content for answer in four_ways(chat, "?", stop=[" two"])] == ["One,"] * 4


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"temprature": 0}, ValidationError, "temprature"),
        ({"timeout": 0}, ValidationError, "timeout"),
        ({"max_retries": -1}, ValidationError, "max_retries"),
        ({"model_kwargs": {"topk": 1}}, UnsupportedParameter, "topk"),
        ({"temperature": 3}, InvalidParameter, "temperature"),
        ({"best_of": 2}, UnsupportedParameter, "best_of"),
        ({"stop": ["a"] * 5}, InvalidParameter, "stop"),
        ({"engine_options": {"max_batch": 1}}, ConfigError, "max_batch"),
        ({"base_url": "localhost"}, ConfigError, "api_base"),
        ({"base_url": NOWHERE, "engine_options": {"max_batch_size": 1}}, InvalidParameter, "engine_options"),
        ({"engine": Engine(), "base_url": NOWHERE}, InvalidParameter, "engine"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_when_the_model_is_made(arguments, error, named):
    with pytest.raises(error, match=named):
        ChatDashInferVLM(**arguments)


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"temprature": 0}, UnsupportedParameter, "temprature"),
        ({"top_k": -2}, InvalidParameter, "top_k"),
        ({"timeout": -1}, ValidationError, "timeout"),
        ({"reasoning_effort": "low"}, UnsupportedParameter, "reasoning_effort"),
        ({"model": "./no-such-folder"}, Exception, "no-such-folder"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_a_call(scripted, options, error, named):
    provider = scripted("Yes.")
    with pytest.raises(error, match=named):
        provider.chat.invoke("?", **options)
    with pytest.raises(error, match=named):
        list(provider.chat.stream("?", **options))
    assert not provider.script.requests


def test_an_engine_can_be_handed_over(tiny_checkpoint):
    with scripted_engine("Yes.", model=str(tiny_checkpoint), served_model_name="eyes") as engine:
        chat = ChatDashInferVLM(engine=engine)
        assert chat.invoke("?").response_metadata["model_name"] == "eyes"
        assert chat.profile["image_inputs"]
        with pytest.raises(ModelNotFound):
            chat.invoke("?", model="ears")


def test_the_profile_says_what_the_model_takes(scripted):
    profile = ChatDashInferVLM(engine_options={"max_model_len": 512}).profile
    assert profile["max_input_tokens"] == 512
    assert profile["image_inputs"]
    assert profile["video_inputs"]
    assert profile["structured_output"]
    assert (
        ChatDashInferVLM(model="demo").profile["max_input_tokens"] == SHARED.get(EngineConfig()).status().max_model_len
    )
    assert ChatDashInferVLM(base_url=NOWHERE).profile is None
    assert not ChatDashInferVLM(engine_options={"decoder": "dashinfer"}).profile["structured_output"]


def test_langchains_cache_tells_models_apart(scripted):
    from langchain_core.caches import InMemoryCache

    cache = InMemoryCache()
    first = scripted("One.", "Two.", cache=cache, temperature=0)
    assert [first.chat.invoke("?").content for _ in range(2)] == ["One.", "One."]
    other = first.chat.model_copy(update={"temperature": 1.0})
    assert other.invoke("?").content == "Two."
    assert len(first.script.requests) == 2


# A server


def test_a_server_gives_the_same_answers(demo):
    with serving(SHARED.get(EngineConfig())) as server:
        remote = ChatDashInferVLM(base_url=f"{server.url}/v1", model="demo", temperature=0, api_key="none")
        _, expected = (told(demo.invoke(SHAPES)) for _ in range(2))  # the usage names what the prefix cache held
        assert [told(answer) for answer in four_ways(remote, SHAPES)] == [expected] * 4
        with pytest.raises(InvalidParameter) as caught:
            remote.invoke(SHAPES, top_k=-2)
        assert caught.value.param == "top_k"
        assert remote.invoke(SHAPES, of_another_server=1).content == expected[0]


# Errors


class MediaPreview(BaseCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.errors: list[BaseException] = []

    def on_llm_new_token(self, token, **_):
        self.tokens.append(token)

    def on_llm_error(self, error, **_):
        self.errors.append(error)


@pytest.mark.parametrize("error", [QueueFull("Busy."), DecoderFailed("Dead.")])
def test_errors_reach_the_caller_and_the_callbacks_as_they_are(scripted, error):
    seen = MediaPreview()
    config = {"callbacks": [seen]}
    chat = scripted(error).chat
    for ask in (
        lambda: chat.invoke("?", config=config),
        lambda: asyncio.run(chat.ainvoke("?", config=config)),
        lambda: list(chat.stream("?", config=config)),
        lambda: asyncio.run(collect(chat.astream("?", config=config))),
    ):
        with pytest.raises(type(error), match=error.message):
            ask()
    assert [type(one) for one in seen.errors] == [type(error)] * 4
    assert seen.tokens == []


def test_a_prompt_that_does_not_fit_says_so(scripted):
    with pytest.raises(ContextLengthExceeded):
        scripted("Yes.", engine_options={"max_model_len": 16}).chat.invoke("?")


def test_another_model_answers_where_this_one_cannot(scripted):
    broken, whole = scripted(QueueFull("Busy.")), scripted("Yes.")
    either = broken.chat.with_fallbacks([whole.chat], exceptions_to_handle=(EngineError,))
    assert [answer.content for answer in four_ways(either, "?")] == ["Yes."] * 4
    with pytest.raises(InvalidParameter):
        either.invoke("?", top_k=-2)


def test_langchain_tries_again_what_may_succeed_later(scripted):
    provider = scripted(QueueFull("Busy."), "Yes.")
    patient = provider.chat.with_retry(retry_if_exception_type=(EngineError,), wait_exponential_jitter=False)
    assert patient.invoke("?").content == "Yes."
    with pytest.raises(InvalidParameter):
        patient.invoke("?", top_k=-2)
    assert len(provider.script.requests) == 2


@pytest.mark.parametrize("way", range(4))
def test_the_model_itself_tries_again_as_often_as_it_is_told(scripted, way):
    busy = QueueFull("Busy.", retry_after=0.01)
    assert four_ways(scripted(busy, busy, busy, *["Yes."] * 4, max_retries=3).chat, "?")[way].content == "Yes."
    with pytest.raises(QueueFull):
        scripted(busy, busy, "Yes.", max_retries=1).chat.invoke("?")


def test_what_cannot_succeed_is_not_tried_again(scripted):
    provider = scripted(UnsupportedParameter("Never."), "Yes.", max_retries=3)
    with pytest.raises(UnsupportedParameter):
        provider.chat.invoke("?")
    assert len(provider.script.requests) == 1


# Leaving


@pytest.fixture
def slow(scripted):
    """A chat model that is loaded, and whose answers take minutes."""
    provider = scripted("Ready.", LONG)
    provider.chat.invoke("?")
    provider.script.delay = 0.2
    return provider


def idle(provider):
    return lambda: provider.script.running == 0


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_that_takes_too_long_is_given_up(slow, streamed):
    with pytest.raises(DeadlineExceeded):
        list(slow.chat.stream("?", timeout=0.5)) if streamed else slow.chat.invoke("?", timeout=0.5, max_retries=5)
    until(idle(slow))
    assert len(slow.script.requests) <= 2  # the first one loaded the model; the second is not tried again


def test_a_stream_that_has_begun_is_not_tried_again(slow):
    chunks = slow.chat.stream("?", max_retries=3)
    next(chunks)
    slow.engines.close()
    with pytest.raises(EngineClosed):
        list(chunks)
    assert len(slow.script.requests) == 2


def test_closing_a_stream_frees_its_place(slow):
    chunks = slow.chat.stream("?")
    assert isinstance(next(chunks), AIMessageChunk)
    assert slow.script.running == 1
    chunks.close()
    until(idle(slow))


def test_closing_a_stream_frees_its_place_on_an_event_loop(slow):
    async def leave():
        chunks = slow.chat.astream("?")
        await anext(chunks)
        assert slow.script.running == 1
        await chunks.aclose()

    asyncio.run(leave())
    until(idle(slow))


def test_cancelling_a_task_frees_its_place(slow):
    async def leave():
        task = asyncio.create_task(slow.chat.ainvoke("?"))
        await asyncio.to_thread(until, lambda: slow.script.running == 1)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    until(idle(slow))


def test_a_decoder_that_cannot_be_held_to_a_schema_says_so(scripted):
    chat = scripted("Yes.", supported_params=SAMPLING_PARAMETERS).chat
    with pytest.raises(UnsupportedParameter) as caught:
        chat.with_structured_output(method="json_mode").invoke("?")
    assert caught.value.param == "response_format"


def test_engines_are_shared_by_equal_models(tiny_checkpoint):
    from dashinfer_vlm_core.engine.shared import SharedEngines

    engines = SharedEngines(scripted_registry(Script("Yes.")))
    options = {"model": str(tiny_checkpoint), "engines": engines, "engine_options": {"decoder": "scripted"}}
    config = EngineConfig(model=str(tiny_checkpoint), decoder="scripted")
    ChatDashInferVLM(**options).invoke("?")
    engine = engines.get(config)
    ChatDashInferVLM(**options, temperature=0).invoke("?")
    assert engines.get(config) is engine
    engines.close()
