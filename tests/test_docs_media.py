"""The pages on media: examples print the documented output, and the table of limits matches the configuration."""

from __future__ import annotations

import re

from dashinfer_vlm_core.cli.options import docstring
from dashinfer_vlm_core.config import EngineConfig
from tests.cases import cases
from tests.pages import ROOT, check_programs, page_programs, page_text

LIMITS = page_text("media-limits.md")


def test_examples_print_documented_output(monkeypatch):
    monkeypatch.chdir(ROOT)
    check_programs("media.md")
    assert len(page_programs("media.md")) > 10


OPTIONS = [
    name for name in EngineConfig.option_fields() if re.search("pixels|video|image|media|mm_|rgba|fetch|private", name)
]


@cases("name", OPTIONS)
def test_table_lists_every_media_option(name):
    description = docstring(EngineConfig, name)
    row = rf"^\| `--{name.replace('_', '-')}` \| .+ \| {re.escape(description)} \|$"
    assert re.search(row, LIMITS, re.MULTILINE)
