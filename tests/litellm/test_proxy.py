"""LiteLLM's real proxy with the `openai` client: one deployment in its process, others over HTTP."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import litellm
import numpy as np
import openai
import pytest
import yaml

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.engine.shared import SHARED
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_core.testing import Script, scripted_registry
from tests.litellm.conftest import HELLO, counts, text_of
from tests.pdfs import document
from tests.pooling.checkpoints import write_reranker
from tests.samples import data_url
from tests.server.conftest import serving
from tests.waiting import HANG, until
from tests.web import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

IMAGES = Path(__file__).parents[2] / "examples/pictures"
EXAMPLE = Path(__file__).parents[2] / "examples/litellm/config.yaml"
KEY = f"sk-{uuid.uuid4().hex}"
DYING_NAME = f"dying-{uuid.uuid4().hex}"
EXPECTED = "I know circles, squares, triangles, stars and crosses"
LONG = "A long response that goes on and on and on. " * 20
START_SECONDS = 200

DYING = """
import sys
import uvicorn
from dashinfer_vlm_core.testing import scripted_engine
from dashinfer_vlm_server import create_app
script, (checkpoint, name, port) = "One, two, three, four. " * 50, sys.argv[1:]
with scripted_engine(script, delay=0.2, model=checkpoint, served_model_name=name) as engine:
    uvicorn.run(create_app(engine), port=int(port), log_level="error")
"""


def serves(port, model):
    """Return whether the server at `port` was started here: only that accepts our key and has that model."""
    headers = {"Authorization": f"Bearer {KEY}"}
    with contextlib.suppress(httpx.HTTPError):
        found = httpx.get(f"http://127.0.0.1:{port}/v1/models", headers=headers, timeout=HANG, trust_env=False)
        return found.status_code == 200 and model in {item["id"] for item in found.json()["data"]}
    return False


@contextlib.contextmanager
def running(command, model, log, **variables):
    """Start a process, and yield it and its port once it serves `model`. The port is the last argument of the command.

    If another process takes the free port before this one listens, retry with another port.
    """
    environment = {**os.environ, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", **variables}
    for _ in range(5):
        port = free_port()
        with (
            log.open("w") as output,
            subprocess.Popen([*command, str(port)], env=environment, stdout=output, stderr=output) as process,
        ):
            try:
                until(lambda: process.poll() is not None or serves(port, model), seconds=START_SECONDS)  # noqa: B023
                if process.poll() is None:
                    yield process, port
                    return
            finally:
                process.terminate()
                try:
                    process.wait(timeout=HANG)
                except subprocess.TimeoutExpired:
                    process.kill()
        if "address already in use" not in log.read_text():
            break
    raise AssertionError(log.read_text()[-3000:])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("proxy")


@pytest.fixture(scope="module")
def remote(tiny_checkpoint):
    """Start a server in this process with a scripted decoder."""
    script = Script(LONG)
    config = EngineConfig(model=str(tiny_checkpoint), served_model_name="tiny", decoder="scripted")
    with Engine(config, registry=scripted_registry(script)) as engine, serving(engine) as server:
        yield server, script


@pytest.fixture(scope="module")
def dying(folder, tiny_checkpoint):
    """Start a server in a subprocess that the tests kill, and return its URL."""
    command = [sys.executable, "-c", DYING, str(tiny_checkpoint), DYING_NAME]
    with running(command, DYING_NAME, folder / "dying.log") as (process, port):
        yield process, f"http://127.0.0.1:{port}/v1"


@pytest.fixture(scope="module")
def ranking(folder):
    model = write_reranker(load_plugins().models["demo"], folder / "reranker")
    with Engine(EngineConfig(model=str(model))) as engine, serving(engine) as server:
        yield server, engine


@pytest.fixture(scope="module")
def proxy(folder, remote, dying, ranking):
    """Start a proxy with the configuration of the example and more deployments, and return its URL."""
    server, _ = remote

    def deployment(name, model="demo", **params):
        info = {"id": name, "mode": "chat", "health_check_max_tokens": 1}
        model = model if "/" in model else f"dashinfer_vlm/{model}"
        return {"model_name": name, "litellm_params": {"model": model, **params}, "model_info": info}

    config = yaml.safe_load(EXAMPLE.read_text())
    config["model_list"] += [
        deployment("narrow", engine_options={"max_batch_size": 1, "max_waiting": 0}),
        deployment("remote", "tiny", api_base=f"{server.url}/v1"),
        deployment("dying", DYING_NAME, api_base=dying[1]),
        deployment("vectors", additional_drop_params=["encoding_format"]),
        deployment("ranks", model="hosted_vllm/reranker", api_base=f"{ranking[0].url}/v1"),
    ]
    config["router_settings"]["fallbacks"].append({"dying": ["demo"]})
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-c", "from litellm import run_server; run_server()", "--config", str(path)]
    command += ["--host", "127.0.0.1", "--port"]
    variables = {"LITELLM_MASTER_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with running(command, "dying", folder / "proxy.log", **variables) as (_, port):
        yield f"http://127.0.0.1:{port}"


def connect(url):
    transport = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=HANG, http_client=transport)


@pytest.fixture(scope="module")
def client(proxy):
    with connect(proxy) as client:
        yield client


def media(name):
    kind, mime = ("video_url", "video/mp4") if name.endswith("mp4") else ("image_url", "image/png")
    data = base64.b64encode((IMAGES / name).read_bytes()).decode()
    return {"type": kind, kind: {"url": f"data:{mime};base64,{data}"}}


def user_message(text, *names):
    return [{"role": "user", "content": [*map(media, names), {"type": "text", "text": text}]}]


CLIENT = "litellm-proxy"
PDF = {
    "type": "file",
    "file": {"file_data": data_url(document("A page", size=(84, 84)), "application/pdf"), "filename": "a.pdf"},
}
CONVERSATIONS = {
    "text": [{"role": "user", "content": "Which shapes do you know?"}],
    "image": user_message("Describe the picture.", "circle.png"),
    "two images": user_message("What has changed?", "before.png", "after.png"),
    "video": user_message("What happens in the video?", "moving.mp4"),
    "document": [{"role": "user", "content": [PDF, {"type": "text", "text": "Describe the picture."}]}],
    "two prompts": [
        *user_message("Describe the picture.", "circle.png"),
        {"role": "assistant", "content": "A red circle."},
        {"role": "user", "content": "Which shapes do you know?"},
    ],
}


def marks_of(name):
    """Return what a conversation shows for docs/clients.md, besides streams and usage."""
    return [pytest.mark.client(CLIENT, name)] if name in ("text", "image", "video") else []


@pytest.mark.client(CLIENT, "stream")
@pytest.mark.client(CLIENT, "usage")
@pytest.mark.parametrize(
    "messages", [pytest.param(value, id=name, marks=marks_of(name)) for name, value in CONVERSATIONS.items()]
)
def test_all_interfaces_return_same_response(client, demo, messages):
    """In process, through the proxy and through our server, with and without streaming."""
    options = {"messages": messages, "temperature": 0}
    streamed = options | {"stream": True, "stream_options": {"include_usage": True}}
    mine = litellm.completion(demo, **options)
    with serving(SHARED.get(EngineConfig())) as server, connect(server.url) as direct:
        responses = [each.chat.completions.create(model="demo", **options) for each in (direct, client)]
        streams = [list(each.chat.completions.create(model="demo", **streamed)) for each in (direct, client)]
    streams.append(list(litellm.completion(demo, **streamed)))
    text = mine.choices[0].message.content
    assert [response.choices[0].message.content for response in responses] == [text, text]
    assert [text_of(chunks) for chunks in streams] == [text] * 3
    usages = [response.usage for response in responses] + [chunks[-1].usage for chunks in streams]
    assert {counts(usage) for usage in usages} == {counts(mine.usage)}
    assert {response.choices[0].finish_reason for response in responses} == {"stop"}


@pytest.mark.parametrize("model", ["demo", "remote"])
def test_responses_api_is_bridged(client, model):
    image = {"type": "input_image", "image_url": media("circle.png")["image_url"]["url"], "detail": "auto"}
    content = [image, {"type": "input_text", "text": "Describe the picture."}]
    request = {"model": model, "input": [{"role": "user", "content": content}], "temperature": 0}
    response = client.responses.create(**request)
    assert response.output_text == ("A red circle." if model == "demo" else LONG)
    events = list(client.responses.create(**request, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == response.output_text
    assert events[-1].response.usage.output_tokens == response.usage.output_tokens


def test_stream_has_no_usage_unless_requested(client):
    chunks = list(client.chat.completions.create(model="demo", messages=HELLO, stream=True, max_tokens=4))
    assert chunks[-1].choices[0].finish_reason in {"stop", "length"}
    assert not any(chunk.usage for chunk in chunks)


def test_models_and_health_are_listed(client, proxy):
    assert {model.id for model in client.models.list()} == {
        "demo",
        "served",
        "narrow",
        "remote",
        "dying",
        "vectors",
        "ranks",
    }
    headers = {"Authorization": f"Bearer {KEY}"}
    health = httpx.get(f"{proxy}/health?model=demo", headers=headers, timeout=HANG, trust_env=False).json()
    assert (health["healthy_count"], health["unhealthy_count"]) == (1, 0)


@pytest.mark.client(CLIENT, "errors")
@pytest.mark.parametrize("model", ["demo", "remote"])
@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools[0].function.parameters"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"extra_body": {"top_k": -4}}, "top_k"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"extra_body": {"engine_options": {"allowed_local_media_path": "/"}}}, "engine_options"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_request_has_openai_param(client, model, options, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": model, "messages": HELLO, **options})
    assert caught.value.param == param
    assert "Traceback" not in caught.value.message


def test_full_queue_is_rate_limit_error(client):
    forever = {"extra_body": {"ignore_eos": True}, "max_tokens": 3900}
    with client.chat.completions.create(model="narrow", messages=HELLO, stream=True, **forever) as stream:
        next(stream)
        with pytest.raises(openai.RateLimitError):
            client.chat.completions.create(model="narrow", messages=HELLO, max_tokens=1)
    until(lambda: has_free_slot(client, "narrow"))


def has_free_slot(client, model):
    with contextlib.suppress(openai.RateLimitError):
        return client.chat.completions.create(model=model, messages=HELLO, max_tokens=1).choices
    return False


@pytest.mark.client(CLIENT, "cancel")
@pytest.mark.parametrize("streamed", [False, True])
def test_client_disconnect_cancels_request(proxy, remote, streamed):
    _, script = remote
    script.delay = 0.5
    try:
        disconnect(int(proxy.rpartition(":")[2]), script, streamed=streamed)
    finally:
        script.delay = 0.0


def disconnect(port, script, *, streamed):
    body = json.dumps({"model": "remote", "messages": HELLO, "stream": streamed}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: test\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=HANG) as connection:
        connection.sendall(head.encode() + body)
        until(lambda: script.running == 1)
        if streamed:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    until(lambda: script.running == 0)


@pytest.mark.client(CLIENT, "errors")
def test_killed_server_falls_back_to_other_deployment(client, dying):
    """LiteLLM does not continue a response of another model: that stream ends with an error, other requests succeed."""
    process, url = dying
    request = {"model": "dying", "messages": CONVERSATIONS["text"], "temperature": 0}
    with ThreadPoolExecutor(1) as pool:
        stream = client.chat.completions.create(stream=True, **request)
        assert text_of([next(stream) for _ in range(4)]).startswith("One")
        waiting = pool.submit(client.chat.completions.create, **request)
        running = "dashinfer_vlm_active_requests 2"
        until(lambda: running in httpx.get(url.replace("/v1", "/metrics"), trust_env=False, timeout=HANG).text)
        process.kill()
        with pytest.raises(openai.APIError, match="cannot be reached"):
            list(stream)
        assert waiting.result().choices[0].message.content.startswith(EXPECTED)
    assert text_of(client.chat.completions.create(stream=True, **request)).startswith(EXPECTED)
    assert client.chat.completions.create(**request).choices[0].message.content.startswith(EXPECTED)


@pytest.mark.client(CLIENT, "tools")
@pytest.mark.client(CLIENT, "structured")
def test_tool_calls_and_objects_pass_through_proxy(client):
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    request = {"model": "demo", "messages": CONVERSATIONS["text"], "temperature": 0}
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    called = client.chat.completions.create(tools=[tool], tool_choice="required", parallel_tool_calls=False, **request)
    (call,) = called.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rome"})
    response_format = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema, "strict": False}}
    done = client.chat.completions.create(response_format=response_format, **request)
    assert json.loads(done.choices[0].message.content)["city"] == "Rome"


@pytest.mark.client("litellm-proxy-embeddings", "embed-text")
@pytest.mark.client("litellm-proxy-embeddings", "embed-image")
@pytest.mark.client("litellm-proxy-embeddings", "rank")
@pytest.mark.client("litellm-proxy-embeddings", "pooling-errors")
def test_embeddings_and_ranks_pass_through_proxy(client, proxy, ranking):
    texts = ["A red circle.", "A blue square."]
    expected = SHARED.get(SHARED.config("demo", {"task": "embed"})).embed({"input": texts}).values
    created = client.embeddings.create(model="vectors", input=texts)  # this client requests base64
    np.testing.assert_allclose([row.embedding for row in created.data], expected, atol=1e-5)
    assert created.usage.prompt_tokens > 0
    messages = [{"role": "user", "content": [media("circle.png")]}]
    (vector,) = SHARED.get(SHARED.config("demo", {"task": "embed"})).embed({"messages": messages}).values
    created = client.embeddings.create(model="vectors", input=[], extra_body={"messages": messages})
    np.testing.assert_allclose(created.data[0].embedding, vector, atol=1e-5)
    for body, param in (
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": []}, "input"),
        ({"input": "a", "extra_body": {"extra_body": {"dimensions": 7}}}, "dimensions"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model="vectors", **body)
        assert caught.value.param == param
    scores = ranking[1].score({"queries": "red", "documents": texts}).values.tolist()
    body = {"model": "ranks", "query": "red", "documents": texts}
    headers = {"Authorization": f"Bearer {KEY}"}
    ranked = httpx.post(f"{proxy}/v1/rerank", json=body, headers=headers, timeout=HANG, trust_env=False).json()
    found = {row["index"]: row["relevance_score"] for row in ranked["results"]}
    assert [found[0], found[1]] == pytest.approx(scores, abs=1e-5)
