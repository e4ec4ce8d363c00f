"""The measurement of the speed."""

from __future__ import annotations

import re

import pytest

from dashinfer_vlm_server.endpoints.page import STATIC
from tests.pages import page_text

pytestmark = pytest.mark.slow
expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect


def test_speed_is_measured_with_new_prompts(open_page, scripted):
    server, script, _ = scripted("Some words. " * 40)
    tab = open_page(server)
    tab.page.get_by_role("button", name="Measure the speed").click()
    dialog = tab.page.get_by_role("dialog", name="Measure the speed")
    expect(dialog.get_by_role("rowheader")).to_have_count(2)
    dialog.get_by_role("button", name="Start").click()
    row = dialog.get_by_role("row").filter(has_text="This server")
    expect(row).to_contain_text(re.compile(r"demo\s*[\d.]+ m?s\s*[\d.,]+"))
    assert [len(request.spans) for request in script.requests] == [1, 1, 1, 1, 0, 0, 0]
    assert [request.sampling.min_tokens for request in script.requests] == [1, 1, 1, 1, 64, 64, 64]
    assert len({tuple(request.token_ids.tolist()) for request in script.requests}) == 7


def test_figures_of_other_machines_are_those_of_the_documentation():
    code = (STATIC / "measure.js").read_text(encoding="utf-8")
    shown = re.findall(r'machine: "(?:AMD|Intel).*first: (\d+), token: ([\d.]+)', code)
    page = page_text("performance.md")
    firsts = re.findall(r"^\| new images, 1 user: TTFT \| ([\d.]+) s", page, re.MULTILINE)
    tokens = re.findall(r"^\| short text, 1 user: TPOT\* \| ([\d.]+) ms", page, re.MULTILINE)
    assert len(shown) >= 2
    assert [(int(first), token) for first, token in shown] == [
        (round(1000 * float(first)), token) for first, token in zip(firsts, tokens, strict=True)
    ]
