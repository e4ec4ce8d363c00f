"""Every page of the repository is short, its links lead somewhere, and its code blocks are at least well-formed.

Programs whose output a page shows are run by the tests of that page.
"""

from __future__ import annotations

import ast
import configparser
import json
import re
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from tests.pages import ROOT, page_text, read_page

MAX_WORDS = 2500
ADR_WORDS = range(150, 301)
PAGES = sorted(
    path.relative_to(ROOT)
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md")
    for path in ROOT.glob(pattern)
)
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(<?([^)\s>]+)>?\)")
PLAIN = {"", "console", "text", "http", "dockerfile"}
"""Languages of blocks that show output, or that no parser is at hand for."""


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and mkdocs write them."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", read_page(page)), re.MULTILINE)
    plain = (re.sub(r"[`*]|\]\([^)]*\)|\[", "", title) for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in plain}


def parse_toml(text: str) -> object:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 or newer")
    return tomllib.loads(text)


def check_shell(text: str) -> None:
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


CHECKS = {
    "python": ast.parse,
    "py": ast.parse,
    "json": json.loads,
    "yaml": lambda text: list(yaml.safe_load_all(text)),
    "ini": configparser.RawConfigParser(strict=False).read_string,
    "toml": parse_toml,
    "bash": check_shell,
    "sh": check_shell,
}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_page_has_at_most_2500_words(page):
    words = len(read_page(page).split())
    assert words <= MAX_WORDS, f"{page} has {words} words: split it"


@pytest.mark.parametrize("page", [page for page in PAGES if re.match(r"docs/adr/\d", str(page))], ids=str)
def test_decision_record_is_short_and_complete(page):
    text = read_page(page)
    assert len(text.split()) in ADR_WORDS
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Context", "Decision", "Consequences"]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_of_page_resolve(page):
    broken = []
    for link in LINK.findall(FENCE.sub("", read_page(page))):
        parts = urlsplit(link)
        if parts.scheme:
            assert parts.scheme in ("http", "https", "mailto"), link
            continue
        target = (ROOT / page).parent / parts.path if parts.path else ROOT / page
        is_page = target.suffix == ".md"
        if not target.exists() or (parts.fragment and is_page and parts.fragment not in headings(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_code_blocks_of_page_parse(page):
    for indent, language, code in FENCE.findall(read_page(page)):
        if language not in PLAIN:
            CHECKS[language]("\n".join(line.removeprefix(indent) for line in code.split("\n")))


def test_glossary_names_exist_in_code():
    names = set(re.findall(r"^\| `([A-Z]\w+)`", page_text("glossary.md"), re.MULTILINE))
    sources = [
        path for folder in ("dashinfer_vlm_core", "adapters", "plugins") for path in (ROOT / folder).rglob("*.py")
    ]
    code = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    assert len(names) >= 20
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", code)] == []
