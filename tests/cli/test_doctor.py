"""`doctor`: what is installed, what is missing, and how to mend it."""

from __future__ import annotations

import json
import os

import pytest

from dashinfer_vlm_cli.checks import EXTRAS, NEEDED
from tests.cli.conftest import MAIN, process


def findings(ended):
    return {row["name"]: row for row in json.loads(ended.stdout)}


@pytest.mark.slow
def test_a_sound_installation(tmp_path):
    ended = process("doctor", "--deep", "--json", DASHINFER_VLM_CACHE_DIR=str(tmp_path))
    found = findings(ended)
    assert ended.returncode == 0, ended.stdout
    assert {"python", "dashinfer-vlm-adapters", "cpu", "cuda", "cache", "disk", "plugins", *NEEDED} <= set(found)
    assert {f"extra {extra}" for extra in EXTRAS} <= set(found)
    assert found["self test"]["detail"] == "the decoder torch sees: A red circle."
    assert found["dashinfer"]["status"] == "missing"
    assert "dashinfer-vlm dashinfer install" in found["dashinfer"]["mend"]
    assert found["cache"]["detail"] == str(tmp_path)
    assert [row["name"] for row in found.values() if row["status"] == "broken"] == []


@pytest.mark.slow
def test_a_missing_extra_costs_nothing_and_a_missing_library_everything():
    """As if they were not installed: their modules cannot be found, or not loaded."""
    program = (
        "import importlib.util as u, sys; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'av' else find(name, *a)\n"
        f"sys.modules['llguidance'] = None\n{MAIN}"
    )
    ended = process("doctor", "--json", program=program)
    found = findings(ended)
    assert ended.returncode == 1
    assert found["extra video"]["status"] == "missing"
    assert found["extra video"]["mend"] == "Run: pip install 'dashinfer-vlm-adapters[video]'"
    assert found["llguidance"]["status"] == "broken"
    assert found["llguidance"]["mend"].startswith("Run: pip install --force-reinstall 'llguidance")


@pytest.mark.slow
def test_what_the_environment_sets_wrongly_is_named(tmp_path):
    found = findings(process("doctor", "--json", DASHINFER_VLM_MAX_PIXELS="3"))
    assert found["options"]["status"] == "broken"
    assert "max_pixels" in found["options"]["detail"]
    (tmp_path / "file").write_text("")
    ended = process("doctor", "--json", DASHINFER_VLM_CACHE_DIR=str(tmp_path / "file" / "cache"))
    assert ended.returncode == 1
    assert findings(ended)["cache"]["status"] == "broken"


@pytest.mark.slow
def test_a_decoder_that_is_asked_for_has_to_be_there(tmp_path):
    ended = process("doctor", "--json", DASHINFER_VLM_DECODER="dashinfer", DASHINFER_VLM_CACHE_DIR=str(tmp_path))
    assert findings(ended)["dashinfer"]["status"] == "broken"
    assert ended.returncode == 1


@pytest.mark.slow
def test_colours_are_for_terminals_alone(terminal):
    shown = terminal("doctor", COLUMNS="120").see("cuda")
    assert "\x1b[32m" in shown
    plain = terminal("doctor", COLUMNS="120", NO_COLOR="1").see("cuda")
    assert "\x1b[" not in plain
    assert "WHAT" in plain
    assert "\x1b[" not in process("doctor").stdout


def test_a_person_is_told_the_command_that_mends(run, tmp_path):
    result = run("doctor", DASHINFER_VLM_CACHE_DIR=str(tmp_path))
    assert result.exit_code == 0
    assert "WHAT" in result.stdout.splitlines()[0]
    assert "\ndashinfer: DashInfer is not installed. Run `dashinfer-vlm dashinfer install`" in result.stdout
    assert os.fspath(tmp_path) in result.stdout
