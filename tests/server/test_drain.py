"""SIGTERM while answers stream, to the command as a process of its own: all of them end, and so does it."""

from __future__ import annotations

import concurrent.futures
import json
import signal

import httpx
import pytest

from tests.server.test_serve import MAIN, process, ready
from tests.waiting import HANG, until

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
    client = httpx.Client(base_url=url, trust_env=False, timeout=HANG)
    with client, client.stream("POST", "/v1/chat/completions", json=body) as reply:
        assert reply.status_code == 200
        for line in filter(None, reply.iter_lines()):
            begun.add(id(reply))
            last = line.removeprefix("data: ")
    return "done" if last == "[DONE]" else json.loads(last)["error"]["code"]


SLOW = """
import dashinfer_vlm_torch.runner as r, time
step = r.Runner.step
r.Runner.step = lambda *args: (time.sleep(0.1), step(*args))[1]
"""
"""Has 1500 tokens take two and a half minutes at least, on any machine."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("grace", "tokens", "outcomes"), [(100, 100, {"done"}), (0.5, 1500, {"engine_closed"})], ids=["enough", "too short"]
)
def test_sigterm_during_sixteen_streams(tiny_checkpoint, tmp_path, grace, tokens, outcomes):
    log = tmp_path / "log"
    options = ["--model", tiny_checkpoint, "--served-model-name", "tiny", "--port", 0, "--grace", grace]
    with process(log, *options, program=SLOW + MAIN) as server:
        until(lambda: ready(log) or server.poll() is not None)
        url, begun = ready(log)[1], set()
        with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
            streams = [pool.submit(streamed, url, tokens, begun) for _ in range(STREAMS)]
            until(lambda: len(begun) == STREAMS)
            server.send_signal(signal.SIGTERM)
            until(lambda: refused(url))
            ended = [stream.result(timeout=HANG) for stream in streams]
        assert server.wait(timeout=HANG) == 0
    assert set(ended) == outcomes
    assert "Traceback" not in log.read_text()


HANGS = "import dashinfer_vlm_torch.runner as r, threading; r.Runner.step = lambda *_: threading.Event().wait()\n"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sigterm_while_a_step_hangs_ends_the_process_and_says_so(tiny_checkpoint, tmp_path):
    log = tmp_path / "log"
    options = ["--model", tiny_checkpoint, "--served-model-name", "tiny", "--port", 0, "--grace", 0.5]
    with process(log, *options, program=HANGS + MAIN) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        until(lambda: ready(log) or server.poll() is not None)
        url = ready(log)[1]
        body = {"messages": [{"role": "user", "content": "Hello"}]}
        answer = pool.submit(httpx.post, f"{url}/v1/chat/completions", json=body, trust_env=False, timeout=HANG)
        until(lambda: "dashinfer_vlm_num_requests_running 1" in metrics(url))
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=HANG) == 0
        assert answer.result(timeout=HANG).json()["error"]["code"] == "engine_closed"
    assert "ERROR dashinfer_vlm_server.serving: A step of the decoder has not ended within" in log.read_text()
    assert "Traceback" not in log.read_text()


def metrics(url):
    return httpx.get(f"{url}/metrics", trust_env=False, timeout=HANG).text


def refused(url):
    """Whether a newcomer is told that the server is ending, or finds nobody."""
    try:
        reply = httpx.get(f"{url}/health/ready", trust_env=False, timeout=HANG)
    except httpx.TransportError:
        return True
    return reply.status_code == 503 and reply.json()["status"] == "draining"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_second_signal_does_not_wait(tiny_checkpoint, tmp_path):
    log = tmp_path / "log"
    options = ["--model", tiny_checkpoint, "--served-model-name", "tiny", "--port", 0, "--grace", 100]
    with process(log, *options, program=SLOW + MAIN) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        until(lambda: ready(log) or server.poll() is not None)
        url, begun = ready(log)[1], set()
        stream = pool.submit(streamed, url, 1500, begun)
        until(lambda: begun)
        server.send_signal(signal.SIGTERM)
        until(lambda: refused(url))
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=HANG) == 0
        assert isinstance(stream.exception(timeout=HANG), (httpx.HTTPError, type(None)))
    assert "Traceback" not in log.read_text()
