"""The chat model: invoke and stream, parameters, errors, timeouts and cancellation."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from langchain_core.callbacks import BaseCallbackHandler, get_usage_metadata_callback
from langchain_core.messages import AIMessageChunk, HumanMessage
from pydantic import ValidationError

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.engine.managed_models import ManagedModel
from dashinfer_vlm_core.engine.manager import ModelManager
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
from tests.cases import cases
from tests.lora_folders import write_lora
from tests.server.conftest import serving
from tests.waiting import until

SHAPES = "Which shapes do you know?"
NOWHERE = "http://127.0.0.1:9/v1"
LONG = "A long response that goes on and on and on. " * 20


def merge_chunks(chunks):
    first, *rest = chunks
    return sum(rest, first)


async def collect(chunks):
    return [chunk async for chunk in chunks]


def call_all_ways(chat, prompt, **options):
    return [
        chat.invoke(prompt, **options),
        asyncio.run(chat.ainvoke(prompt, **options)),
        merge_chunks(chat.stream(prompt, **options)),
        merge_chunks(asyncio.run(collect(chat.astream(prompt, **options)))),
    ]


def comparable(message):
    """Return what must be equal for all ways to call the model."""
    about = {key: value for key, value in message.response_metadata.items() if key != "id"}
    return message.content, message.tool_calls, message.usage_metadata, about


# Calls


def test_invoke_and_stream_return_the_engines_response(demo):
    expected = SHARED.get(EngineConfig()).chat({"messages": [{"role": "user", "content": SHAPES}], "temperature": 0})
    responses = call_all_ways(demo, SHAPES)
    assert responses[0].content == expected.choices[0].message.content
    assert responses[0].usage_metadata["input_tokens"] == expected.usage.prompt_tokens
    assert responses[0].response_metadata["finish_reason"] == "stop"
    assert responses[0].response_metadata["model_name"] == "demo"
    for response in responses[1:]:
        assert comparable(response) == comparable(responses[0])


def test_usage_reports_prefix_cache_hits(demo):
    prompt = "Say something else that nobody has said here before."
    before, after = (demo.invoke(prompt).usage_metadata for _ in range(2))
    streamed = merge_chunks(demo.stream(prompt)).usage_metadata
    assert before["input_token_details"]["cache_read"] < before["input_tokens"] - 1
    assert after["input_token_details"]["cache_read"] == after["input_tokens"] - 1
    assert streamed["input_token_details"]["cache_read"] == after["input_tokens"] - 1


def test_last_chunk_contains_usage_and_metadata(scripted):
    chunks = list(scripted("Yes, and no.").chat.stream("?"))
    assert len(chunks) > 3
    assert [chunk.chunk_position for chunk in chunks] == [None] * (len(chunks) - 1) + ["last"]
    assert [chunk for chunk in chunks if chunk.usage_metadata or chunk.response_metadata] == chunks[-1:]
    assert chunks[-1].usage_metadata["output_tokens"] > 3
    silent = merge_chunks(scripted("Yes, and no.", stream_usage=False).chat.stream("?"))
    assert silent.usage_metadata is None


def test_streaming_invoke_passes_tokens_to_callbacks(scripted):
    recorder = CallbackRecorder()
    response = scripted("Yes, and no.", streaming=True).chat.invoke("?", config={"callbacks": [recorder]})
    assert "".join(recorder.tokens) == response.content == "Yes, and no."
    assert len(recorder.tokens) > 3


def test_batch_returns_one_response_per_prompt(scripted):
    provider = scripted(lambda request: f"{len(request.token_ids)} tokens")
    prompts = ["a " * size for size in range(20)]
    responses = [*provider.chat.batch(prompts), *asyncio.run(provider.chat.abatch(prompts))]
    assert all(response.content == f"{response.usage_metadata['input_tokens']} tokens" for response in responses)
    assert len({response.content for response in responses}) == 20


def test_generate_n_completions_counts_prompt_once(demo):
    with get_usage_metadata_callback() as counted:
        result = demo.generate([[HumanMessage(SHAPES)]], n=3, temperature=1, seed=1)
    first, *others = [generation.message for generation in result.generations[0]]
    assert len(others) == 2
    assert not any(message.usage_metadata for message in others)
    assert counted.usage_metadata["demo"]["input_tokens"] == first.usage_metadata["input_tokens"]
    with pytest.raises(UnsupportedParameter) as caught:
        next(demo.stream(SHAPES, n=3))
    assert caught.value.param == "n"


def test_logprobs_in_responses_and_streams(demo):
    responses = call_all_ways(demo, SHAPES, logprobs=True, top_logprobs=2, max_tokens=4)
    listed = [
        [(entry["token"], len(entry["top_logprobs"])) for entry in response.response_metadata["logprobs"]["content"]]
        for response in responses
    ]
    assert [len(entries) for entries in listed] == [4] * 4
    assert all(entries == listed[0] for entries in listed)
    assert responses[2].response_metadata["finish_reason"] == "length"


# Parameters


def test_parameters_reach_decoder_and_call_takes_precedence(scripted):
    options = {
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 4,
        "max_tokens": 9,
        "top_k": 7,
        "min_p": 0.1,
        "model_kwargs": {"min_tokens": 2, "no_repeat_ngram_size": 9},
    }
    provider = scripted("Yes.", **options, extra_body={"presence_penalty": 0.2})
    provider.chat.invoke("?")
    sampling = provider.script.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.max_tokens) == (0.5, 0.9, 4, 9)
    assert (sampling.top_k, sampling.min_tokens, sampling.presence_penalty) == (7, 2, 0.2)
    assert (sampling.min_p, sampling.no_repeat_ngram_size) == (0.1, 9)
    provider.chat.bind(temperature=1.5).invoke("?", max_completion_tokens=5, top_k=3)
    sampling = provider.script.requests[-1].sampling
    assert (sampling.temperature, sampling.seed, sampling.max_tokens, sampling.top_k) == (1.5, 4, 5, 3)
    aliased = provider.chat.model_copy(update={"max_tokens": None, "model_kwargs": {"max_completion_tokens": 3}})
    aliased.invoke("?")
    assert provider.script.requests[-1].sampling.max_tokens == 3


def test_langchain_parameter_aliases_are_accepted(tiny_checkpoint):
    chat = ChatDashInferVLM(
        model_name=str(tiny_checkpoint), max_completion_tokens=9, stop_sequences=["x"], request_timeout=3, api_key="k"
    )
    assert (chat.model, chat.model_name, chat.max_tokens) == (str(tiny_checkpoint), str(tiny_checkpoint), 9)
    assert (chat.stop, chat.timeout) == (["x"], 3)
    assert "'k'" not in repr(chat)


def test_stop_string_ends_response(scripted):
    chat = scripted("One, two, three.", stop=[" three"]).chat
    assert chat.invoke("?").content == "One, two,"
    assert [response.content for response in call_all_ways(chat, "?", stop=[" two"])] == ["One,"] * 4


@cases(
    ("arguments", "error", "named"),
    [
        ({"temprature": 0}, ValidationError, "temprature"),
        ({"timeout": 0}, ValidationError, "timeout"),
        ({"max_retries": -1}, ValidationError, "max_retries"),
        ({"model_kwargs": {"topk": 1}}, UnsupportedParameter, "topk"),
        ({"temperature": 3}, InvalidParameter, "temperature"),
        ({"best_of": 2}, UnsupportedParameter, "best_of"),
        ({"stop": ["a"] * 17}, InvalidParameter, "stop"),
        ({"engine_options": {"max_batch": 1}}, ConfigError, "max_batch"),
        ({"base_url": "localhost"}, ConfigError, "api_base"),
        ({"base_url": NOWHERE, "engine_options": {"max_batch_size": 1}}, InvalidParameter, "engine_options"),
        ({"engine": Engine(), "base_url": NOWHERE}, InvalidParameter, "engine"),
    ],
)  # fmt: skip
def test_invalid_argument_is_rejected_by_constructor(arguments, error, named):
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
def test_invalid_argument_is_rejected_by_call(scripted, options, error, named):
    provider = scripted("Yes.")
    with pytest.raises(error, match=named):
        provider.chat.invoke("?", **options)
    with pytest.raises(error, match=named):
        list(provider.chat.stream("?", **options))
    assert not provider.script.requests


@pytest.mark.parametrize(
    "options",
    [
        {"api_key": "secret"},
        {"base_url": NOWHERE},
        {"engine_options": {"max_batch_size": 1}},
        {"model_kwargs": {"top_k": 3}},
        {"streaming": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_field_of_chat_model_is_rejected_per_call(scripted, options):
    provider = scripted("Yes.")
    (name,) = options
    for chat in (provider.chat, ChatDashInferVLM(base_url=NOWHERE)):
        with pytest.raises(UnsupportedParameter, match=f"`{name}` can only be set on the chat model") as caught:
            chat.invoke("?", **options)
        assert caught.value.param == name
        with pytest.raises(UnsupportedParameter, match=name):
            list(chat.bind(**options).stream("?"))
    assert not provider.script.requests


def test_lora_is_chosen_by_model_name(scripted, tiny_checkpoint, tmp_path):
    folder = write_lora(tmp_path / "trained", tiny_checkpoint, ("q_proj",))
    options = {"model": str(tiny_checkpoint), "served_model_name": "base", "lora": {"sql": str(folder)}}
    provider = scripted("Yes.", model="sql", engine_options=options)
    responses = [provider.chat.invoke("?"), provider.chat.invoke("?", model="base")]
    assert [response.response_metadata["model_name"] for response in responses] == ["sql", "base"]
    used = [request.lora.name if request.lora else None for request in provider.script.requests]
    assert used == ["sql", None]


def test_engine_can_be_passed(tiny_checkpoint):
    with scripted_engine("Yes.", model=str(tiny_checkpoint), served_model_name="eyes") as engine:
        chat = ChatDashInferVLM(engine=engine)
        assert chat.invoke("?").response_metadata["model_name"] == "eyes"
        assert chat.profile["image_inputs"]
        with pytest.raises(ModelNotFound):
            chat.invoke("?", model="ears")


def test_profile_contains_model_capabilities(scripted):
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


def test_langchain_cache_distinguishes_parameters(scripted):
    from langchain_core.caches import InMemoryCache

    cache = InMemoryCache()
    first = scripted("One.", "Two.", "Three.", cache=cache, temperature=0)
    assert [first.chat.invoke("?").content for _ in range(2)] == ["One.", "One."]
    others = [first.chat.model_copy(update=change) for change in ({"temperature": 1.0}, {"stop": ["x"]})]
    assert [other.invoke("?").content for other in others] == ["Two.", "Three."]
    assert len(first.script.requests) == 3


def test_cache_key_has_models_and_options_of_manager():
    def keys(*models, **options):
        managed = [ManagedModel(config=EngineConfig(model=model, **options)) for model in models]
        manager = ModelManager(managed, registry=scripted_registry(Script("Yes.")))
        with contextlib.closing(manager):
            return [ChatDashInferVLM(engine=each)._get_llm_string() for each in (manager, manager.models()[0])]

    found = [*keys("demo"), *keys("a/b"), *keys("demo", max_pixels=100352), *keys("demo", "a/b"), *keys("a/b", "demo")]
    assert found[0] == found[1] == found[7]  # the only model of a manager, and the first of two
    assert len(set(found)) == 5
    assert "a/b" in found[2]


# A server


def test_server_returns_same_responses(demo):
    with serving(SHARED.get(EngineConfig())) as server:
        remote = ChatDashInferVLM(base_url=f"{server.url}/v1", model="demo", temperature=0, api_key="none")
        _, expected = (comparable(demo.invoke(SHAPES)) for _ in range(2))  # the usage contains the prefix cache hits
        assert [comparable(response) for response in call_all_ways(remote, SHAPES)] == [expected] * 4
        with pytest.raises(InvalidParameter) as caught:
            remote.invoke(SHAPES, top_k=-2)
        assert caught.value.param == "top_k"
        assert remote.invoke(SHAPES, of_another_server=1).content == expected[0]


# Errors


class CallbackRecorder(BaseCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.errors: list[BaseException] = []

    def on_llm_new_token(self, token, **_):
        self.tokens.append(token)

    def on_llm_error(self, error, **_):
        self.errors.append(error)


@pytest.mark.parametrize("error", [QueueFull("Busy."), DecoderFailed("Dead.")])
def test_errors_reach_caller_and_callbacks_unchanged(scripted, error):
    recorder = CallbackRecorder()
    config = {"callbacks": [recorder]}
    chat = scripted(error).chat
    for call in (
        lambda: chat.invoke("?", config=config),
        lambda: asyncio.run(chat.ainvoke("?", config=config)),
        lambda: list(chat.stream("?", config=config)),
        lambda: asyncio.run(collect(chat.astream("?", config=config))),
    ):
        with pytest.raises(type(error), match=error.message):
            call()
    assert [type(one) for one in recorder.errors] == [type(error)] * 4
    assert recorder.tokens == []


def test_too_long_prompt_raises_context_length_exceeded(scripted):
    with pytest.raises(ContextLengthExceeded):
        scripted("Yes.", engine_options={"max_model_len": 16}).chat.invoke("?")


def test_fallback_model_responds(scripted):
    broken, whole = scripted(QueueFull("Busy.")), scripted("Yes.")
    either = broken.chat.with_fallbacks([whole.chat], exceptions_to_handle=(EngineError,))
    assert [response.content for response in call_all_ways(either, "?")] == ["Yes."] * 4
    with pytest.raises(InvalidParameter):
        either.invoke("?", top_k=-2)


def test_with_retry_retries_transient_errors(scripted):
    provider = scripted(QueueFull("Busy."), "Yes.")
    patient = provider.chat.with_retry(retry_if_exception_type=(EngineError,), wait_exponential_jitter=False)
    assert patient.invoke("?").content == "Yes."
    with pytest.raises(InvalidParameter):
        patient.invoke("?", top_k=-2)
    assert len(provider.script.requests) == 2


@pytest.mark.slow
def test_max_retries_limits_retries(scripted):
    busy = QueueFull("Busy.", retry_after=0.01)
    chat = scripted(*[busy, busy, busy, "Yes."] * 4, max_retries=3).chat
    assert [response.content for response in call_all_ways(chat, "?")] == ["Yes."] * 4
    with pytest.raises(QueueFull):
        scripted(busy, busy, "Yes.", max_retries=1).chat.invoke("?")


def test_permanent_error_is_not_retried(scripted):
    provider = scripted(UnsupportedParameter("Never."), "Yes.", max_retries=3)
    with pytest.raises(UnsupportedParameter):
        provider.chat.invoke("?")
    assert len(provider.script.requests) == 1


# Cancellation


@pytest.fixture
def slow(scripted):
    """Return a loaded chat model whose responses take minutes."""
    provider = scripted("Ready.", LONG)
    provider.chat.invoke("?")
    provider.script.delay = 0.2
    return provider


def idle(provider):
    return lambda: provider.script.running == 0


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
def test_timeout_cancels_request(slow, streamed):
    with pytest.raises(DeadlineExceeded):
        list(slow.chat.stream("?", timeout=0.2)) if streamed else slow.chat.invoke("?", timeout=0.2, max_retries=5)
    until(idle(slow))
    assert len(slow.script.requests) <= 2  # the first request loaded the model; the second is not retried


@pytest.mark.slow
def test_started_stream_is_not_retried(slow):
    chunks = slow.chat.stream("?", max_retries=3)
    next(chunks)
    slow.engines.close()
    with pytest.raises(EngineClosed):
        list(chunks)
    assert len(slow.script.requests) == 2


@pytest.mark.slow
def test_closing_stream_cancels_request(slow):
    chunks = slow.chat.stream("?")
    assert isinstance(next(chunks), AIMessageChunk)
    assert slow.script.running == 1
    chunks.close()
    until(idle(slow))


@pytest.mark.slow
def test_closing_async_stream_cancels_request(slow):
    async def leave():
        chunks = slow.chat.astream("?")
        await anext(chunks)
        assert slow.script.running == 1
        await chunks.aclose()

    asyncio.run(leave())
    until(idle(slow))


def test_canceling_task_cancels_request(slow):
    async def leave():
        task = asyncio.create_task(slow.chat.ainvoke("?"))
        await asyncio.to_thread(until, lambda: slow.script.running == 1)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    until(idle(slow))


def test_decoder_without_guided_decoding_rejects_schema(scripted):
    chat = scripted("Yes.", supported_params=SAMPLING_PARAMETERS).chat
    with pytest.raises(UnsupportedParameter) as caught:
        chat.with_structured_output(method="json_mode").invoke("?")
    assert caught.value.param == "response_format"


def test_equal_configurations_share_engine(tiny_checkpoint):
    from dashinfer_vlm_core.engine.shared import SharedEngines

    engines = SharedEngines(scripted_registry(Script("Yes.")))
    options = {"model": str(tiny_checkpoint), "engines": engines, "engine_options": {"decoder": "scripted"}}
    config = EngineConfig(model=str(tiny_checkpoint), decoder="scripted")
    ChatDashInferVLM(**options).invoke("?")
    engine = engines.get(config)
    ChatDashInferVLM(**options, temperature=0).invoke("?")
    assert engines.get(config) is engine
    engines.close()


REASONING = "It has wheels.\n</think>\n\nA car."


@pytest.fixture
def thinking(scripted, tmp_path):
    """A chat model whose chat template ends with `<think>`."""
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}<think>\n")
    return scripted(REASONING, engine_options={"chat_template": str(template)}).chat


def test_reasoning_becomes_content_blocks(thinking):
    expected = [{"type": "reasoning", "reasoning": "It has wheels."}, {"type": "text", "text": "A car."}]
    plain, streamed = thinking.invoke("?"), merge_chunks(thinking.stream("?"))
    for message in (plain, streamed):
        assert message.content == "A car."
        assert message.content_blocks == expected
        assert message.usage_metadata["output_token_details"]["reasoning"] > 0
    thinking.invoke([HumanMessage("?"), plain, HumanMessage("Why?")])  # a message with reasoning can be sent again


def test_chat_models_share_a_manager_of_several_models(tiny_checkpoint):
    models = [
        ManagedModel(config=EngineConfig(model=str(tiny_checkpoint), served_model_name=name, decoder="scripted"))
        for name in ("a", "b")
    ]
    with ModelManager(models, registry=scripted_registry(Script("Yes."))) as manager:
        answers = [ChatDashInferVLM(engine=manager, model=name).invoke(SHAPES) for name in ("b", "a")]
    assert [answer.response_metadata["model_name"] for answer in answers] == ["b", "a"]
