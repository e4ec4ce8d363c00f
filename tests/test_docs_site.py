"""The documentation site: it builds without warnings, its links resolve, nothing is loaded from other hosts.

The examples of pages without a separate test print the documented output.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.installation import pip_step
from dashinfer_vlm_core.protocol import fields
from dashinfer_vlm_core.testing import scripted_engine
from dashinfer_vlm_server import create_app
from dashinfer_vlm_server.errors import STATUS
from tests.pages import ROOT, check_programs, page_text
from tests.scripts import load_script
from tests.server.conftest import serving
from tests.waiting import HANG

pytestmark = pytest.mark.slow

REFERENCE = load_script("docs_hooks").REFERENCE
LARGEST_PICTURE = 150_000
PAGES = sorted(path.name for path in (ROOT / "docs").glob("*.md"))


@pytest.fixture(scope="module")
def demo():
    with Engine(EngineConfig()) as engine, serving(engine) as server:
        yield server


@pytest.mark.parametrize(
    "page", ["index.md", "openai.md", "http.md", "responses.md", "grounding.md", "plugins.md", "api.md"]
)
def test_examples_print_documented_output(page, demo, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    check_programs(page, server=demo.url)


def test_http_page_lists_every_route_field_and_status():
    text = page_text("http.md")
    elsewhere = "".join(map(page_text, ("monitoring.md", "ollama.md", "operations.md", "responses.md")))
    app = create_app(scripted_engine("Yes."))
    paths = {route.path.replace("{name:path}", "{model}") for route in app.routes}
    routes = [path for path in paths if not path.startswith("/page/")]
    assert [route for route in routes if f" {route}`" not in text + elsewhere] == []
    assert [name for name in fields.SUPPORTED_FIELDS if f"`{name}`" not in text] == []
    assert [status for status in set(STATUS.values()) if f"| {status} |" not in text] == []


def test_http_page_preview_matches_server(demo):
    blocks = re.findall(r"^```json\n(.*?)^```$", page_text("http.md"), re.MULTILINE | re.DOTALL)
    shown = next(block for block in map(json.loads, blocks) if block.get("object") == "media.preview")
    picture = {"type": "image_url", "image_url": {"url": _data_url("circle.png")}}
    content = [picture, {"type": "text", "text": "What is this?"}]
    with demo.http() as client:
        answer = client.post("/v1/media/preview", json={"messages": [{"role": "user", "content": content}]}).json()
    answer["data"][0]["frames"][0]["url"] = "data:image/png;base64,..."
    assert answer == shown


def _data_url(name):
    return "data:image/png;base64," + base64.b64encode((ROOT / "examples/pictures" / name).read_bytes()).decode()


class Document(HTMLParser):
    """The links and anchors of a page of the site."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.assets: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag in {"script", "img", "source", "iframe"} and given.get("src"):
            self.assets.append(given["src"])
        if tag == "link" and given.get("rel") in {"stylesheet", "icon", "preload", "preconnect"}:
            self.assets.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip(f"mkdocs is not installed. {pip_step('--group docs')}")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # the theme's advertisement of its successor
    built = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=HANG, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return {path: Document(path) for path in folder.rglob("*.html")}, folder


@pytest.mark.slow
def test_all_links_resolve(site):
    documents, _ = site
    assert {Path(page).stem for page in PAGES} <= {path.stem for path in documents}
    links = [(path, link) for path, document in documents.items() for link in document.links if _is_inner(path, link)]
    assert [f"{path.name}: {link}" for path, link in links if not _leads(path, link, documents)] == []


def _is_inner(path, link):
    """Return whether a link is relative; the 404 page is served at any URL, so its links start at the site root."""
    return path.name != "404.html" and not urlsplit(link).scheme


def _leads(path, link, documents):
    target, fragment = (unquote(part) for part in (urlsplit(link).path, urlsplit(link).fragment))
    there = (path.parent / target).resolve() if target else path
    there = there / "index.html" if there.is_dir() else there
    return there.exists() and (not fragment or fragment in documents[there].ids)


def test_site_shows_docstrings_in_place_of_references(site):
    documents, folder = site
    references = {page: REFERENCE.findall(page_text(page)) for page in PAGES}
    assert len(references["plugins.md"]) > 5
    for page, found in references.items():
        ids = documents[(folder / page).with_suffix(".html")].ids if found else set()
        assert [name for name, _ in found if name not in ids] == [], page


@pytest.mark.slow
def test_site_loads_nothing_from_other_hosts(site):
    documents, _ = site
    assert [asset for document in documents.values() for asset in document.assets if urlsplit(asset).netloc] == []


def test_images_are_small():
    assert [path.name for path in (ROOT / "docs" / "images").iterdir() if path.stat().st_size > LARGEST_PICTURE] == []
