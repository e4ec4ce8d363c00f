"""The tests that use the `openai` package, with its other major version: LiteLLM's in constraints.txt requires 2."""

from __future__ import annotations

import os
import subprocess

import pytest

from benchmarks.environments import SetupMissing
from tests.interop import interpreters

pytestmark = [pytest.mark.interop, pytest.mark.timeout(1800)]

FILES = (
    "tests/clients/test_clients.py", "tests/core/test_remote.py", "tests/core/test_response_builder.py",
    "tests/core/test_responses_request.py", "tests/langchain", "tests/server/test_chat.py",
    "tests/server/test_errors.py", "tests/server/test_responses.py",
)  # fmt: skip


def test_tests_of_clients_pass_with_openai_3():
    try:
        interpreter = interpreters.openai_3()
    except SetupMissing as error:
        pytest.skip(f"openai 3 is not available: {error}")
    installed = interpreter.run("versions.py", {"imports": ["openai"], "packages": ["openai"]})
    assert f"openai=={installed['openai']}" in interpreters.OPENAI_3
    command = [str(interpreter.python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not litellm", *FILES]
    environment = {**os.environ, **interpreter.environment}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=interpreters.ROOT, env=environment)
    assert done.returncode == 0, done.stdout[-8000:]
