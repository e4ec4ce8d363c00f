"""Run each command and each example of the README, in order."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import forked
from tests.waiting import HANG

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
SERVER = "http://127.0.0.1:8000"

pytestmark = [pytest.mark.readme, pytest.mark.timeout(600)]


def run(command, **variables):
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise importing it fetches prices from the network
        **variables,
    }
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def server():
    """Run the README's server on a free port and yield its address."""
    command = [Path(sys.executable).parent / "dashinfer-vlm", "serve", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        else:
            pytest.fail("the server ended before it was ready")
        yield found.group()
        process.terminate()
        process.communicate(timeout=HANG)
    assert process.returncode == 0


def test_readme_has_expected_sections():
    commands = [code.split()[0] for language, code in BLOCKS if language == "bash"]
    assert commands == ["uvx", "pip", "scripts/demo", "scripts/test", "dashinfer-vlm", "curl"]
    assert all(len(code.splitlines()) <= 15 for _, code in BLOCKS)


def test_first_command_prints_answer():
    """What uv runs after the installation; `scripts/test-install` runs all of it."""
    _, program, arguments = block("uvx").partition("dashinfer-vlm run")
    answer = run(["bash", "-c", program + arguments]).strip()
    assert f"It prints `{answer}`" in TEXT


def test_demo_response_is_correct():
    output = run(["bash", "-c", block("scripts/demo")])
    assert "4 of 4 responses are correct" in output


def test_readme_test_command_runs():
    """The full suite would include this test, so run one fast test."""
    assert " passed" in run(["bash", "-c", f"{block('scripts/test')} tests/test_public_names.py"])


def test_package_can_be_installed():
    """Skip PyTorch's package index: nothing is installed from it here, and it may be unreachable."""
    (line,) = (line for line in block("pip install").splitlines() if "--index-url" not in line)
    assert "Would install dashinfer-vlm-adapters" in run(
        ["bash", "-c", f"{line} --dry-run --ignore-installed --no-deps"]
    )


def test_server_and_curl(server):
    assert server != SERVER
    output = run(["bash", "-c", block("curl").replace(SERVER, server)])
    assert "circles, squares, triangles, stars and crosses" in output


@pytest.mark.parametrize("code", [code for language, code in BLOCKS if language == "python"])
def test_python_examples_run(server, code):
    output = run([*forked(), "-c", code.replace(SERVER, server)])
    assert re.search(r"\b(circles?|squares?|triangles?|stars?|cross|crosses)\b", output)


def block(start):
    """Return the README command that starts with `start`."""
    return next(code.strip() for language, code in BLOCKS if language == "bash" and code.startswith(start))
