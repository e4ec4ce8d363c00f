"""Rule 27 in a browser: a page of another site cannot use a server on the loopback address that has no API keys."""

from __future__ import annotations

import contextlib

import pytest

from tests.web import body, serve

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"

# Sends a chat request, and returns the status, 0 for a response that the page cannot read, or the error.
SEND = """async ([url, kind, mode]) => {
  const text = JSON.stringify({ messages: [{ role: "user", content: "Hello" }] });
  const content = kind === "blob" ? new Blob([text]) : text;
  const headers = kind === "blob" ? {} : { "Content-Type": kind };
  try {
    const response = await fetch(url, { method: "POST", mode, headers, body: content });
    return response.status;
  } catch (error) {
    return String(error);
  }
}"""

SUBMIT = """(url) => {
  const form = document.createElement("form");
  form.method = "POST";
  form.enctype = "text/plain";
  form.action = url;
  const input = document.createElement("input");
  input.name = '{"messages": [{"role": "user", "content": "Hello';
  input.value = '"}]}';
  form.append(input);
  document.body.append(form);
  form.submit();
}"""


def rejected_requests(server) -> float:
    """Return how many requests the server has rejected."""
    with server.http() as client:
        lines = client.get("/metrics").text.splitlines()
    counts = (line.rsplit(" ", 1)[1] for line in lines if 'outcome="unauthorized"' in line and "_created" not in line)
    return sum(map(float, counts))


@pytest.fixture
def foreign_page(browser):
    """A tab with a page of another origin: the same address, but another port."""
    content = body(b"<!doctype html><title>A page</title>", "Content-Type: text/html")
    with serve({"/": content}) as web, contextlib.closing(browser.new_context()) as context:
        page = context.new_page()
        page.goto(web.url("/"))
        yield page


@pytest.mark.parametrize("kind", ["text/plain", "blob"])
def test_security_27_page_of_another_origin_cannot_send_requests(foreign_page, scripted, kind):
    server, script, _ = scripted("Fine.")
    assert foreign_page.evaluate(SEND, [f"{server.url}{CHAT}", kind, "no-cors"]) == 0
    assert rejected_requests(server) == 1
    assert "TypeError" in foreign_page.evaluate(SEND, [f"{server.url}{CHAT}", kind, "cors"])
    assert "TypeError" in foreign_page.evaluate(SEND, [f"{server.url}{CHAT}", "application/json", "cors"])
    assert rejected_requests(server) == 3  # the last one is the preflight request
    assert not script.requests


def test_security_27_form_of_another_origin_is_rejected(foreign_page, scripted):
    server, script, _ = scripted("Fine.")
    with foreign_page.expect_navigation(url=f"{server.url}/**") as navigation:
        foreign_page.evaluate(SUBMIT, f"{server.url}{CHAT}")
    assert navigation.value.status == 403
    assert not script.requests


def test_security_27_rebound_name_is_rejected(launch, scripted):
    """After DNS rebinding, the server belongs to the origin of the attacker, so the browser sends any request."""
    server, script, _ = scripted("Fine.")
    page = launch("--host-resolver-rules=MAP rebound.example 127.0.0.1").new_page()
    assert page.goto(f"http://rebound.example:{server.port}/").status == 403
    assert page.evaluate(SEND, [CHAT, "application/json", "cors"]) == 403
    assert page.evaluate("async () => (await fetch('/v1/models')).status") == 403
    assert not script.requests
    assert page.goto(f"{server.url}/").status == 200
    assert page.evaluate(SEND, [CHAT, "application/json", "cors"]) == 200
    assert len(script.requests) == 1
