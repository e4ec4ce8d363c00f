"""A missing extra is one sentence with the command that installs it."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from dashinfer_vlm_core.errors import MissingDependency, extra_required
from dashinfer_vlm_core.installation import install_step
from tests.waiting import HANG

IMPORT = """
import sys
sys.modules.update(dict.fromkeys({missing!r}))
import importlib
from dashinfer_vlm_core.plugins import load_adapter
for load in (lambda: getattr(importlib.import_module({package!r}), {name!r}), lambda: load_adapter({adapter!r})):
    try:
        load()
    except ImportError as error:
        print(error)
"""
COMMAND = """
import sys
sys.modules.update(dict.fromkeys({missing!r}))
sys.argv[1:] = {arguments!r}
from dashinfer_vlm_core.cli.main import main
main()
"""


def run(program, **fields):
    command = [sys.executable, "-c", program.format(**fields)]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapter", "missing", "name"),
    [
        ("langchain", "langchain_core", "ChatDashInferVLM"),
        ("litellm", "litellm", "register"),
        ("server", "fastapi", "create_app"),
    ],
)
def test_adapter_names_its_extra(adapter, missing, name):
    result = run(IMPORT, missing=[missing], package=f"dashinfer_vlm_{adapter}", name=name, adapter=adapter)
    sentences = result.stdout.splitlines()
    assert len(sentences) == 2, result.stderr
    assert sentences[0] == sentences[1]
    assert sentences[0].endswith(f"requires {missing}, which is not installed. {install_step(adapter)}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "missing", "extra"),
    [
        (["serve"], "fastapi", "server"),
        (["serve", "--otlp-traces-endpoint", "http://127.0.0.1:9"], "opentelemetry.sdk", "server"),
    ],
)
def test_command_names_its_extra(arguments, missing, extra):
    result = run(COMMAND, missing=[missing], arguments=arguments)
    assert result.returncode != 0
    last = result.stderr.splitlines()[-1]
    assert last.startswith("dashinfer-vlm: ")
    assert last.endswith(install_step(extra))
    assert "Traceback" not in result.stderr


def test_other_import_errors_are_not_hidden():
    """A module of this package that is missing is a defect, and no extra would install it."""
    with pytest.raises(ModuleNotFoundError, match="nothing") as caught, extra_required("It", extra="x"):
        importlib.import_module("dashinfer_vlm_core.nothing")
    assert not isinstance(caught.value, MissingDependency)
