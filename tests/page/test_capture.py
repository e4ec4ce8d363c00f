"""Pictures of the camera and of a screen, with Chromium's fake devices."""

from __future__ import annotations

import contextlib
import re

import pytest

from dashinfer_vlm_server.endpoints.page import HEADERS
from tests.page.conftest import PageDriver

pytestmark = pytest.mark.slow
expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

TRACKS = "document.getElementById('camera-image').srcObject"
RECORD_STREAMS = """() => {
  const request = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
  window.streams = [];
  navigator.mediaDevices.getUserMedia = async (constraints) => {
    streams.push(await request(constraints));
    return streams.at(-1);
  };
}"""


def test_camera_adds_a_picture_and_is_switched_off(open_page, scripted):
    server, script, _ = scripted("A dot.")
    tab = open_page(server)
    tab.page.get_by_role("button", name="Camera", exact=True).click()
    expect(tab.page.get_by_role("dialog", name="Camera")).to_be_visible()
    tab.page.get_by_role("button", name="Take the picture").click()
    expect(tab.tile("camera.jpg")).to_contain_text(re.compile(r"\d+ tokens"))
    assert tab.page.evaluate(TRACKS) is None
    tab.page.get_by_role("button", name="Camera", exact=True).click()
    tab.page.get_by_role("button", name="Cancel").click()
    expect(tab.page.get_by_role("dialog", name="Camera")).to_be_hidden()
    assert tab.page.evaluate(TRACKS) is None
    tab.send("What is it?")
    tab.finished()
    assert len(script.requests[0].spans) == 1


def test_second_click_on_camera_opens_no_second_stream(open_page, scripted):
    server, *_ = scripted("Never.")
    tab = open_page(server)
    tab.page.evaluate(RECORD_STREAMS)
    tab.page.evaluate("['camera', 'camera'].forEach((id) => document.getElementById(id).click())")
    expect(tab.page.get_by_role("dialog", name="Camera")).to_be_visible()
    tab.page.get_by_role("button", name="Cancel").click()
    expect(tab.page.get_by_role("dialog", name="Camera")).to_be_hidden()
    states = "streams.flatMap((stream) => stream.getTracks()).map((track) => track.readyState)"
    assert tab.page.evaluate(states) == ["ended"]


def test_picture_without_data_is_reported(open_page, scripted):
    server, *_ = scripted("Never.")
    tab = open_page(server)
    tab.page.evaluate("() => { HTMLCanvasElement.prototype.toBlob = (onblob) => onblob(null); }")
    tab.page.get_by_role("button", name="Screenshot", exact=True).click()
    expect(tab.page.get_by_role("alert").filter(has_text="The picture could not be taken")).to_be_visible()


def test_screenshot_is_added(open_page, scripted):
    server, *_ = scripted("A page.")
    tab = open_page(server)
    tab.page.get_by_role("button", name="Screenshot", exact=True).click()
    expect(tab.tile("screenshot.png")).to_contain_text(re.compile(r"\d+ tokens"))


def test_refused_access_names_the_next_step(launch, scripted, artifacts):
    server, *_ = scripted("Never.")
    browser = launch("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream=deny")
    with contextlib.closing(browser.new_context()) as context:
        tab = PageDriver(context.new_page(), f"{server.url}/", artifacts)
        tab.page.goto(tab.url)
        tab.wait_for_scripts()
        tab.page.get_by_role("button", name="Camera", exact=True).click()
        expect(tab.page.get_by_role("alert").filter(has_text="The browser permitted no access.")).to_be_visible()
        expect(tab.page.get_by_role("dialog")).to_be_hidden()


def test_policy_permits_camera_and_screen_to_this_page_only():
    assert HEADERS["Permissions-Policy"] == "camera=(self), display-capture=(self), geolocation=(), microphone=()"
