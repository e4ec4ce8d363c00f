"""Tests of `dashinfer-vlm serve` as a separate process."""

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
from dashinfer_vlm_core.errors import ConfigError
from dashinfer_vlm_core.installation import install_step
from dashinfer_vlm_core.testing import Script, scripted_engine, scripted_registry
from dashinfer_vlm_server import create_app, plugin
from dashinfer_vlm_server.serving import Server, uvicorn_config
from dashinfer_vlm_server.settings import DrainState
from dashinfer_vlm_server.sockets import Address
from tests.forked import forked
from tests.waiting import HANG, until

MAIN = "from dashinfer_vlm_core.cli.main import main; main()"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
SERVES = re.compile(r"^Serving tiny \(decoder torch\) at (http://127\.0\.0\.1:\d+)/v1$", re.MULTILINE)


def command(*options, program=MAIN, interpreter=forked):
    return [*interpreter(), "-c", program, "serve", *map(str, options)]


def started():
    """The command of an interpreter that is not forked: for its options, variables and what it collects."""
    return [sys.executable]


@contextlib.contextmanager
def process(log, *options, environment=MappingProxyType({}), **how):
    variables = {**os.environ, **environment}
    with (
        log.open("w") as file,
        subprocess.Popen(command(*options, **how), stderr=file, stdout=subprocess.PIPE, env=variables) as server,
    ):
        try:
            yield server
        finally:
            server.kill()


def wait_until_ready(server, log):
    """Return the URL of a server once it logs that it is ready. Fails with its log if it exits before."""
    until(lambda: SERVES.search(log.read_text()) or server.poll() is not None)
    found = SERVES.search(log.read_text())
    assert found, log.read_text()
    return found[1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_serve_starts_responds_and_exits_on_sigint(tiny_checkpoint, tmp_path):
    """test_drain.py sends SIGTERM."""
    log = tmp_path / "log"
    with process(log, "--model", tiny_checkpoint, "--served-model-name", "tiny", "--port", 0) as server:
        with httpx.Client(base_url=wait_until_ready(server, log), trust_env=False, timeout=HANG) as client:
            assert client.get("/health").json()["status"] == "ready"
            assert client.post("/v1/chat/completions", json=HELLO).json()["usage"]["completion_tokens"] <= 4
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=HANG) == 0
        assert server.stdout.read() == b""
    assert "Traceback" not in log.read_text()
    assert re.search(
        r"^Try: curl http://\S+/v1/chat/completions -H 'Content-Type: application/json' -d '\{.*\}'$",
        log.read_text(),
        re.MULTILINE,
    )


COLLECTING = f"""
import atexit, gc, sys
seen = set()
gc.callbacks.append(lambda *_: seen.add(("torch" in sys.modules, gc.get_freeze_count() > 100_000)))
atexit.register(lambda: print(sorted(seen)))
{MAIN}
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_gc_is_frozen_after_loading(tiny_checkpoint, tmp_path):
    log = tmp_path / "log"
    options = ("--model", tiny_checkpoint, "--served-model-name", "tiny", "--port", 0)
    with process(log, *options, program=COLLECTING, interpreter=started) as server:
        with httpx.Client(base_url=wait_until_ready(server, log), trust_env=False, timeout=HANG) as client:
            for _ in range(20):
                assert client.post("/v1/chat/completions", json=HELLO).status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=HANG) == 0
        assert server.stdout.read() == b"[(False, False), (True, True)]\n"


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_signal_during_a_download_exits(tmp_path, ending):
    """The hub accepts connections and never responds; its client would wait for ten minutes."""
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
    assert log.read_text().splitlines()[-1] == f"dashinfer-vlm: terminated by {ending.name}."
    assert "Traceback" not in log.read_text()


class StoppableServer(NamedTuple):
    """A server in a thread, with a grace period of 0.2 s."""

    server: Server
    thread: threading.Thread

    @classmethod
    def start(cls, engine, app=None, *, grace=0.2):
        drain_state = DrainState()
        settings = uvicorn_config(app or create_app(engine, drain_state=drain_state), Address())
        settings.port = 0
        server = Server(settings, engine=engine, drain_state=drain_state, grace=grace)
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
def stoppable(tiny_checkpoint):
    """A server whose responses take minutes."""
    script = Script("A long answer that goes on and on. " * 100, delay=0.2)
    config = EngineConfig(model=str(tiny_checkpoint), decoder="scripted")
    with Engine(config, registry=scripted_registry(script)) as engine:
        yield StoppableServer.start(engine)


@pytest.mark.slow
def test_request_over_the_grace_period_gets_an_error(stoppable):
    with (
        httpx.Client(base_url=f"http://127.0.0.1:{stoppable.port}", trust_env=False) as client,
        client.stream("POST", "/v1/chat/completions", json=HELLO | {"stream": True, "max_tokens": 999}) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        stoppable.stop()
        *_, last = filter(None, lines)
    stoppable.assert_ends()
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_closed"


def request_head(length):
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {length}\r\n\r\n".encode()


@pytest.mark.slow
def test_client_that_stops_sending_does_not_block_shutdown(stoppable, caplog):
    with socket.create_connection(("127.0.0.1", stoppable.port)) as stalled:
        stalled.sendall(request_head(1000) + b'{"messages": [')
        until(lambda: stoppable.server.server_state.tasks)
        stoppable.stop()
        stoppable.assert_ends()
    assert "Traceback" not in caplog.text


async def send_large_response(_scope, _receive, send):
    """An application whose response exceeds the socket buffers of a client that does not read."""
    await send({"type": "http.response.start", "status": 200})
    for _ in range(64):
        await send({"type": "http.response.body", "body": bytes(1024 * 1024), "more_body": True})
    await send({"type": "http.response.body"})


@pytest.mark.slow
def test_client_that_stops_reading_does_not_block_shutdown(tiny_checkpoint, caplog):
    stoppable = StoppableServer.start(scripted_engine("Fine.", model=str(tiny_checkpoint)), send_large_response)
    with socket.create_connection(("127.0.0.1", stoppable.port)) as stalled:
        stalled.sendall(request_head(0))
        assert stalled.recv(12) == b"HTTP/1.1 200"
        stoppable.stop()
        stoppable.assert_ends()
    assert "Traceback" not in caplog.text


def startup_error(*options):
    """Return the last line and the exit code of a server that fails to start."""
    completed = subprocess.run(command(*options), capture_output=True, text=True, timeout=HANG, check=False)
    assert "Traceback" not in completed.stderr
    return completed.stderr.splitlines()[-1], completed.returncode


@pytest.mark.slow
def test_missing_model_exits_with_a_message(tmp_path):
    line, code = startup_error("--port", 0, "--model", tmp_path / "none")
    assert code == 2
    assert line.startswith("dashinfer-vlm: There is no model")


@pytest.mark.slow
def test_port_in_use_exits_with_a_message():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line, code = startup_error("--port", port)
    assert code == 2
    assert line == (
        f"dashinfer-vlm: Cannot listen on 127.0.0.1 port {port}: Address already in use."
        " Choose another --host or --port (--port 0 selects a free port)."
    )


@pytest.mark.slow
def test_option_out_of_range_is_named():
    line, code = startup_error("--max-batch-size", 0)
    assert code == 2
    assert "max_batch_size" in line


@pytest.fixture
def runner():
    group = click.Group()
    plugin.register_commands(group)
    return lambda *arguments: CliRunner().invoke(group, arguments)


def test_help_lists_every_engine_option(runner):
    text = " ".join(runner("serve", "--help").output.split())
    assert all(option.opts[0] in text for option in plugin.serve.engine_options)
    assert "--port" in text
    assert "DASHINFER_VLM_PORT for --port" in text
    assert "DASHINFER_VLM_MAX_PIXELS for --max-pixels" in text


def test_help_begins_with_model_memory_and_speed(runner):
    lines = runner("serve", "--help").output.splitlines()
    titles = [line.removesuffix(":") for line in lines if re.fullmatch(r"[A-Z].*:", line)]
    assert titles[:6] == [*plugin.serve.first_sections, "API keys", "Requests"]
    assert "  --model NAME|FOLDER" in lines[lines.index("Model:") + 1]
    assert lines.index("Model:") < 20


@pytest.mark.parametrize(
    "options", [["--port", "65536"], ["--port", "x"], ["--max-body-mib", "0"], ["--no-such-option"]]
)
def test_invalid_option_is_named(runner, options):
    result = runner("serve", *options)
    assert result.exit_code == 2
    assert options[0] in result.output


@pytest.mark.parametrize("words", [["tiny"], ["--model", "tiny"], ["tiny", "--model", "tiny"]])
def test_model_is_an_argument_or_an_option(tmp_path, words):
    (tmp_path / "options.yaml").write_text("model: other")
    with plugin.serve.make_context("serve", [*words, "--config", str(tmp_path / "options.yaml")]) as context:
        assert context.params["model"] == ("tiny",)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--api-key", ""], "API key"),
        (["--api-key-file", "none.txt"], "--api-key-file: none.txt cannot be read"),
        (["--ssl-keyfile", "key.pem"], "require --ssl-certfile"),
        (["--ssl-ca-certs", "ca.pem"], "require --ssl-certfile"),
        (["--max-requests-per-key", "1"], "require API keys"),
        (["--tokens-per-minute-per-key", "9"], "require API keys"),
        (["--root-path", "vision"], "--root-path must start with a slash"),
        (["--root-path", "/vision/"], "--root-path must start with a slash"),
        (["--ssl-certfile", "none.pem", "--port", "0"], "--ssl-certfile"),
        (["--uds", "none/socket"], "Choose another --uds"),
    ],
)
def test_inconsistent_options_are_rejected(runner, options, words):
    startup_error = runner("serve", *options).exception
    assert isinstance(startup_error, ConfigError)
    assert words in startup_error.message


VALUES = {
    "host": "0.0.0.0", "port": "9000", "uds": "a/socket", "page": "false", "root_path": "/vision",
    "api_key_file": "keys.txt", "ssl_certfile": "cert.pem", "ssl_keyfile": "key.pem",
    "ssl_ca_certs": "ca.pem", "allowed_hosts": "a.example", "protocols": "openai,ocr",
    "allowed_origins": "https://a.example", "max_body_mib": "7",
    "max_stored_responses": "10", "max_background_responses": "5",
    "request_timeout": "60", "grace": "3", "log_format": "json",
    "otlp_traces_endpoint": "http://127.0.0.1:4318/v1/traces", "share_media_between_keys": "true",
    "max_requests_per_key": "2", "tokens_per_minute_per_key": "1000",
    "models": '{"a": "demo"}', "memory_limit": "12g", "idle_unload": "10m", "model_wait": "1m",
    "allow_model_management": "true",
}  # fmt: skip
"""A value other than the default for each option of the server."""

SWITCHES = {
    "page": "--no-page",
    "share_media_between_keys": "--share-media-between-keys",
    "allow_model_management": "--allow-model-management",
}
"""The options that take no value on the command line."""


def parsed(*words):
    """Return the server options that the command parses."""
    with plugin.serve.make_context("serve", [*words]) as context:
        engine = {option.name for option in plugin.serve.engine_options}
        return {name: value for name, value in context.params.items() if name not in engine}


@pytest.mark.parametrize(
    ("words", "variables", "expected"),
    [
        ((), {"DASHINFER_VLM_API_KEYS": "sk-a sk-b", "DASHINFER_VLM_API_KEY": "sk-c"}, ("sk-a", "sk-b")),
        ((), {"DASHINFER_VLM_API_KEY": "sk-c"}, ("sk-c",)),
        (("--api-key", "sk-d"), {"DASHINFER_VLM_API_KEYS": "sk-a"}, ("sk-d",)),
        (("--api-key", "sk-d"), {"DASHINFER_VLM_API_KEY": "sk-c"}, ("sk-d",)),
    ],
)
def test_api_keys_of_the_command_override_variables(monkeypatch, words, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert parsed(*words)["api_keys"] == expected


def test_environment_sets_every_option():
    defaults = parsed()
    assert VALUES.keys() == defaults.keys() - {"api_keys"}  # which has other variables
    flags = {name: f"--{name.replace('_', '-')}" for name in VALUES}
    words = [word for name, value in VALUES.items() if name not in SWITCHES for word in (flags[name], value)]
    expected = parsed(*SWITCHES.values(), *words)
    os.environ.update({f"DASHINFER_VLM_{name.upper()}": value for name, value in VALUES.items()})
    parsed_options = parsed()
    assert parsed_options == expected
    assert all(parsed_options[name] != defaults[name] for name in VALUES)


def test_precedence_of_command_line_file_and_environment(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("port: 2\ngrace: 2\n")
    os.environ.update({f"DASHINFER_VLM_{name}": "3" for name in ("PORT", "GRACE", "MAX_BODY_MIB")})
    os.environ["DASHINFER_VLM_HOST"] = ""  # an empty variable is ignored
    parsed_options = parsed("--config", str(file), "--port", "1")
    assert {
        name: parsed_options[name] for name in ("port", "grace", "max_body_mib", "max_stored_responses", "host")
    } == {
        "port": 1,
        "grace": 2,
        "max_body_mib": 3,
        "max_stored_responses": 1000,
        "host": "127.0.0.1",
    }


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("PORT", "x", "'x' must be an integer. It comes from the environment. Set DASHINFER_VLM_PORT to"),
        (
            "PORT",
            "65536",
            "'65536' must be at most 65535. It comes from the environment. Set",
        ),
        ("PORT", "tcp://10.0.0.1:80", "Add `enableServiceLinks: false` to the pod's spec, or set --port"),
        ("GRACE", "soon", "'soon' must be a number. It comes from the environment. Set DASHINFER_VLM_GRACE"),
        ("PAGE", "maybe", "Set DASHINFER_VLM_PAGE to another value"),
        (
            "LOG_FORMAT",
            "xml",
            "is not one of 'text', 'json'. It comes from the environment. Set",
        ),
    ],
)
def test_invalid_environment_variable_is_named(runner, name, value, words):
    os.environ[f"DASHINFER_VLM_{name}"] = value
    result = runner("serve")
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


def test_command_line_error_does_not_blame_the_environment(runner):
    os.environ["DASHINFER_VLM_PORT"] = "9000"
    assert "environment" not in runner("serve", "--port", "x").output


def test_no_ps_warning_for_keys_from_a_file(runner, caplog, tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("api-key: [sk-secret]\nuds: none/socket\n")
    file.chmod(0o600)
    runner("serve", "--config", str(file))
    assert "`ps`" not in caplog.text


def test_warning_for_keys_on_the_command_line(runner, caplog):
    broken = ["--api-key-file", "none.txt"]  # exits before it serves
    runner("serve", "--api-key", "sk-secret", "--root-path", "x")
    assert "sk-secret" not in caplog.text
    runner("serve", "--host", "0.0.0.0", "--uds", "none/socket", "--api-key", "sk-secret")
    assert "`ps` shows the keys" in caplog.text
    assert "sk-secret" not in caplog.text
    assert "sk-secret" not in runner("serve", *broken).output


@pytest.mark.parametrize(("key", "warns"), [(["--api-key", "sk-b"], True), ([], False)])
def test_warning_for_embedding_store_that_keys_do_not_share(runner, caplog, tmp_path, key, warns):
    options = ["--uds", "none/socket", "--embedding-store", tmp_path.as_uri(), "--api-key", "sk-a", *key]
    runner("serve", *options)
    assert ("Set --embedding-store-secret-file, or" in caplog.text) == warns
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    caplog.clear()
    runner("serve", *options, "--embedding-store-secret-file", str(secret))
    assert "Set --embedding-store-secret-file, or" not in caplog.text


def records(text):
    return [json.loads(line) for line in text.splitlines()]  # fails if a line is not JSON


@pytest.mark.slow
def test_json_logs_have_only_json_lines(tiny_checkpoint, tmp_path):
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
def test_startup_error_is_json_in_json_logs(tmp_path):
    for wrong in (["--model", tmp_path / "none"], ["--max-batch-size", 0], ["--root-path", "x"]):
        options = ["--port", 0, "--log-format", "json", *wrong]
        completed = subprocess.run(command(*options), capture_output=True, text=True, timeout=HANG, check=False)
        assert completed.returncode == 2
        assert records(completed.stderr)[-1]["level"] == "error"
        assert records(completed.stderr)[-1]["message"]


@pytest.mark.slow
def test_last_line_of_an_immediate_exit_is_json():
    code = (
        "import logging, os, signal, sys\n"
        "from dashinfer_vlm_server.logs import set_format\n"
        "from dashinfer_vlm_server.serving import exit_immediately\n"
        "logging.basicConfig()\n"
        "set_format(sys.argv[1])\n"
        "exit_immediately(signal.SIGTERM, None)\n"
    )
    stderr = {
        kind: subprocess.run(
            [*forked(), "-c", code, kind], capture_output=True, text=True, timeout=HANG, check=False
        ).stderr
        for kind in ("json", "text")
    }
    assert records(stderr["json"])[0]["message"] == "terminated by SIGTERM."
    assert stderr["text"] == "dashinfer-vlm: terminated by SIGTERM.\n"


TRY = r"^Try: (curl http://127\.0\.0\.1:\d+/v1/chat/completions .*)$"


@pytest.mark.slow
def test_sample_request_reads_the_key(tiny_checkpoint, tmp_path):
    log, key = tmp_path / "log", {"DASHINFER_VLM_API_KEY": "sk-secret"}
    with process(log, "--model", tiny_checkpoint, "--port", 0, environment=key) as server:
        until(lambda: re.search(TRY, log.read_text(), re.MULTILINE) or server.poll() is not None)
        shown = re.search(TRY, log.read_text(), re.MULTILINE)[1]
        _, url, _, header, _, content_type, _, body = shlex.split(shown)
        assert content_type == "Content-Type: application/json"
        assert header == "Authorization: Bearer $DASHINFER_VLM_API_KEY"
        assert f'-H "{header}"' in shown  # in quotes in which the shell expands variables
        name, value = header.replace("$DASHINFER_VLM_API_KEY", "sk-secret").split(": ")
        response = httpx.post(url, headers={name: value}, content=body, trust_env=False, timeout=HANG)
    assert response.status_code == 200
    assert "sk-secret" not in log.read_text()


@pytest.mark.slow
def test_keys_from_the_environment(tiny_checkpoint, tmp_path):
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
from dashinfer_vlm_core.decoders import Decoder, DecoderSupport
from dashinfer_vlm_core.errors import DecoderFailed


class Dying(Decoder):
    name, supported_params, unsupported_vision_reason, fatal_error, max_model_len = "dying", frozenset(), "", "", 64

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
        self.fatal_error = "It is dead."
        raise DecoderFailed("The decoder died.")
        yield


plugin = Dying()
"""


@pytest.mark.slow
def test_lost_decoder_exits_with_code_3(tiny_checkpoint, tmp_path):
    """The decoder comes from an installed plugin: a module and the metadata files that pip writes."""
    information = tmp_path / "lost-1.0.dist-info"
    information.mkdir()
    (tmp_path / "lost.py").write_text(LOST)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: lost\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[dashinfer_vlm]\nlost = lost:plugin\n")
    log, path = tmp_path / "log", {"PYTHONPATH": str(tmp_path)}
    options = ["--model", tiny_checkpoint, "--served-model-name", "tiny", "--port", 0]
    with process(log, *options, environment=path, interpreter=started) as server:
        served = re.compile(r"^Serving tiny \(decoder dying\) at (\S+)/v1$", re.MULTILINE)
        until(lambda: served.search(log.read_text()) or server.poll() is not None)
        url = served.search(log.read_text())[1]
        response = httpx.post(f"{url}/v1/chat/completions", json=HELLO, trust_env=False, timeout=HANG)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "decoder_failed")
        assert server.wait(timeout=HANG) == 3
    assert "The process exits and must be restarted" in log.read_text()
    assert "Traceback" not in log.read_text()


@pytest.mark.slow
def test_serve_without_its_extra_says_what_to_install():
    script = (
        "import sys\n"
        "sys.modules.update({'fastapi': None, 'uvicorn': None, 'starlette': None})\n"
        "sys.argv[1:] = ['serve']\n" + MAIN
    )
    completed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG, check=False
    )
    assert completed.returncode == 2
    assert completed.stderr.splitlines()[-1].endswith(install_step("server"))
    assert "Traceback" not in completed.stderr
