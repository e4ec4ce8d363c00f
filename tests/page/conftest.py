"""Runs the page in Chromium with Playwright. The tests are skipped if there is no browser."""

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
from dashinfer_vlm_core.installation import pip_step
from dashinfer_vlm_core.testing import EVERYTHING, Script, scripted_registry
from dashinfer_vlm_server import create_app
from tests.server.conftest import RunningServer, serving
from tests.waiting import HANG

IMAGES = Path(__file__).parents[2] / "examples" / "pictures"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

# Reports violations of the page's content security policy as console errors.
REPORT_VIOLATIONS = """document.addEventListener("securitypolicyviolation", (event) =>
  console.error(`policy: ${event.violatedDirective} blocks ${event.blockedURI || event.sample}`))"""

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


@pytest.fixture(scope="module")  # not longer: while it runs, no other test in this thread can run an event loop
def launch():
    """Start Chromium: `launch("--argument")`. It is the system's, or the one of `playwright install chromium`."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason=f"playwright is not installed. {pip_step('--group dev')}"
    )
    path = next(filter(None, map(shutil.which, NAMES)), None)
    playwright.expect.set_options(timeout=1000 * HANG)
    with playwright.sync_playwright() as driver, contextlib.ExitStack() as stack:

        def start(*args: str):
            # root, which runs the tests in containers, cannot use the sandbox. Only our own pages are opened.
            sandbox = os.geteuid() != 0
            try:
                started = driver.chromium.launch(executable_path=path, chromium_sandbox=sandbox, args=args)
            except playwright.Error as error:
                pytest.skip(f"Chromium cannot be started ({str(error).splitlines()[0]}): run scripts/browser")
            return stack.enter_context(contextlib.closing(started))

        yield start


@pytest.fixture(scope="module")
def browser(launch):
    """A running Chromium, with a camera that shows a test picture."""
    return launch("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")


@dataclass
class PageDriver:
    """Drives the page in a separate tab.

    Attributes:
        page: Playwright's page.
        url: the URL of the page.
        problems: errors of the console and of scripts, policy violations, and requests to other servers.
        expects_errors: whether the test expects error responses, which the browser reports in the console.
    """

    page: object
    url: str
    artifacts: Path
    problems: list[str] = field(default_factory=list)
    expects_errors: bool = False

    def wait_for_scripts(self):
        """Wait until the scripts run, after the texts were loaded: what a user does before that is lost."""
        self.page.locator("#language option").first.wait_for(state="attached")

    def attach(self) -> None:
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", self._check)
        self.page.add_init_script(REPORT_VIOLATIONS)

    def drop(self, *paths: Path, by=("dragenter", "dragover", "drop")) -> None:
        """Drop files on the page, or paste them, with these events."""
        self.page.evaluate(DROP, [[_file(path) for path in paths], by])

    def send(self, prompt: str) -> None:
        self.page.get_by_label("Prompt", exact=True).fill(prompt)
        self.page.get_by_role("button", name="Send", exact=True).click()

    def response(self, index: int = -1):
        return self.page.get_by_role("article", name="Response").nth(index)

    def finished(self, index: int = -1):
        """Wait until the response has ended, and return it."""
        response = self.response(index)
        response.get_by_role("button", name="Code for this request").wait_for()
        return response

    def tile(self, name: str):
        return self.page.get_by_role("listitem").filter(has_text=name)

    def screenshot(self, name: str) -> None:
        self.page.screenshot(path=self.artifacts / f"{name}.png")

    def _note(self, message) -> None:
        expected = self.expects_errors and message.text.startswith("Failed to load resource")
        if message.type in {"error", "warning"} and not expected:
            self.problems.append(message.text)

    def _check(self, request) -> None:
        if not request.url.startswith((self.url, "blob:", "data:")):
            self.problems.append(f"a request to {request.url}")


def _file(path: Path) -> dict[str, str]:
    return {
        "name": path.name,
        "type": mimetypes.guess_type(path.name)[0] or "image/png",
        "data": base64.b64encode(path.read_bytes()).decode(),
    }


@pytest.fixture(scope="session")
def artifacts(request, tmp_path_factory) -> Path:
    """The folder for screenshots."""
    chosen = request.config.getoption("--artifacts")
    if not chosen:
        return tmp_path_factory.mktemp("page")
    folder = Path(chosen) / "page"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def open_page(browser, artifacts) -> Iterator[Callable[..., PageDriver]]:
    """Open the page of a server: `open_page(server, color_scheme="dark")`. Fail at the end if it had any problem."""
    drivers = []
    with contextlib.ExitStack() as stack:

        def start(server: RunningServer, *, expects_errors=False, **options) -> PageDriver:
            context = stack.enter_context(
                contextlib.closing(browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options}))
            )
            context.set_default_timeout(1000 * HANG)
            drivers.append(PageDriver(context.new_page(), f"{server.url}/", artifacts))
            drivers[-1].expects_errors = expects_errors
            drivers[-1].attach()
            drivers[-1].page.goto(drivers[-1].url)
            drivers[-1].wait_for_scripts()
            return drivers[-1]

        yield start
    assert [problem for driver in drivers for problem in driver.problems] == []


class Scripted(NamedTuple):
    server: RunningServer
    script: Script
    engine: Engine


@pytest.fixture
def scripted() -> Iterator[Callable[..., Scripted]]:
    """Start a server with the bundled model and a scripted decoder."""
    with contextlib.ExitStack() as stack:

        def start(*responses, delay=0.0, settings=None, **options) -> Scripted:
            script = Script(*responses, delay=delay, supported_params=EVERYTHING)
            config = EngineConfig(decoder="scripted", **options)
            engine = stack.enter_context(Engine(config, registry=scripted_registry(script)))
            server = stack.enter_context(RunningServer(create_app(engine, settings)).running())
            return Scripted(server, script, engine)

        yield start


@pytest.fixture(scope="session")
def demo() -> Iterator[RunningServer]:
    """A server with the bundled model."""
    with Engine(EngineConfig()) as engine, serving(engine) as server:
        yield server
