"""SIGTERM to a server process with running streams: all streams end, then the process exits."""

from __future__ import annotations

import concurrent.futures
import json
import signal

import httpx
import pytest

from tests.samples import image_url
from tests.server.test_serve import MAIN, process, wait_until_ready
from tests.waiting import HANG, NEVER, until

STREAMS = 16


def streamed(url, tokens, started):
    """Return the outcome of a stream: `done`, or the code of its error."""
    body = {
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "max_tokens": tokens,
        "ignore_eos": True,
    }
    last = ""
    client = httpx.Client(base_url=url, trust_env=False, timeout=HANG)
    with client, client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        for line in filter(None, response.iter_lines()):
            started.add(id(response))
            last = line.removeprefix("data: ")
    return "done" if last == "[DONE]" else json.loads(last)["error"]["code"]


SLOW = """
import dashinfer_vlm_torch.runner as r, time
launch = r.ModelRunner.launch
r.ModelRunner.launch = lambda *args: (time.sleep(0.1), launch(*args))[1]
"""
"""Makes 1500 tokens take at least two and a half minutes."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("grace", "tokens", "outcomes"), [(100, 20, {"done"}), (0.5, 1500, {"engine_closed"})], ids=["enough", "too short"]
)
def test_sigterm_during_concurrent_streams(tiny_checkpoint, tmp_path, grace, tokens, outcomes):
    log = tmp_path / "log"
    options = ["--model", tiny_checkpoint, "--served-model-name", "tiny", "--port", 0, "--grace", grace]
    with process(log, *options, program=SLOW + MAIN) as server:
        url, started = wait_until_ready(server, log), set()
        with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
            streams = [pool.submit(streamed, url, tokens, started) for _ in range(STREAMS)]
            until(lambda: len(started) == STREAMS or any(stream.done() and stream.exception() for stream in streams))
            server.send_signal(signal.SIGTERM)
            until(lambda: is_draining(url))
            completed = [stream.result(timeout=HANG) for stream in streams]
        assert server.wait(timeout=HANG) == 0
    assert set(completed) == outcomes
    assert "Traceback" not in log.read_text()


HANGS = """
import dashinfer_vlm_server.serving as s, dashinfer_vlm_torch.runner as r, threading
r.ModelRunner.launch = lambda *_: threading.Event().wait()
s.STOP_SECONDS = 1.0
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sigterm_during_a_hung_step_exits_and_logs_it(tiny_checkpoint, tmp_path):
    log = tmp_path / "log"
    options = ["--model", tiny_checkpoint, "--served-model-name", "tiny", "--port", 0, "--grace", 0.5]
    with process(log, *options, program=HANGS + MAIN) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        url = wait_until_ready(server, log)
        body = {"messages": [{"role": "user", "content": "Hello"}]}
        response = pool.submit(httpx.post, f"{url}/v1/chat/completions", json=body, trust_env=False, timeout=HANG)
        until(lambda: "dashinfer_vlm_num_requests_running 1" in metrics(url))
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=HANG) == 0
        assert response.result(timeout=HANG).json()["error"]["code"] == "engine_closed"
    assert "ERROR dashinfer_vlm_server.serving: A step of the decoder has not ended within" in log.read_text()
    assert "Traceback" not in log.read_text()


def metrics(url):
    return httpx.get(f"{url}/metrics", trust_env=False, timeout=HANG).text


def is_draining(url):
    """Return whether the server reports that it is draining, or accepts no connection."""
    try:
        response = httpx.get(f"{url}/health/ready", trust_env=False, timeout=HANG)
    except httpx.TransportError:
        return True
    return response.status_code == 503 and response.json()["status"] == "draining"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_second_signal_exits_immediately(tiny_checkpoint, tmp_path):
    log = tmp_path / "log"
    options = ["--model", tiny_checkpoint, "--served-model-name", "tiny", "--port", 0, "--grace", NEVER]
    with process(log, *options, program=SLOW + MAIN) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        url, started = wait_until_ready(server, log), set()
        stream = pool.submit(streamed, url, 1500, started)
        until(lambda: started)
        server.send_signal(signal.SIGTERM)
        until(lambda: is_draining(url))
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=HANG) == 0
        assert isinstance(stream.exception(timeout=HANG), (httpx.HTTPError, type(None)))
    assert "Traceback" not in log.read_text()


STUCK = """
import dashinfer_vlm_core.media.decoder as d, sys, threading
d.decode_image = lambda *args, **options: print("decoding", file=sys.stderr, flush=True) or threading.Event().wait()
"""
"""Makes decoding an image take forever, in a thread that nothing can stop."""


@pytest.mark.slow
def test_security_26_process_exits_while_an_image_is_decoded_in_a_thread(tiny_checkpoint, tmp_path):
    log = tmp_path / "log"
    options = ["--model", tiny_checkpoint, "--served-model-name", "tiny", "--port", 0]
    options += ["--grace", 0.1, "--media-workers", 0]
    content = [{"type": "image_url", "image_url": {"url": image_url()}}]
    with process(log, *options, program=STUCK + MAIN) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        url = wait_until_ready(server, log)
        body = {"messages": [{"role": "user", "content": content}]}
        sent = pool.submit(httpx.post, f"{url}/v1/chat/completions", json=body, timeout=HANG, trust_env=False)
        until(lambda: "decoding" in log.read_text())
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=HANG) == 0
        assert sent.result(timeout=HANG).json()["error"]["code"] == "engine_closed"
    assert "although threads still decode media" in log.read_text()
