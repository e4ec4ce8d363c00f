"""The page on media: its programs print what it says, and its table is that of the configuration."""

from __future__ import annotations

import re

import pytest

from dashinfer_vlm_core.config import EngineConfig
from tests.pages import ROOT, check_programs, programs_of, text_of

TEXT = text_of("media.md")


def test_the_programs_print_what_the_page_says(monkeypatch):
    monkeypatch.chdir(ROOT)
    check_programs("media.md")
    assert len(programs_of("media.md")) > 10


OPTIONS = [
    name for name in EngineConfig.model_fields if re.search("pixels|video|image|media|mm_|rgba|fetch|private", name)
]


@pytest.mark.parametrize("name", OPTIONS)
def test_the_table_holds_every_option_of_media(name):
    row = rf"^\| `--{name.replace('_', '-')}` \| .+ \| {re.escape(EngineConfig.model_fields[name].description)} \|$"
    assert re.search(row, TEXT, re.MULTILINE)
