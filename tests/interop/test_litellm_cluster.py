"""LiteLLM's proxy in front of three servers, as in examples/scale-out: the same images reach the same server."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from dashinfer_vlm_core.testing import scripted_engine
from tests.litellm.conftest import HELLO, text_of
from tests.litellm.test_affinity import SERVERS, image, order_of, shade_for, user
from tests.litellm.test_proxy import KEY, connect, running, serves
from tests.server.conftest import serving
from tests.waiting import HANG, until
from tests.web import free_port

pytestmark = pytest.mark.interop

EXAMPLE = Path(__file__).parents[2] / "examples/scale-out/litellm.yaml"

SERVER = """
import pathlib
import sys
import uvicorn
from dashinfer_vlm_core.testing import scripted_engine
from dashinfer_vlm_server import create_app
name, checkpoint, marker, port = sys.argv[1:]
def respond(request):
    if request.sampling.max_tokens > 1:  # not a health check
        pathlib.Path(marker).touch()
    return name
with scripted_engine(respond, delay=0.5, model=checkpoint, served_model_name="qwen") as engine:
    uvicorn.run(create_app(engine), port=int(port), log_level="error")
"""


class Killable:
    """A server in its own process that slowly responds with its name. `marker` is created when it decodes a request."""

    def __init__(self, name, checkpoint, marker):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.marker = marker
        self._command = [sys.executable, "-c", SERVER, name, str(checkpoint), str(marker), str(self.port)]

    def start(self):
        self.process = subprocess.Popen(self._command)
        until(lambda: self.process.poll() is not None or serves(self.port, "qwen"))
        assert self.process.poll() is None

    def kill(self):
        self.process.kill()
        self.process.wait(timeout=HANG)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, tiny_checkpoint):
    """Start three servers and the proxy of the example; return a client and the server that can be killed."""
    folder = tmp_path_factory.mktemp("cluster")
    with contextlib.ExitStack() as stack:
        urls = {}
        for name in SERVERS[:2]:
            engine = stack.enter_context(scripted_engine(name, model=str(tiny_checkpoint), served_model_name="qwen"))
            urls[name] = stack.enter_context(serving(engine)).url
        killable = Killable(SERVERS[2], tiny_checkpoint, folder / "decoding")
        urls[SERVERS[2]] = killable.url
        killable.start()
        stack.callback(killable.kill)
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(example_config(urls)))
        command = [sys.executable, "-c", "from litellm import run_server; run_server()", "--config", str(path)]
        command += ["--host", "127.0.0.1", "--port"]
        variables = {"LITELLM_MASTER_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "SERVER_API_KEY": "none"}
        _, port = stack.enter_context(running(command, "qwen", folder / "proxy.log", **variables))
        client = stack.enter_context(connect(f"http://127.0.0.1:{port}"))
        yield client, killable


def example_config(urls):
    """Return the configuration of the example with the addresses of the test's servers, and checked every second."""
    config = yaml.safe_load(EXAMPLE.read_text())
    assert [each["model_info"]["id"] for each in config["model_list"]] == list(urls)
    for deployment in config["model_list"]:
        deployment["litellm_params"]["api_base"] = f"{urls[deployment['model_info']['id']]}/v1"
    config["general_settings"]["health_check_interval"] = 1
    config["router_settings"]["cooldown_time"] = 1
    return config


def server_of(client, messages):
    return client.chat.completions.create(model="qwen", messages=messages).choices[0].message.content


def streaming_server_of(client, messages):
    return text_of(client.chat.completions.create(model="qwen", messages=messages, stream=True))


@pytest.mark.timeout(300)
def test_proxy_sends_same_image_to_same_server(cluster):
    client, _ = cluster
    for server in SERVERS:
        first = user(image(shade_for(server)))
        later = [*first, {"role": "assistant", "content": "A."}, {"role": "user", "content": "Why?"}]
        assert {server_of(client, first), streaming_server_of(client, first), server_of(client, later)} == {server}
    assert server_of(client, HELLO) in SERVERS


@pytest.mark.timeout(300)
def test_proxy_finds_image_by_uuid_alone(cluster):
    """An image that is sent by `uuid` alone is in the memory of one server."""
    client, _ = cluster
    for name in ("cat", "dog", "bird"):
        server = server_of(client, user({**image(7), "uuid": name}))
        assert server_of(client, user({"type": "image_url", "image_url": {"url": ""}, "uuid": name})) == server


@pytest.mark.timeout(300)
def test_proxy_fails_over_from_killed_server_and_back(cluster):
    """A running request is sent again, as long as the client has received nothing of its response."""
    client, killable = cluster
    lost = user(image(shade_for(SERVERS[2])))
    other = user(image(shade_for(SERVERS[0])))
    next_server = order_of(lost)[1]
    killable.marker.unlink(missing_ok=True)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server_of, client, lost)
        until(killable.marker.exists)
        killable.kill()
        assert waiting.result() == next_server
    assert streaming_server_of(client, lost) == next_server
    assert server_of(client, lost) == next_server
    assert server_of(client, other) == SERVERS[0]
    until(lambda: attempts(client, lost) == 0)
    killable.start()
    until(lambda: server_of(client, lost) == SERVERS[2])


def attempts(client, messages):
    """Return how often LiteLLM had to repeat a request."""
    response = client.chat.completions.with_raw_response.create(model="qwen", messages=messages)
    return int(response.headers["x-litellm-attempted-retries"])
