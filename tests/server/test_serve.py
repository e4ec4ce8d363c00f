"""The command, as a process of its own."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading

import click
import httpx
import pytest
import uvicorn
from click.testing import CliRunner

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.testing import Script, scripted_registry
from dashinfer_vlm_server import create_app, plugin
from dashinfer_vlm_server.serving import Server
from tests.server.conftest import eventually

MAIN = "from dashinfer_vlm_core.cli import main; main()"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


def command(*options):
    return [sys.executable, "-c", MAIN, "serve", *map(str, options)]


@contextlib.contextmanager
def process(log, *options):
    with log.open("w") as file, subprocess.Popen(command(*options), stderr=file, stdout=subprocess.PIPE) as server:
        try:
            yield server
        finally:
            server.kill()


def ready(log):
    """The server's URL, once it says that it is ready."""
    return re.search(r"^Serving tiny \(decoder torch\) at (http://127\.0\.0\.1:\d+)/v1$", log.read_text(), re.MULTILINE)


@pytest.mark.timeout(300)  # two processes that load PyTorch and a model
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_it_says_when_it_is_ready_answers_and_ends_in_peace(tiny_checkpoint, tmp_path, ending):
    log = tmp_path / "log"
    with process(log, "--model", tiny_checkpoint, "--served-model-name", "tiny", "--port", 0) as server:
        eventually(lambda: ready(log) or server.poll() is not None, within=90)
        assert ready(log), log.read_text()
        with httpx.Client(base_url=ready(log)[1], trust_env=False, timeout=30) as client:
            assert client.get("/health").json()["status"] == "ready"
            assert client.post("/v1/chat/completions", json=HELLO).json()["usage"]["completion_tokens"] <= 4
        server.send_signal(ending)
        assert server.wait(timeout=30) == 0
        assert server.stdout.read() == b""
    assert "Traceback" not in log.read_text()
    assert re.search(r"^Try: curl http://\S+/v1/chat/completions -d '\{.*\}'$", log.read_text(), re.MULTILINE)


def test_requests_that_outlast_the_grace_are_told_why(tiny_checkpoint):
    script = Script("A long answer that goes on and on. " * 20, delay=0.1)
    config = EngineConfig(model=str(tiny_checkpoint), decoder="scripted")
    said = []
    with Engine(config, registry=scripted_registry(script)) as engine:
        server = Server(
            uvicorn.Config(create_app(engine), port=0, log_config=None, ws="none"),
            ready=lambda: said.append("ready"),
            end=engine.aclose,
            grace=0.2,
        )
        thread = threading.Thread(target=server.run)
        thread.start()
        eventually(lambda: server.started)
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        with (
            httpx.Client(base_url=url, trust_env=False) as client,
            client.stream("POST", "/v1/chat/completions", json=HELLO | {"stream": True, "max_tokens": 99}) as reply,
        ):
            lines = reply.iter_lines()
            next(lines)
            server.should_exit = True
            *_, last = filter(None, lines)
        thread.join(timeout=10)
    assert said == ["ready"]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_closed"


def refusal(*options):
    """What a server that does not start says, and its exit code."""
    ended = subprocess.run(command(*options), capture_output=True, text=True, timeout=90, check=False)
    assert "Traceback" not in ended.stderr
    return ended.stderr.splitlines()[-1], ended.returncode


def test_a_model_that_is_not_there_ends_it_with_what_to_do(tmp_path):
    line, code = refusal("--port", 0, "--model", tmp_path / "none")
    assert code == 2
    assert line.startswith("dashinfer-vlm: There is no model")


def test_a_port_in_use_ends_it_with_what_to_do():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line, code = refusal("--port", port)
    assert code == 2
    assert line == (
        f"dashinfer-vlm: Cannot listen on 127.0.0.1 port {port}: Address already in use."
        " Choose another --host or --port (--port 0 takes a free one)."
    )


def test_a_value_out_of_range_ends_it_with_the_name_of_the_option():
    line, code = refusal("--max-batch-size", 0)
    assert code == 2
    assert "max_batch_size" in line


@pytest.fixture
def runner():
    group = click.Group()
    plugin.register_commands(group)
    return lambda *arguments: CliRunner().invoke(group, arguments)


def test_its_help_lists_every_option_of_the_engine(runner):
    text = runner("serve", "--help").output
    assert all(f"--{name.replace('_', '-')}" in text for name in EngineConfig.model_fields)
    assert "--port" in text
    assert "DASHINFER_VLM_MAX_PIXELS" in text


@pytest.mark.parametrize(
    "options", [["--port", "65536"], ["--port", "x"], ["--max-body-mib", "0"], ["--no-such-option"]]
)
def test_wrong_options_are_named(runner, options):
    result = runner("serve", *options)
    assert result.exit_code == 2
    assert options[0] in result.output


def test_without_its_extra_the_plugin_loads_and_the_command_says_what_to_install():
    script = (
        "import sys\n"
        "sys.modules.update({'fastapi': None, 'uvicorn': None, 'starlette': None})\n"
        "sys.argv[1:] = ['serve']\n" + MAIN
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "pip install 'dashinfer-vlm-adapters[server]'" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
