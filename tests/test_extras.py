"""The extras of pyproject.toml: those between which users choose, and every name of one elsewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
GROUPS = PROJECT["dependency-groups"]
NAMED = {
    "a command": r"(?:(?<=')\.|\.whl|/\*\.whl\)|dashinfer-vlm-adapters)\[([a-z,-]+)\]",
    "a message or a comment": r"extra `([a-z-]+)`",
    "an error": r"extra_required\(.*?, extra=\"([a-z-]+)\"",
    "a test": r"install_step\([\"']([a-z-]+)[\"']\)",
    "a plugin": r"= \"dashinfer_vlm_\w+:\w+ \[([a-z-]+)\]\"",
}
"""Where extras are named, as expressions that find the names."""


def sources():
    folders = ("dashinfer_vlm_core", "adapters", "plugins", "scripts", "docs", "examples", "benchmarks", ".github")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    kinds = {".py", ".md", ".yaml", ".yml", ""}
    pages = [path for path in ROOT.glob("*.[mt][do]*") if path.name != "CHANGELOG.md"]
    return [*(path for path in files if path.suffix in kinds and "lab" not in path.parts), *pages]


def test_extras_are_those_between_which_users_choose():
    assert set(EXTRAS) == {"server", "video", "litellm", "langchain", "ray", "all"}


@pytest.mark.parametrize("pattern", NAMED.values(), ids=NAMED)
def test_extras_named_elsewhere_exist(pattern):
    paths = sources() if "install_step" not in pattern else [*(ROOT / "tests").rglob("*.py")]
    found = [(path, name) for path in paths for name in re.findall(pattern, path.read_text(encoding="utf-8"))]
    assert len(found) >= 3
    unknown = [f"{path.relative_to(ROOT)}: {names}" for path, names in found if set(names.split(",")) - set(EXTRAS)]
    assert unknown == []


def test_groups_named_elsewhere_exist():
    paths = [*sources(), *(ROOT / "tests").rglob("*.py")]
    found = {name for path in paths for name in re.findall(r"--group ([a-z]+)\b", path.read_text(encoding="utf-8"))}
    assert {"bench", "docs", "dev"} <= found
    assert found <= set(GROUPS)


def test_errors_name_each_extra():
    code = [path for path in sources() if path.suffix == ".py" and path.parts[-2] != "scripts"]
    named = r"extra_required\(.*?, extra=\"([a-z-]+)\"|extra `([a-z-]+)`"
    found = {name for path in code for pair in re.findall(named, path.read_text(encoding="utf-8")) for name in pair}
    assert found - {""} == set(EXTRAS) - {"all"}
