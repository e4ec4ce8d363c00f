"""The page on media: its programs print what it says, and its table is that of the configuration."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from dashinfer_vlm_core.config import EngineConfig

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "media.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_the_programs_print_what_the_page_says(monkeypatch):
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {}
    for program in PROGRAMS:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(program, "docs/media.md", "exec", dont_inherit=True), names)
        said = re.findall(r"^\s*print\(.*\)  # (.*)$", program, re.MULTILINE)
        assert ", ".join(printed.getvalue().splitlines()) == ", ".join(said)
    assert len(PROGRAMS) > 10


OPTIONS = [
    name
    for name in EngineConfig.model_fields
    if re.search("pixels|video|image|media|mm_|rgba|fetch|private", name) and name != "approximate_vision"
]


@pytest.mark.parametrize("name", OPTIONS)
def test_the_table_holds_every_option_of_media(name):
    row = rf"^\| `--{name.replace('_', '-')}` \| .+ \| {re.escape(EngineConfig.model_fields[name].description)} \|$"
    assert re.search(row, TEXT, re.MULTILINE)
