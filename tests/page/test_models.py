"""The menu of several models, and their states."""

from __future__ import annotations

import contextlib

import pytest

from dashinfer_vlm_core import EngineConfig
from dashinfer_vlm_core.engine.managed_models import ManagedModel
from dashinfer_vlm_core.engine.manager import ModelManager
from dashinfer_vlm_core.engine.model_rules import ModelPolicy
from dashinfer_vlm_core.testing import EVERYTHING, Script, scripted_registry
from tests.page.conftest import IMAGES
from tests.server.conftest import serving

pytestmark = pytest.mark.slow
expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

ONE = 10**12
"""A limit that holds one model."""


@pytest.fixture
def several():
    """Serve two models, of which the memory holds one."""
    with contextlib.ExitStack() as stack:

        def start(script: Script):
            models = [
                ManagedModel(
                    config=EngineConfig(decoder="scripted", served_model_name=name, max_model_len=length),
                    aliases=("other-name",) if name == "small" else (),
                )
                for name, length in (("small", 512), ("large", 1024))
            ]
            manager = ModelManager(
                models,
                policy=ModelPolicy(memory_limit=ONE),
                estimate=lambda _: ONE,
                registry=scripted_registry(script),
            )
            return stack.enter_context(serving(stack.enter_context(manager)))

        yield start


def test_model_is_chosen_and_loaded(open_page, several):
    script = Script("Yes.", supported_params=EVERYTHING)
    tab = open_page(several(script))
    tab.expects_errors = True  # the server ends while the page asks for the states
    menu, status = tab.page.get_by_label("Model", exact=True), tab.page.locator("#server-status-text")
    expect(menu.locator("option")).to_have_text(["small · not loaded", "large · not loaded"])
    expect(status).to_have_text("not loaded")
    menu.select_option("large")
    tab.page.get_by_role("button", name="Load").click()
    expect(status).to_have_text("up to 1,024 tokens")
    expect(menu.locator("option")).to_have_text(["small · not loaded", "large · ready"])
    expect(tab.page.get_by_role("button", name="Load")).to_be_hidden()
    menu.select_option("small")
    expect(tab.page.get_by_role("button", name="Load")).to_be_visible()
    tab.drop(IMAGES / "circle.png")
    tab.send("Hello?")
    expect(tab.finished()).to_contain_text("Yes.")
    expect(status).to_have_text("up to 512 tokens")
    expect(menu.locator("option")).to_have_text(["small · ready", "large · not loaded"])


def test_one_model_has_no_menu(open_page, scripted):
    server, *_ = scripted("Yes.")
    tab = open_page(server)
    expect(tab.page.get_by_role("status").filter(has_text="demo · up to")).to_be_visible()
    expect(tab.page.get_by_label("Model", exact=True)).to_be_hidden()
    expect(tab.page.get_by_role("button", name="Load")).to_be_hidden()
