from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from dashinfer_vlm_cli import plugin
from dashinfer_vlm_core.cli.main import cli
from dashinfer_vlm_core.testing import Answer, scripted_engine
from tests.server.conftest import serving
from tests.waiting import HANG

MAIN = "from dashinfer_vlm_core.cli.main import main; main()"


@pytest.fixture
def group() -> click.Group:
    """The command line with the commands of this package, and none of others."""
    group = click.Group(params=cli.params, callback=cli.callback, commands=cli.commands)
    plugin.register_commands(group)
    return group


@pytest.fixture
def run(group):
    """Run a command in this process: `run("chat", "Hello?").output`. Errors for people are raised."""

    def run(*words, input=None, **environment) -> Result:  # noqa: A002 - click's word
        result = CliRunner().invoke(group, [*map(str, words)], input=input, env=environment, prog_name="dashinfer-vlm")
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture
def address(tiny_checkpoint):
    """Serve a script of answers; the address to ask: `address("A red circle.", delay=0.1)`."""
    with contextlib.ExitStack() as stack:

        def start(*answers: Answer, **options) -> str:
            engine = scripted_engine(*answers, model=str(tiny_checkpoint), served_model_name="tiny", **options)
            return f"{stack.enter_context(serving(stack.enter_context(engine))).url}/v1"

        yield start


class Terminal:
    """A program at a terminal of its own."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.seen = ""
        self._pid, self._end = pty.fork()
        if self._pid == 0:  # pragma: no cover - the child becomes the program
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # shells have their background jobs ignore it
            os.execve(command[0], command, environment)
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0))

    def see(self, text: str, seconds: float = 60) -> str:
        """Wait until `text` is shown; what was shown up to then, since the last call."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            if time.monotonic() > end:
                raise TimeoutError(f"{text!r} is not in {self.seen!r}")
            if not self._read():
                raise AssertionError(f"it ended before {text!r}: {self.seen!r}")
        shown, _, self.seen = self.seen.partition(text)
        return shown + text

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def insist(self, typed: str, text: str) -> None:
        """Type until `text` is shown: what comes while a program changes over to reading lines may be lost."""
        for _ in range(10):
            self.type(typed)
            with contextlib.suppress(TimeoutError):
                self.see(text, seconds=3)
                return
        raise AssertionError(f"{text!r} is not in {self.seen!r}")

    def ended(self) -> int:
        """Wait for the end; the exit code."""
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
            self.type("\x1b[1;1R")  # a terminal that is asked where its cursor is says so
        self.seen += (data or b"").decode(errors="replace")
        return data != b""

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            os.kill(self._pid, signal.SIGKILL)
        os.close(self._end)


@pytest.fixture
def terminal(tmp_path) -> Iterator:
    """Run the command line at a terminal: `terminal("chat", "--api-base", url)`."""
    with contextlib.ExitStack() as stack:

        def start(*words, program=MAIN, **environment) -> Terminal:
            variables = {**os.environ, "TERM": "xterm", "XDG_CACHE_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
            started = Terminal([sys.executable, "-c", program, *map(str, words)], variables | environment)
            stack.callback(started.kill)
            return started

        yield start


def process(*words, input="", program=MAIN, **environment) -> subprocess.CompletedProcess[str]:  # noqa: A002 - as above
    """Run the command line as a process of its own, without a terminal."""
    variables = {**os.environ, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", **environment}
    command = [sys.executable, "-c", program, *map(str, words)]
    return subprocess.run(
        command, input=input, env=variables, capture_output=True, text=True, timeout=HANG, check=False
    )


@pytest.fixture
def pictures() -> Path:
    return Path(__file__).parents[2] / "examples" / "pictures"
