"""A forked program is one that its caller started: streams, environment, folder, signals and exit code."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.forked import forked
from tests.waiting import HANG, until

WAITING = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"

pytestmark = pytest.mark.slow


def test_program_has_what_its_caller_gives(tmp_path):
    program = "import os, sys; print(sys.argv[1:], os.getcwd(), os.environ['GIVEN'], sys.stdin.read()); sys.exit(3)"
    done = subprocess.run(
        [*forked(), "-c", program, "a", "b"], input="typed", cwd=tmp_path, env={"GIVEN": "yes"}, capture_output=True,
        text=True, timeout=HANG, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (3, f"['a', 'b'] {tmp_path} yes typed\n"), done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signal_ends_program_and_is_its_exit_code(number):
    with subprocess.Popen([*forked(), "-c", WAITING], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as client:
        program = Path("/proc", client.stdout.readline().decode().strip())
        client.send_signal(number)
        assert client.wait(timeout=HANG) == -number
    until(lambda: not program.exists())


def test_killed_program_is_reported():
    done = subprocess.run([*forked(), "-c", f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"], check=False)
    assert done.returncode == -signal.SIGKILL
