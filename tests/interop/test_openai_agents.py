"""The OpenAI Agents SDK, which uses the Responses API.

It needs a newer major version of `openai` than LiteLLM allows, and therefore has an environment of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dashinfer_vlm_core import EngineConfig
from dashinfer_vlm_core.testing import scripted_engine
from tests.samples import image_url
from tests.server.conftest import serving

pytestmark = pytest.mark.interop

PIN = "openai-agents==0.24.0"
PROGRAM = Path(__file__).parent / "programs" / "run_agents.py"
TIMEOUT = 280.0
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="session")
def python() -> Path:
    """The interpreter of an environment with the SDK, which is created on first use."""
    folder = EngineConfig().cache_folder / "interop" / PIN.replace("==", "-")
    interpreter, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists():
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            [str(interpreter), "-m", "pip", "install", "-q", PIN],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"{PIN} cannot be installed: {done.stderr[-500:]}")
        ready.touch()
    return interpreter


def test_agents_call_tools_and_return_typed_output(python, tiny_checkpoint, tmp_path):
    responses = (CALL, "Sunny in Rome.", "Still sunny.", CALL, "Sunny in Rome.", '{"a": 12}')
    options = {"model": str(tiny_checkpoint), "served_model_name": "tiny"}
    source, target = tmp_path / "request.json", tmp_path / "result.json"
    with scripted_engine(*responses, **options) as engine, serving(engine) as server:
        request = {"base_url": f"{server.url}/v1", "question": "How is it in Rome?", "image": image_url()}
        source.write_text(json.dumps(request))
        environment = {**os.environ, "NO_PROXY": "127.0.0.1", "PYTHONNOUSERSITE": "1"}
        command = [str(python), str(PROGRAM), str(source), str(target)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT, check=False, env=environment, cwd=tmp_path
        )
    assert done.returncode == 0, done.stderr[-8000:]
    result = json.loads(target.read_text())
    assert result["plain"] == result["streamed"] == result["deltas"] == "Sunny in Rome."
    assert result["continued"] == "Still sunny."
    assert result["calls"] == ["Rome", "Rome"]
    assert result["answer"] == 12
    plain, continued, _ = result["input_tokens"]
    assert continued > plain / 2  # the whole conversation, once; `plain` counts two requests
