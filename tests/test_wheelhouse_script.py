"""`scripts/make-wheelhouse`, without the network."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts import load_script

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script():
    return load_script("make_wheelhouse")


def test_requirements_exclude_what_other_machine_has(script):
    names = script.closure(script.PACKAGE, frozenset(), script.target_environment("3.12", "x86_64"))
    assert {"openai", "pydantic-core", "tokenizers", "huggingface-hub", "click"} <= names
    assert not names & {"torch", "transformers", "numpy", "triton", "fastapi", "av", script.PACKAGE}
    with_extras = script.closure(
        script.PACKAGE, frozenset({"server", "video"}), script.target_environment("3.12", "x86_64")
    )
    assert with_extras - names >= {"fastapi", "starlette", "uvicorn", "av"}


def test_every_requirement_has_pinned_version(script):
    environment = script.target_environment("3.12", "x86_64")
    pins = script.read_pins((ROOT / "constraints.txt").read_text(), environment)
    assert script.closure(script.PACKAGE, frozenset({"server", "video"}), environment) <= pins.keys()


def test_markers_are_those_of_other_python(script):
    lines = 'one==1.0; python_version >= "3.11"\none==0.9; python_version < "3.11"\n# comment\ntwo==2\n'
    for python, version in (("3.10", "0.9"), ("3.12", "1.0")):
        assert script.read_pins(lines, script.target_environment(python, "x86_64")) == {"one": version, "two": "2"}


def test_folder_above_limit_fails_with_largest_wheels(script, tmp_path, monkeypatch):
    def write_wheel(command, *arguments, environment=None):
        if command == "download":
            (tmp_path / "wheels" / "large-1-py3-none-any.whl").write_bytes(bytes(3 << 20))

    monkeypatch.setattr(script, "pip", write_wheel)
    with pytest.raises(script.WheelhouseFailed, match=r"3\.0 MiB, more than 2: large-1-py3-none-any\.whl 3\.0 MiB"):
        script.make(tmp_path / "wheels", "3.12", "x86_64", "server", 2)
    assert not (tmp_path / "wheels").exists()


def test_missing_build_backend_is_reported_before_anything_is_written(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "find_spec", {}.get)
    with pytest.raises(script.WheelhouseFailed, match=r"hatchling, .*: \S+ -m pip install hatchling$"):
        script.make(tmp_path / "wheels", "3.12", "x86_64", "server", 60)
    assert not (tmp_path / "wheels").exists()


def test_invalid_requests_are_rejected(script, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(script.WheelhouseFailed, match="is not empty"):
        script.make(tmp_path, "3.12", "x86_64", "", 60)
    with pytest.raises(script.WheelhouseFailed, match="'4' is not a version of Python"):
        script.make(tmp_path / "new", "4", "x86_64", "", 60)
    monkeypatch.setattr(script, "is_installed", lambda name: name != "litellm")
    with pytest.raises(script.WheelhouseFailed, match="install litellm here first"):
        script.make(tmp_path / "new", "3.12", "x86_64", "video,litellm", 60)
    with pytest.raises(script.WheelhouseFailed, match="gpu is not an extra; there are all, langchain, litellm"):
        script.make(tmp_path / "new", "3.12", "x86_64", "gpu", 60)
