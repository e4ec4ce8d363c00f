"""The programs in docs/langchain.md print the documented output."""

from __future__ import annotations

import pytest

from tests.pages import ROOT, check_programs, page_programs


@pytest.mark.slow
def test_documented_programs_print_documented_output(monkeypatch):
    monkeypatch.chdir(ROOT)
    check_programs("langchain.md")
    assert len(page_programs("langchain.md")) == 6
