"""`scripts/demo` leaves no server behind."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys

import pytest

from tests.scripts import load_script

STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"


@pytest.fixture(scope="module")
def script():
    return load_script("demo")


def test_server_that_does_not_stop_is_killed(script, monkeypatch):
    monkeypatch.setattr(script, "STOP_TIMEOUT", 0.1)
    command = [sys.executable, "-c", STUBBORN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as server:
        server.stdout.readline()
        script._stop(server)
    assert server.returncode == -signal.SIGKILL


def test_sigterm_ends_the_server_too(script, monkeypatch):
    ended = []

    @contextlib.contextmanager
    def serving(*, keep):
        try:
            assert callable(signal.getsignal(signal.SIGTERM))
            signal.raise_signal(signal.SIGTERM)
            yield "http://127.0.0.1"
        finally:
            ended.append(True)

    monkeypatch.setattr(script, "serving", serving)
    monkeypatch.setattr(sys, "argv", ["demo"])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match="143"):
            script.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended
