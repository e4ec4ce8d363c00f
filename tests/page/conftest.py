"""The page in a real browser: Chromium, driven by Playwright. Where there is none, the tests are skipped and say so."""

from __future__ import annotations

import base64
import contextlib
import mimetypes
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.testing import EVERYTHING, Script, scripted_registry
from dashinfer_vlm_server import create_app
from tests.server.conftest import RunningServer, serving
from tests.waiting import HANG

PICTURES = Path(__file__).parents[2] / "examples" / "pictures"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

# Reports what the policy of the page forbids where its tests look: among the errors of the console.
WATCH = """document.addEventListener("securitypolicyviolation", (event) =>
  console.error(`policy: ${event.violatedDirective} forbids ${event.blockedURI || event.sample}`))"""

DROP = """([files, events]) => {
  const transfer = new DataTransfer();
  for (const { name, type, data } of files) {
    transfer.items.add(new File([Uint8Array.from(atob(data), (c) => c.charCodeAt(0))], name, { type }));
  }
  const usual = { bubbles: true, cancelable: true };
  const make = (name) =>
    name === "paste"
      ? new ClipboardEvent(name, { ...usual, clipboardData: transfer })
      : new DragEvent(name, { ...usual, dataTransfer: transfer });
  for (const name of events) document.body.dispatchEvent(make(name));
}"""


@pytest.fixture(scope="module")  # no longer: while it runs, no other test of this thread can have an event loop
def browser():
    """A running Chromium: the system's, else the one that `playwright install chromium` brings."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[dev]'")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    playwright.expect.set_options(timeout=1000 * HANG)
    with playwright.sync_playwright() as driver:
        try:
            # No sandbox can be made by root, who runs the tests in containers; all that is opened here is our own page.
            started = driver.chromium.launch(executable_path=path, chromium_sandbox=os.geteuid() != 0)
        except playwright.Error as error:
            pytest.skip(f"no Chromium can be started ({str(error).splitlines()[0]}): run scripts/browser")
        with contextlib.closing(started):
            yield started


@dataclass
class RequestContext:
    """A page that is open in a tab of its own.

    Attributes:
        page: Playwright's page.
        home: the address that it came from.
        faults: errors of its console and its scripts, what its policy forbade, and requests to other servers.
        failing: whether answers with an error are part of the test; a browser's console reports each.
    """

    page: object
    home: str
    artifacts: Path
    faults: list[str] = field(default_factory=list)
    failing: bool = False

    def watch(self) -> None:
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", self._check)
        self.page.add_init_script(WATCH)

    def drop(self, *paths: Path, by=("dragenter", "dragover", "drop")) -> None:
        """Drop files on the page, or paste them, by these events."""
        self.page.evaluate(DROP, [[_file(path) for path in paths], by])

    def ask(self, question: str) -> None:
        self.page.get_by_label("Question", exact=True).fill(question)
        self.page.get_by_role("button", name="Ask", exact=True).click()

    def answer(self, turn: int = -1):
        return self.page.get_by_role("article", name="Answer").nth(turn)

    def finished(self, turn: int = -1):
        """The answer, once it has ended."""
        answer = self.answer(turn)
        answer.get_by_role("button", name="Code of this request").wait_for()
        return answer

    def tile(self, name: str):
        return self.page.get_by_role("listitem").filter(has_text=name)

    def screenshot(self, name: str) -> None:
        self.page.screenshot(path=self.artifacts / f"{name}.png")

    def _note(self, message) -> None:
        expected = self.failing and message.text.startswith("Failed to load resource")
        if message.type in {"error", "warning"} and not expected:
            self.faults.append(message.text)

    def _check(self, request) -> None:
        if not request.url.startswith((self.home, "blob:", "data:")):
            self.faults.append(f"a request to {request.url}")


def _file(path: Path) -> dict[str, str]:
    return {
        "name": path.name,
        "type": mimetypes.guess_type(path.name)[0],
        "data": base64.b64encode(path.read_bytes()).decode(),
    }


@pytest.fixture(scope="session")
def artifacts(request, tmp_path_factory) -> Path:
    """Where screenshots are kept."""
    chosen = request.config.getoption("--artifacts")
    if not chosen:
        return tmp_path_factory.mktemp("page")
    folder = Path(chosen) / "page"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def visit(browser, artifacts) -> Iterator[Callable[..., RequestContext]]:
    """Open the page of a server: `visit(server, color_scheme="dark")`. In the end it must not have had any fault."""
    visits = []
    with contextlib.ExitStack() as stack:

        def open_page(server: RunningServer, **options) -> RequestContext:
            context = stack.enter_context(
                contextlib.closing(browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options}))
            )
            context.set_default_timeout(1000 * HANG)
            visits.append(RequestContext(context.new_page(), f"{server.url}/", artifacts))
            visits[-1].watch()
            visits[-1].page.goto(visits[-1].home)
            return visits[-1]

        yield open_page
    assert [fault for visit in visits for fault in visit.faults] == []


class Scripted(NamedTuple):
    server: RunningServer
    script: Script
    engine: Engine


@pytest.fixture
def scripted() -> Iterator[Callable[..., Scripted]]:
    """Start a server with the bundled model, whose decoder plays a script."""
    with contextlib.ExitStack() as stack:

        def start(*answers, delay=0.0, settings=None, **options) -> Scripted:
            script = Script(*answers, delay=delay, supported_params=EVERYTHING)
            config = EngineConfig(decoder="scripted", **options)
            engine = stack.enter_context(Engine(config, registry=scripted_registry(script)))
            server = stack.enter_context(RunningServer(create_app(engine, settings)).running())
            return Scripted(server, script, engine)

        yield start


@pytest.fixture(scope="session")
def demo() -> Iterator[RunningServer]:
    """A server with the bundled model, as it is."""
    with Engine(EngineConfig()) as engine, serving(engine) as server:
        yield server
