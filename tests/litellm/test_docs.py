"""The programs in docs/litellm.md run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dashinfer_vlm_core import EngineConfig
from dashinfer_vlm_core.engine.shared import SHARED
from tests.pages import ROOT, page_programs
from tests.server.conftest import serving
from tests.waiting import HANG

pytestmark = pytest.mark.slow

SERVER = "http://127.0.0.1:8000"


def run(*arguments):
    variables = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    command = [sys.executable, *arguments]
    result = subprocess.run(
        command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=HANG, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_documented_programs_run():
    """In one process, since importing LiteLLM takes most of the time of a program."""
    programs = page_programs("litellm.md")
    assert len(programs) == 3
    with serving(SHARED.get(EngineConfig())) as server:
        texts = [program.replace(SERVER, server.url) for program in programs]
        output = run("-c", f"for text in {texts!r}: exec(text, {{'__name__': '__main__'}}), print(end='\\f')")
    for program, printed in zip(programs, output.split("\f"), strict=False):
        assert "circles, squares, triangles, stars and crosses" in printed or SERVER not in program
