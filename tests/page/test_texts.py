"""Each text of the page has its translations, and each translation is used."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from dashinfer_vlm_server.endpoints.page import STATIC

TABLE = json.loads((STATIC / "texts.json").read_text(encoding="utf-8"))
TEXTS = TABLE["texts"]
CODE = [path.read_text(encoding="utf-8") for path in STATIC.glob("*.js") if path.name != "texts.js"]
STRING = re.compile(r"'((?:[^'\\\n])*)'|\"((?:[^\"\\\n])*)\"")
VOID = {"meta", "link", "img", "input", "br"}
PLACEHOLDER = re.compile(r"\{\w+\}")


class EnglishTexts(HTMLParser):
    """Collects the texts of index.html that the page translates."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self._open: list[bool] = []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        kept = attributes.get("translate") == "no" or tag in {"head", "noscript"}
        if not kept:
            self.found |= {attributes[name] for name in ("aria-label", "placeholder") if attributes.get(name)}
        if tag not in VOID:
            self._open.append(kept or any(self._open[-1:]))

    def handle_endtag(self, tag):
        if tag not in VOID:
            self._open.pop()

    def handle_data(self, data):
        if data.strip() and not any(self._open[-1:]):
            self.found.add(" ".join(data.split()))


def texts_of_html() -> set[str]:
    parser = EnglishTexts()
    parser.feed((STATIC / "index.html").read_text(encoding="utf-8"))
    return parser.found


def first_argument(code: str, start: int) -> str:
    """Return the source of the first argument of a call whose parenthesis is before `start`."""
    depth = 0
    for end, character in enumerate(code[start:], start):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0)
        if depth < 0 or (depth == 0 and character == "," and code[start:end].count('"') % 2 == 0):
            return code[start:end]
    raise AssertionError(code[start : start + 80])


def strings_of(code: str) -> set[str]:
    return {single or double for single, double in STRING.findall(code)}


def texts_of_code() -> set[str]:
    arguments = [
        first_argument(code, call.end()) for code in CODE for call in re.finditer(r"(?<![\w.])text\((?=[^)])", code)
    ]
    nouns = {noun for code in CODE for noun in re.findall(r"counted\([^\n]*?, \"(\w+)\"\)", code)}
    counts = {f"{{count}} {noun}{ending}" for noun in nouns | {"image", "video", "document"} for ending in ("", "s")}
    return counts.union(*map(strings_of, arguments))


def test_texts_of_the_page_have_translations():
    assert sorted((texts_of_html() | texts_of_code()) - set(TEXTS)) == []


def test_translations_are_used():
    """Texts in tables are found as strings anywhere in the code."""
    used = texts_of_html() | texts_of_code() | set().union(*map(strings_of, CODE))
    assert sorted(set(TEXTS) - used) == []


@pytest.mark.parametrize("language", sorted(set(TABLE["languages"]) - {"en"}))
def test_translations_have_the_placeholders_of_the_text(language):
    assert {english for english, translations in TEXTS.items() if not translations.get(language)} == set()
    differing = {
        english
        for english, translations in TEXTS.items()
        if set(PLACEHOLDER.findall(translations[language])) != set(PLACEHOLDER.findall(english))
    }
    assert differing == set()
