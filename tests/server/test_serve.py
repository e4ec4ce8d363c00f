"""The command, as a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from types import MappingProxyType
from typing import NamedTuple

import click
import httpx
import pytest
from click.testing import CliRunner

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.config import option_fields
from dashinfer_vlm_core.errors import ConfigError
from dashinfer_vlm_core.testing import Script, scripted_engine, scripted_registry
from dashinfer_vlm_server import create_app, plugin
from dashinfer_vlm_server.serving import Server, http_settings
from dashinfer_vlm_server.settings import DrainState
from dashinfer_vlm_server.sockets import Address
from tests.waiting import HANG, until

MAIN = "from dashinfer_vlm_core.cli.main import main; main()"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


def command(*options, program=MAIN):
    return [sys.executable, "-c", program, "serve", *map(str, options)]


@contextlib.contextmanager
def process(log, *options, environment=MappingProxyType({}), program=MAIN):
    with (
        log.open("w") as file,
        subprocess.Popen(
            command(*options, program=program), stderr=file, stdout=subprocess.PIPE, env={**os.environ, **environment}
        ) as server,
    ):
        try:
            yield server
        finally:
            server.kill()


def ready(log):
    """The server's URL, once it says that it is ready."""
    return re.search(r"^Serving tiny \(decoder torch\) at (http://127\.0\.0\.1:\d+)/v1$", log.read_text(), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(300)  # two processes that load PyTorch and a model
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_it_says_when_it_is_ready_answers_and_ends_in_peace(tiny_checkpoint, tmp_path, ending):
    log = tmp_path / "log"
    with process(log, "--model", tiny_checkpoint, "--served-model-name", "tiny", "--port", 0) as server:
        until(lambda: ready(log) or server.poll() is not None)
        assert ready(log), log.read_text()
        with httpx.Client(base_url=ready(log)[1], trust_env=False, timeout=HANG) as client:
            assert client.get("/health").json()["status"] == "ready"
            assert client.post("/v1/chat/completions", json=HELLO).json()["usage"]["completion_tokens"] <= 4
        server.send_signal(ending)
        assert server.wait(timeout=HANG) == 0
        assert server.stdout.read() == b""
    assert "Traceback" not in log.read_text()
    assert re.search(r"^Try: curl http://\S+/v1/chat/completions -d '\{.*\}'$", log.read_text(), re.MULTILINE)


COLLECTING = f"""
import atexit, gc, sys
seen = set()
gc.callbacks.append(lambda *_: seen.add(("torch" in sys.modules, gc.get_freeze_count() > 100_000)))
atexit.register(lambda: print(sorted(seen)))
{MAIN}
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_garbage_is_collected_once_all_is_loaded_and_what_is_loaded_is_passed_over(tiny_checkpoint, tmp_path):
    log = tmp_path / "log"
    options = ("--model", tiny_checkpoint, "--served-model-name", "tiny", "--port", 0)
    with process(log, *options, program=COLLECTING) as server:
        until(lambda: ready(log) or server.poll() is not None)
        with httpx.Client(base_url=ready(log)[1], trust_env=False, timeout=HANG) as client:
            for _ in range(20):
                assert client.post("/v1/chat/completions", json=HELLO).status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=HANG) == 0
        assert server.stdout.read() == b"[(False, False), (True, True)]\n"


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_while_the_model_is_downloaded(tmp_path, ending):
    """From a hub that takes connections and never answers; its client would wait for ten minutes."""
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.settimeout(HANG)
        environment = {
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}",
            "HF_HOME": str(tmp_path),
            "HF_HUB_ETAG_TIMEOUT": "600",
            "HF_HUB_DOWNLOAD_TIMEOUT": "600",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        log = tmp_path / "log"
        with process(log, "--model", "maker/tiny", "--port", 0, environment=environment) as server:
            connection, _ = hub.accept()
            with connection:
                server.send_signal(ending)
                assert server.wait(timeout=HANG) == 0
    assert log.read_text().splitlines()[-1] == f"dashinfer-vlm: ended by {ending.name}."
    assert "Traceback" not in log.read_text()


class Stopping(NamedTuple):
    """A server in a thread, whose requests have 0.2 s when it is told to stop."""

    server: Server
    thread: threading.Thread

    @classmethod
    def start(cls, engine, app=None, *, grace=0.2):
        gate = DrainState()
        settings = http_settings(app or create_app(engine, drain_state=gate), Address())
        settings.port = 0
        server = Server(settings, engine=engine, drain_state=gate, grace=grace)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        until(lambda: server.started)
        return cls(server, thread)

    @property
    def port(self):
        return self.server.servers[0].sockets[0].getsockname()[1]

    def stop(self):
        self.server.should_exit = True

    def assert_ends(self):
        self.thread.join(timeout=HANG)
        assert not self.thread.is_alive()


@pytest.fixture
def stopping(tiny_checkpoint):
    """One whose answers take minutes."""
    script = Script("A long answer that goes on and on. " * 100, delay=0.2)
    config = EngineConfig(model=str(tiny_checkpoint), decoder="scripted")
    with Engine(config, registry=scripted_registry(script)) as engine:
        yield Stopping.start(engine)


def test_requests_that_outlast_the_grace_are_told_why(stopping):
    with (
        httpx.Client(base_url=f"http://127.0.0.1:{stopping.port}", trust_env=False) as client,
        client.stream("POST", "/v1/chat/completions", json=HELLO | {"stream": True, "max_tokens": 999}) as reply,
    ):
        lines = reply.iter_lines()
        next(lines)
        stopping.stop()
        *_, last = filter(None, lines)
    stopping.assert_ends()
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_closed"


def request_head(length):
    return f"POST /v1/chat/completions HTTP/1.1\r\nHost: test\r\nContent-Length: {length}\r\n\r\n".encode()


def test_a_client_that_sends_no_more_does_not_hold_the_server(stopping, caplog):
    with socket.create_connection(("127.0.0.1", stopping.port)) as stalled:
        stalled.sendall(request_head(1000) + b'{"messages": [')
        until(lambda: stopping.server.server_state.tasks)
        stopping.stop()
        stopping.assert_ends()
    assert "Traceback" not in caplog.text


async def much(_scope, _receive, send):
    """An application that answers more than fits between a server and a client that does not read."""
    await send({"type": "http.response.start", "status": 200})
    for _ in range(64):
        await send({"type": "http.response.body", "body": bytes(1024 * 1024), "more_body": True})
    await send({"type": "http.response.body"})


def test_a_client_that_reads_no_more_does_not_hold_the_server(tiny_checkpoint, caplog):
    stopping = Stopping.start(scripted_engine("Fine.", model=str(tiny_checkpoint)), much)
    with socket.create_connection(("127.0.0.1", stopping.port)) as stalled:
        stalled.sendall(request_head(0))
        assert stalled.recv(12) == b"HTTP/1.1 200"
        stopping.stop()
        stopping.assert_ends()
    assert "Traceback" not in caplog.text


def refusal(*options):
    """What a server that does not start says, and its exit code."""
    ended = subprocess.run(command(*options), capture_output=True, text=True, timeout=HANG, check=False)
    assert "Traceback" not in ended.stderr
    return ended.stderr.splitlines()[-1], ended.returncode


@pytest.mark.slow
def test_a_model_that_is_not_there_ends_it_with_what_to_do(tmp_path):
    line, code = refusal("--port", 0, "--model", tmp_path / "none")
    assert code == 2
    assert line.startswith("dashinfer-vlm: There is no model")


@pytest.mark.slow
def test_a_port_in_use_ends_it_with_what_to_do():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line, code = refusal("--port", port)
    assert code == 2
    assert line == (
        f"dashinfer-vlm: Cannot listen on 127.0.0.1 port {port}: Address already in use."
        " Choose another --host or --port (--port 0 takes a free one)."
    )


@pytest.mark.slow
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
    text = " ".join(runner("serve", "--help").output.split())
    assert all(f"--{name.replace('_', '-')}" in text for name in option_fields())
    assert "--port" in text
    assert "DASHINFER_VLM_PORT for --port" in text
    assert "DASHINFER_VLM_MAX_PIXELS for --max-pixels" in text


@pytest.mark.parametrize(
    "options", [["--port", "65536"], ["--port", "x"], ["--max-body-mib", "0"], ["--no-such-option"]]
)
def test_wrong_options_are_named(runner, options):
    result = runner("serve", *options)
    assert result.exit_code == 2
    assert options[0] in result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--api-key", ""], "API key"),
        (["--api-key-file", "none.txt"], "--api-key-file: none.txt cannot be read"),
        (["--ssl-keyfile", "key.pem"], "go with --ssl-certfile"),
        (["--ssl-ca-certs", "ca.pem"], "go with --ssl-certfile"),
        (["--root-path", "vision"], "--root-path begins with a slash"),
        (["--root-path", "/vision/"], "--root-path begins with a slash"),
        (["--ssl-certfile", "none.pem", "--port", "0"], "--ssl-certfile"),
        (["--uds", "none/socket"], "Choose another --uds"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(runner, options, words):
    refusal = runner("serve", *options).exception
    assert isinstance(refusal, ConfigError)
    assert words in refusal.message


VALUES = {
    "host": "0.0.0.0", "port": "9000", "uds": "a/socket", "uds_mode": "660", "page": "false", "root_path": "/vision",
    "api_key_file": "keys.txt", "ssl_certfile": "cert.pem", "ssl_keyfile": "key.pem", "ssl_keyfile_password": "secret",
    "ssl_ca_certs": "ca.pem", "allowed_origins": "https://a.example", "max_body_mib": "7", "max_held_mib": "8",
    "max_body_pause": "9.5", "request_timeout": "60", "grace": "3", "log_format": "json",
    "otlp_traces_endpoint": "http://127.0.0.1:4318/v1/traces",
}  # fmt: skip
"""A value of each option of the server, other than its default."""


def parsed(*words):
    """The options of the server as its command reads them."""
    with plugin.serve.make_context("serve", [*words]) as context:
        return {name: value for name, value in context.params.items() if name not in option_fields()}


def test_the_environment_sets_each_option_as_the_command_line_does():
    defaults = parsed()
    assert VALUES.keys() == defaults.keys() - {"api_keys"}  # which have variables of their own
    flags = {name: f"--{name.replace('_', '-')}" for name in VALUES}
    words = [word for name, value in VALUES.items() if name != "page" for word in (flags[name], value)]
    expected = parsed("--no-page", *words)
    os.environ.update({f"DASHINFER_VLM_{name.upper()}": value for name, value in VALUES.items()})
    found = parsed()
    assert found == expected
    assert all(found[name] != defaults[name] for name in VALUES)


def test_the_environment_yields_to_a_file_and_both_to_the_command_line(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("port: 2\ngrace: 2\n")
    os.environ.update({f"DASHINFER_VLM_{name}": "3" for name in ("PORT", "GRACE", "MAX_BODY_MIB")})
    os.environ["DASHINFER_VLM_HOST"] = ""  # which is to say nothing
    found = parsed("--config", str(file), "--port", "1")
    assert {name: found[name] for name in ("port", "grace", "max_body_mib", "max_held_mib", "host")} == {
        "port": 1,
        "grace": 2,
        "max_body_mib": 3,
        "max_held_mib": 2048,
        "host": "127.0.0.1",
    }


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("PORT", "x", "'x' is not a valid whole number. It comes from the environment: set DASHINFER_VLM_PORT to"),
        (
            "PORT",
            "65536",
            "65536 is not in the range 0<=x<=65535. It comes from the environment: set",
        ),
        ("PORT", "tcp://10.0.0.1:80", "write `enableServiceLinks: false` into the pod's spec, or give --port"),
        ("GRACE", "soon", "'soon' is not a valid number. It comes from the environment: set DASHINFER_VLM_GRACE"),
        ("PAGE", "maybe", "set DASHINFER_VLM_PAGE to another value"),
        (
            "LOG_FORMAT",
            "xml",
            "is not one of 'text', 'json'. It comes from the environment: set",
        ),
    ],
)
def test_a_variable_that_cannot_be_read_is_named(runner, name, value, words):
    os.environ[f"DASHINFER_VLM_{name}"] = value
    refused = runner("serve")
    assert refused.exit_code == 2
    assert words in " ".join(refused.output.split())


def test_what_is_wrong_on_the_command_line_is_not_said_to_come_from_the_environment(runner):
    os.environ["DASHINFER_VLM_PORT"] = "9000"
    assert "environment" not in runner("serve", "--port", "x").output


def test_keys_of_a_file_are_not_said_to_be_on_the_command_line(runner, caplog, tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("api-key: [sk-secret]\nuds: none/socket\n")
    file.chmod(0o600)
    runner("serve", "--config", str(file))
    assert "`ps`" not in caplog.text


def test_keys_on_the_command_line_and_open_doors_are_warned_of(runner, caplog):
    broken = ["--api-key-file", "none.txt"]  # it ends before it serves
    runner("serve", "--api-key", "sk-secret", "--root-path", "x")
    assert "sk-secret" not in caplog.text
    runner("serve", "--host", "0.0.0.0", "--uds", "none/socket", "--api-key", "sk-secret")
    assert "`ps` shows the keys" in caplog.text
    assert "sk-secret" not in caplog.text
    assert "sk-secret" not in runner("serve", *broken).output


def records(text):
    return [json.loads(line) for line in text.splitlines()]  # every line is one


@pytest.mark.slow
def test_every_line_is_json_where_logs_are(tiny_checkpoint, tmp_path):
    log, file = tmp_path / "log", tmp_path / "options.yaml"
    file.write_text("api-key: [sk-secret]\nlog-format: json\n")
    file.chmod(0o644)
    options = ["--config", file, "--model", tiny_checkpoint, "--served-model-name", "tiny", "--port", 0]
    with process(log, *options) as server:
        until(lambda: '"url"' in log.read_text() or server.poll() is not None)
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=HANG) == 0
        assert server.stdout.read() == b""
    lines = records(log.read_text())
    (serving,) = [line for line in lines if "url" in line]
    assert serving["message"] == f"Serving tiny (decoder torch) at {serving['url']}"
    assert (serving["model"], serving["decoder"], serving["level"]) == ("tiny", "torch", "info")
    assert any("chmod 600" in line["message"] for line in lines)


@pytest.mark.slow
def test_what_ends_it_is_json_where_logs_are(tmp_path):
    for wrong in (["--model", tmp_path / "none"], ["--max-batch-size", 0], ["--root-path", "x"]):
        options = ["--port", 0, "--log-format", "json", *wrong]
        ended = subprocess.run(command(*options), capture_output=True, text=True, timeout=HANG, check=False)
        assert ended.returncode == 2
        assert records(ended.stderr)[-1]["level"] == "error"
        assert records(ended.stderr)[-1]["message"]


@pytest.mark.slow
def test_the_last_line_of_a_server_that_ends_at_once_is_json_too():
    code = (
        "import logging, os, signal, sys\n"
        "from dashinfer_vlm_server.logs import set_format\n"
        "from dashinfer_vlm_server.serving import leave_at_once\n"
        "logging.basicConfig()\n"
        "set_format(sys.argv[1])\n"
        "leave_at_once(signal.SIGTERM, None)\n"
    )
    said = {
        kind: subprocess.run(
            [sys.executable, "-c", code, kind], capture_output=True, text=True, timeout=HANG, check=False
        ).stderr
        for kind in ("json", "text")
    }
    assert records(said["json"])[0]["message"] == "ended by SIGTERM."
    assert said["text"] == "dashinfer-vlm: ended by SIGTERM.\n"


TRY = r"^Try: (curl http://127\.0\.0\.1:\d+/v1/chat/completions .*)$"


@pytest.mark.slow
def test_the_first_question_that_it_shows_brings_a_key_where_one_is_needed(tiny_checkpoint, tmp_path):
    log, key = tmp_path / "log", {"DASHINFER_VLM_API_KEY": "sk-secret"}
    with process(log, "--model", tiny_checkpoint, "--port", 0, environment=key) as server:
        until(lambda: re.search(TRY, log.read_text(), re.MULTILINE) or server.poll() is not None)
        shown = re.search(TRY, log.read_text(), re.MULTILINE)[1]
        _, url, _, header, _, body = shlex.split(shown)
        assert header == "Authorization: Bearer $DASHINFER_VLM_API_KEY"
        assert f'-H "{header}"' in shown  # in quotes that let the shell fill it in
        name, value = header.replace("$DASHINFER_VLM_API_KEY", "sk-secret").split(": ")
        reply = httpx.post(url, headers={name: value}, content=body, trust_env=False, timeout=HANG)
    assert reply.status_code == 200
    assert "sk-secret" not in log.read_text()


@pytest.mark.slow
def test_keys_may_come_from_the_environment(tiny_checkpoint, tmp_path):
    log, keys = tmp_path / "log", {"DASHINFER_VLM_API_KEYS": "sk-one sk-two"}
    options = ["--model", tiny_checkpoint, "--served-model-name", "tiny", "--port", 0, "--log-format", "json"]
    with process(log, *options, environment=keys) as server:
        until(lambda: '"url"' in log.read_text() or server.poll() is not None)
        url = next(line["url"] for line in records(log.read_text()) if "url" in line)
        with httpx.Client(base_url=url.removesuffix("/v1"), trust_env=False, timeout=HANG) as client:
            codes = [
                client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code
                for key in ("sk-one", "sk-two", "sk-one sk-two", "x")
            ]
        server.terminate()
        assert server.wait(timeout=HANG) == 0
    assert codes == [200, 200, 401, 401]
    assert "sk-one" not in log.read_text()
    lines = records(log.read_text())
    assert [line["status"] for line in lines if line["logger"] == "dashinfer_vlm_server.request_context"] == codes


LOST = """
from dashinfer_vlm_core import hookimpl
from dashinfer_vlm_core.decoders import DecoderSupport
from dashinfer_vlm_core.errors import DecoderFailed


class Dying:
    name, supported_params, unsupported_vision_reason, trouble, max_model_len = "dying", frozenset(), "", "", 64

    @hookimpl
    def register_decoders(self, register):
        register(self)

    def check_support(self, spec, config):
        return DecoderSupport(score=99, reason="a test")

    def create(self, spec, config, kernels):
        return self

    async def start(self):
        pass

    async def close(self):
        pass

    async def decode(self, request):
        self.trouble = "It is dead."
        raise DecoderFailed("The decoder died.")
        yield


plugin = Dying()
"""


@pytest.mark.slow
def test_a_server_whose_decoder_is_lost_ends_with_a_code_of_its_own(tiny_checkpoint, tmp_path):
    """Its decoder is that of a plugin which is installed: a module, and the files by which pip tells of it."""
    information = tmp_path / "lost-1.0.dist-info"
    information.mkdir()
    (tmp_path / "lost.py").write_text(LOST)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: lost\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[dashinfer_vlm]\nlost = lost:plugin\n")
    log, path = tmp_path / "log", {"PYTHONPATH": str(tmp_path)}
    options = ["--model", tiny_checkpoint, "--served-model-name", "tiny", "--port", 0, "--decoder-restarts", 0]
    with process(log, *options, environment=path) as server:
        served = re.compile(r"^Serving tiny \(decoder dying\) at (\S+)/v1$", re.MULTILINE)
        until(lambda: served.search(log.read_text()) or server.poll() is not None)
        url = served.search(log.read_text())[1]
        reply = httpx.post(f"{url}/v1/chat/completions", json=HELLO, trust_env=False, timeout=HANG)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "decoder_failed")
        assert server.wait(timeout=HANG) == 3
    assert "this process ends, to be started again" in log.read_text()
    assert "Traceback" not in log.read_text()


@pytest.mark.slow
def test_without_its_extra_the_plugin_loads_and_the_command_says_what_to_install():
    script = (
        "import sys\n"
        "sys.modules.update({'fastapi': None, 'uvicorn': None, 'starlette': None})\n"
        "sys.argv[1:] = ['serve']\n" + MAIN
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG, check=False)
    assert ended.returncode == 2
    assert "pip install 'dashinfer-vlm-adapters[server]'" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
