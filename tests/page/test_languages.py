"""The page in other languages."""

from __future__ import annotations

import pytest

from tests.page.conftest import IMAGES

pytestmark = pytest.mark.slow
expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect


@pytest.mark.parametrize(("locale", "lang", "send"), [("de-AT", "de", "Senden"), ("zh-CN", "zh-Hans", "发送")])
def test_language_is_that_of_the_browser(open_page, scripted, locale, lang, send):
    server, *_ = scripted("Ein Kreis.")
    tab = open_page(server, locale=locale)
    expect(tab.page.locator("html")).to_have_attribute("lang", lang)
    expect(tab.page.get_by_role("button", name=send, exact=True)).to_be_visible()
    assert tab.page.evaluate("localStorage.length") == 0


def test_unknown_language_is_english(open_page, scripted):
    server, *_ = scripted("A circle.")
    tab = open_page(server, locale="fr-FR")
    expect(tab.page.get_by_role("button", name="Send", exact=True)).to_be_visible()


def test_language_can_be_changed_and_is_remembered(open_page, scripted):
    """What is shown already is translated, too: there is no warning about a text without a translation."""
    server, *_ = scripted("A circle.")
    tab = open_page(server)
    tab.drop(IMAGES / "circle.png")
    expect(tab.tile("circle.png")).to_contain_text("36 tokens")
    tab.send("What is it?")
    tab.finished()
    tab.drop(IMAGES / "circle.png")
    for code, name, prompt, tokens in (
        ("zh", "设置", "您的提示词", "36 个 token"),
        ("de", "Einstellungen", "Ihr Prompt", "36 Token"),
    ):
        tab.page.locator("#language").select_option(code)
        expect(tab.page.get_by_role("button", name=name)).to_be_visible()
        expect(tab.page.get_by_role("article", name=prompt)).to_contain_text("What is it?")
        expect(tab.page.locator(".exchange .tile-cost")).to_contain_text(tokens)
        expect(tab.page.locator("#attachments .tile-cost")).to_contain_text(tokens)
    tab.page.reload()
    tab.wait_for_scripts()
    expect(tab.page.get_by_role("button", name="Einstellungen")).to_be_visible()
    tab.page.locator("#language").select_option("en")
    expect(tab.page.get_by_role("button", name="Settings")).to_be_visible()
