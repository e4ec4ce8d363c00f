"""Every page of the repository is short, its links lead somewhere, and its code blocks are at least well-formed.

Programs whose output a page shows are run by the tests of that page.
"""

from __future__ import annotations

import ast
import configparser
import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from tests.pages import ROOT, page_text, read_page

MAX_WORDS = 1_500
LONG = {
    "CHANGELOG.md",
    "SECURITY.md",
    "docs/glossary.md",
    "docs/cli.md",
    "docs/http.md",
    "docs/clients.md",
    "docs/support.md",
}
"""Pages that are looked up and not read."""
MAX_TOTAL_WORDS = 57_000
ADR_WORDS = range(150, 251)
PAGES = sorted(
    path.relative_to(ROOT)
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md")
    for path in ROOT.glob(pattern)
)
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(<?([^)\s>]+)>?\)")
PLAIN = {"", "console", "text", "http", "dockerfile"}
"""Languages of blocks that show output, or that no parser is at hand for."""


@functools.cache
def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and mkdocs write them."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", read_page(page)), re.MULTILINE)
    plain = (re.sub(r"[`*]|\]\([^)]*\)|\[", "", title) for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in plain}


def check_toml(text: str) -> None:
    if sys.version_info >= (3, 11):
        import tomllib

        tomllib.loads(text)


def check_shell(text: str) -> None:
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


CHECKS = {
    "python": ast.parse,
    "py": ast.parse,
    "json": json.loads,
    "yaml": lambda text: list(yaml.safe_load_all(text)),
    "ini": configparser.RawConfigParser(strict=False).read_string,
    "toml": check_toml,
    "bash": check_shell,
    "sh": check_shell,
}


def test_pages_are_short():
    words = {str(page): len(read_page(page).split()) for page in PAGES}
    assert {page: count for page, count in words.items() if count > MAX_WORDS and page not in LONG} == {}, "split them"
    assert sum(count for page, count in words.items() if page.startswith("docs/")) <= MAX_TOTAL_WORDS, "cut something"


def test_decision_records_are_short_and_complete():
    for page in PAGES:
        if re.match(r"docs/adr/\d", str(page)):
            text = read_page(page)
            assert len(text.split()) in ADR_WORDS, page
            assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Context", "Decision", "Consequences"], page


def test_links_of_pages_resolve():
    broken = [
        f"{page}: {link}"
        for page in PAGES
        for link in LINK.findall(FENCE.sub("", read_page(page)))
        if not resolves(link, page)
    ]
    assert broken == []


def resolves(link: str, page: Path) -> bool:
    """Return whether the file and the heading that a link names exist; addresses of other hosts are not requested."""
    parts = urlsplit(link)
    if parts.scheme:
        return parts.scheme in ("http", "https", "mailto")
    target = (ROOT / page).parent / parts.path if parts.path else ROOT / page
    if not target.exists():
        return False
    return not parts.fragment or target.suffix != ".md" or parts.fragment in headings(target)


def test_code_blocks_of_pages_parse():
    for page in PAGES:
        for indent, language, code in FENCE.findall(read_page(page)):
            if language not in PLAIN:
                try:
                    CHECKS[language]("\n".join(line.removeprefix(indent) for line in code.split("\n")))
                except Exception as error:
                    raise AssertionError(f"{page}: {error!r} in this block of {language}:\n{code}") from error


def test_installation_commands_have_constraints_and_follow_that_of_torch():
    """Otherwise, pip installs untested versions, or PyTorch's build for CUDA."""
    examples = (path for path in (ROOT / "examples").rglob("*") if path.suffix in {"", ".md", ".yaml"})
    files = ["README.md", *(ROOT / "docs").rglob("*.md"), *(path for path in examples if path.is_file())]
    installs = r"(?P<before>.*)\n.*pip install (?P<command>.*(?:\.\[\w|adapters\[|/wheels/\*).*)"
    commands = [
        (found["before"], found["command"])
        for file in files
        for found in re.finditer(installs, read_page(file).replace("\\\n", " ").replace(" && ", "\n"))
        if "--no-index" not in found["command"]
    ]
    assert len(commands) > 10
    index = r"https://download\.pytorch\.org/whl/cpu "
    torch = re.compile(rf"pip install .*-c \S*constraints\.txt --no-deps --index-url {index}torch")
    both = re.compile(rf"--extra-index-url {index}.* torchvision")  # one command chooses versions that fit each other
    assert [command for before, command in commands if "constraints.txt" not in command] == []
    assert [command for before, command in commands if not (torch.search(before) or both.search(command))] == []


def test_glossary_names_exist_in_code():
    names = set(re.findall(r"^\| `([A-Z]\w+)`", page_text("glossary.md"), re.MULTILINE))
    sources = [
        path for folder in ("dashinfer_vlm_core", "adapters", "plugins") for path in (ROOT / folder).rglob("*.py")
    ]
    found = {name for path in sources for name in re.findall(r"\b[A-Z]\w+", path.read_text(encoding="utf-8"))}
    assert len(names) >= 20
    assert sorted(names - found) == []
