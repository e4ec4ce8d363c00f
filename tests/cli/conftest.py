from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import click
import huggingface_hub
import pytest
from click.testing import CliRunner, Result

from dashinfer_vlm_cli import plugin
from dashinfer_vlm_core.cli.main import CommandLine, cli
from dashinfer_vlm_core.testing import ScriptedResponse, scripted_engine
from tests.forked import forked
from tests.hub import serve_hub
from tests.server.conftest import serving
from tests.waiting import HANG

MAIN = "from dashinfer_vlm_core.cli.main import main; main()"


@pytest.fixture
def group() -> click.Group:
    """The command line with the commands of this package only."""
    group = CommandLine(params=cli.params, callback=cli.callback, commands=cli.commands)
    plugin.register_commands(group)
    return group


@pytest.fixture
def run(group):
    """Run a command in this process: `run("chat", "Hello?").output`. It raises DashInferVLMError."""

    def run(*args, input=None, **environment) -> Result:  # noqa: A002 - click's word
        result = CliRunner().invoke(group, [*map(str, args)], input=input, env=environment, prog_name="dashinfer-vlm")
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture
def server_url(tiny_checkpoint):
    """Start a server with scripted responses and return its base URL: `server_url("A red circle.", delay=0.1)`."""
    with contextlib.ExitStack() as stack:

        def start(*responses: ScriptedResponse, **options) -> str:
            engine = scripted_engine(*responses, model=str(tiny_checkpoint), served_model_name="tiny", **options)
            return f"{stack.enter_context(serving(stack.enter_context(engine))).url}/v1"

        yield start


class Terminal:
    """A program in a pseudoterminal."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.output = ""
        self._pid, self._end = pty.fork()
        if self._pid == 0:  # pragma: no cover - the child becomes the program
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # background jobs of shells ignore it
            os.execve(command[0], command, environment)
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0))

    def wait_for(self, text: str, seconds: float = HANG) -> str:
        """Wait until `text` is shown, and return the output up to it since the last call."""
        deadline = time.monotonic() + seconds
        while text not in self.output:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{text!r} is not in {self.output!r}")
            if not self._read():
                raise AssertionError(f"the program exited before {text!r}: {self.output!r}")
        shown, _, self.output = self.output.partition(text)
        return shown + text

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def type_until(self, typed: str, text: str) -> None:
        """Type until `text` is shown: input is lost if the program is not reading lines yet."""
        for _ in range(10):
            self.type(typed)
            with contextlib.suppress(TimeoutError):
                self.wait_for(text, seconds=3)
                return
        raise AssertionError(f"{text!r} is not in {self.output!r}")

    def wait(self) -> int:
        """Wait until the program exits, and return the exit code."""
        while self._read():
            pass
        _, status = os.waitpid(self._pid, 0)
        return os.waitstatus_to_exitcode(status)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._end], [], [], 0.1)
        try:
            data = os.read(self._end, 65536) if ready else None
        except OSError:
            return False
        if data and b"\x1b[6n" in data:
            self.type("\x1b[1;1R")  # report the cursor position
        self.output += (data or b"").decode(errors="replace")
        return data != b""

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            os.kill(self._pid, signal.SIGKILL)
        os.close(self._end)


@pytest.fixture
def terminal(tmp_path) -> Iterator:
    """Run the command line in a pseudoterminal: `terminal("chat", "--api-base", url)`."""
    with contextlib.ExitStack() as stack:

        def start(*args, program=MAIN, **environment) -> Terminal:
            variables = {**os.environ, "TERM": "xterm", "XDG_CACHE_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
            started = Terminal([sys.executable, "-c", program, *map(str, args)], variables | environment)
            stack.callback(started.kill)
            return started

        yield start


def run_process(*args, input="", program=MAIN, fork=True, **environment) -> subprocess.CompletedProcess[str]:  # noqa: A002 - click's word
    """Run the command line in a subprocess without a terminal; without `fork`, in a new interpreter."""
    variables = {**os.environ, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", **environment}
    command = [*(forked() if fork else [sys.executable]), "-c", program, *map(str, args)]
    return subprocess.run(
        command, input=input, env=variables, capture_output=True, text=True, timeout=HANG, check=False
    )


@pytest.fixture
def images() -> Path:
    return Path(__file__).parents[2] / "examples" / "pictures"


@pytest.fixture
def hub(tiny_checkpoint, tmp_path, monkeypatch):
    """A hub with a copy of the tiny model, which this process uses, and an empty cache."""
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "served")
    (folder / "pickle.bin").write_bytes(b"not wanted")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setenv("DASHINFER_VLM_CACHE_DIR", str(tmp_path / "ours"))
    monkeypatch.setattr("dashinfer_vlm_core.models.downloads.RETRY_SECONDS", (0,))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    with serve_hub(folder) as handler:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", handler.url)
        huggingface_hub.close_session()
        yield handler
    huggingface_hub.close_session()


@pytest.fixture
def repository(tmp_path):
    return tmp_path / "home" / "hub" / "models--maker--tiny"
