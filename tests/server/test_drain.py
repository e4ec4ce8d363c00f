"""SIGTERM while answers stream, to the command as a process of its own: all of them end, and so does it."""

from __future__ import annotations

import concurrent.futures
import json
import signal
import time

import httpx
import pytest

from tests.server.conftest import eventually
from tests.server.test_serve import MAIN, process, ready

STREAMS = 16


def streamed(url, tokens, begun):
    """What became of one stream: `done`, the code of its error, or how the connection ended."""
    body = {
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "max_tokens": tokens,
        "ignore_eos": True,
    }
    last = ""
    client = httpx.Client(base_url=url, trust_env=False, timeout=100)
    with client, client.stream("POST", "/v1/chat/completions", json=body) as reply:
        assert reply.status_code == 200
        for line in filter(None, reply.iter_lines()):
            begun.add(id(reply))
            last = line.removeprefix("data: ")
    return "done" if last == "[DONE]" else json.loads(last)["error"]["code"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("grace", "tokens", "outcomes"), [(100, 400, {"done"}), (0.5, 1500, {"engine_closed"})], ids=["enough", "too short"]
)
def test_sigterm_during_sixteen_streams(tiny_checkpoint, tmp_path, grace, tokens, outcomes):
    log = tmp_path / "log"
    options = ["--model", tiny_checkpoint, "--served-model-name", "tiny", "--port", 0, "--grace", grace]
    with process(log, *options) as server:
        eventually(lambda: ready(log) or server.poll() is not None, within=90)
        url, begun = ready(log)[1], set()
        with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
            streams = [pool.submit(streamed, url, tokens, begun) for _ in range(STREAMS)]
            eventually(lambda: len(begun) == STREAMS, within=60)
            server.send_signal(signal.SIGTERM)
            eventually(lambda: refused(url), within=30)
            ended = [stream.result(timeout=120) for stream in streams]
        assert server.wait(timeout=60) == 0
    assert set(ended) == outcomes
    assert "Traceback" not in log.read_text()


HANGS = "import dashinfer_vlm_torch.runner as r, threading; r.Runner.step = lambda *_: threading.Event().wait()\n"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sigterm_while_a_step_hangs_ends_the_process_and_says_so(tiny_checkpoint, tmp_path):
    log = tmp_path / "log"
    options = ["--model", tiny_checkpoint, "--served-model-name", "tiny", "--port", 0, "--grace", 0.5]
    with process(log, *options, program=HANGS + MAIN) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        eventually(lambda: ready(log) or server.poll() is not None, within=90)
        url = ready(log)[1]
        body = {"messages": [{"role": "user", "content": "Hello"}]}
        answer = pool.submit(httpx.post, f"{url}/v1/chat/completions", json=body, trust_env=False, timeout=100)
        eventually(lambda: "dashinfer_vlm_num_requests_running 1" in metrics(url), within=30)
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0
        assert answer.result(timeout=10).json()["error"]["code"] == "engine_closed"
    assert "ERROR dashinfer_vlm_server.serving: A step of the decoder has not ended within" in log.read_text()
    assert "Traceback" not in log.read_text()


def metrics(url):
    return httpx.get(f"{url}/metrics", trust_env=False, timeout=30).text


def refused(url):
    """Whether a newcomer is told that the server is ending, or finds nobody."""
    try:
        reply = httpx.get(f"{url}/health/ready", trust_env=False, timeout=30)
    except httpx.TransportError:
        return True
    return reply.status_code == 503 and reply.json()["status"] == "draining"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_second_signal_does_not_wait(tiny_checkpoint, tmp_path):
    log = tmp_path / "log"
    options = ["--model", tiny_checkpoint, "--served-model-name", "tiny", "--port", 0, "--grace", 100]
    with process(log, *options) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        eventually(lambda: ready(log) or server.poll() is not None, within=90)
        begun = set()
        stream = pool.submit(streamed, ready(log)[1], 1500, begun)
        eventually(lambda: begun, within=60)
        server.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=30) == 0
        assert isinstance(stream.exception(timeout=30), (httpx.HTTPError, type(None)))
    assert "Traceback" not in log.read_text()
