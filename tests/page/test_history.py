"""Search, export and import of stored conversations."""

from __future__ import annotations

import json

import pytest

from tests.page.conftest import IMAGES

pytestmark = pytest.mark.slow
expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

ATTACHMENT = {"kind": "image", "name": "a.png", "url": "data:image/png;base64,AAAA", "type": "image/png", "pages": ""}
EXCHANGE = {
    "text": "Hi!",
    "attachments": [ATTACHMENT],
    "results": None,
    "reasoning": "",
    "response": "Hello.",
    "calls": [],
    "state": "done",
    "error": None,
    "timings": {"start": 1, "first": 2, "last": 3, "usage": None, "finishReason": "stop"},
}
FILE = {
    "format": "dashinfer-vlm conversations",
    "version": 1,
    "conversations": [{"id": "1", "title": "Hi!", "updated": 1, "exchanges": [EXCHANGE]}],
}


def open_history(tab):
    expect(tab.page.get_by_role("button", name="History")).not_to_have_attribute("aria-busy", "true")
    tab.page.get_by_role("button", name="History").click()
    return tab.page.get_by_role("dialog", name="History")


def import_file(tab, content: bytes) -> None:
    file = {"name": "chats.json", "mimeType": "application/json", "buffer": content}
    tab.page.locator("#history-file").set_input_files([file])


@pytest.fixture
def tab(open_page, scripted):
    """A tab with two stored conversations."""
    server, *_ = scripted("A red circle.", "Good morning.", "It is round.")
    tab = open_page(server)
    tab.drop(IMAGES / "circle.png")
    expect(tab.tile("circle.png")).to_contain_text("36 tokens")
    tab.send("What is it?")
    tab.finished()
    tab.page.get_by_role("button", name="New chat").click()
    tab.send("Hi!")
    tab.finished()
    return tab


SEARCHES = {
    "RED it": ["What is it?"],  # in the response, and in the prompt
    "circle.png": ["What is it?"],
    "morning": ["Hi!"],
    "green": [],
    "": ["Hi!", "What is it?"],
}


def test_history_is_searched(tab):
    dialog = open_history(tab)
    for words, titles in SEARCHES.items():
        dialog.get_by_label("Search").fill(words)
        expect(dialog.locator(".history-title")).to_have_text(titles)
    dialog.get_by_label("Search").fill("green")
    expect(dialog.get_by_text("0 conversations")).to_be_visible()
    expect(dialog.get_by_role("button", name="Export")).to_be_hidden()


def test_conversation_deleted_while_it_is_shown_is_not_stored_again(open_page, scripted):
    server, script, _ = scripted("A red circle. " * 50, delay=0.05)
    tab = open_page(server)
    tab.send("What is it?")
    expect(tab.response()).to_contain_text("A red circle.")
    dialog = open_history(tab)
    dialog.get_by_role("button", name="Delete What is it?").click()
    expect(dialog.get_by_text("No conversations.")).to_be_visible()
    script.delay = 0.0
    tab.page.keyboard.press("Escape")
    tab.finished()
    tab.page.get_by_role("button", name="New chat").click()
    dialog = open_history(tab)
    expect(dialog.get_by_text("No conversations.")).to_be_visible()


def test_exported_conversations_can_be_imported(tab):
    """The export contains what the search shows."""
    dialog = open_history(tab)
    dialog.get_by_label("Search").fill("red")
    with tab.page.expect_download() as download:
        dialog.get_by_role("button", name="Export").click()
    content = download.value.path().read_bytes()
    assert [each["title"] for each in json.loads(content)["conversations"]] == ["What is it?"]
    dialog.get_by_label("Search").fill("")
    dialog.get_by_role("button", name="Delete all").click()
    dialog.get_by_role("button", name="Delete all conversations?").click()
    expect(dialog.get_by_text("No conversations.")).to_be_visible()
    import_file(tab, content)
    expect(dialog.get_by_text("Imported: 1 conversation.")).to_be_visible()
    dialog.locator(".history-open").click()
    expect(tab.response()).to_contain_text("A red circle.")
    expect(tab.page.locator(".exchange .tile")).to_contain_text("36 tokens · 168×168")
    tab.page.get_by_role("button", name="Code", exact=True).click()
    expect(tab.page.locator("#code")).to_contain_text("What is it?")
    tab.page.keyboard.press("Escape")
    tab.send("Which shape?")
    expect(tab.finished()).to_contain_text("It is round.")


def changed(path: str, value: object) -> bytes:
    """Return an export with another value at this path."""
    file = json.loads(json.dumps(FILE))
    *parents, name = [int(key) if key.isdigit() else key for key in path.split(".")]
    item = file
    for key in parents:
        item = item[key]
    item[name] = value
    return json.dumps(file).encode()


FIRST = "conversations.0.exchanges.0"
REJECTED = [
    (b"{", "Not valid JSON"),
    (b"[]", "This file was not exported by this page."),
    (changed("version", 2), "The file has version 2. This page reads version 1."),
    (changed("conversations", {}), "conversations is missing or invalid."),
    (changed("conversations.0.title", 5), "conversations[0].title is missing"),
    (changed(f"{FIRST}.state", "paused"), "conversations[0].exchanges[0].state is missing"),
    (changed(f"{FIRST}.calls", None), "conversations[0].exchanges[0].calls is missing"),
    (changed(f"{FIRST}.timings.usage", "many"), "conversations[0].exchanges[0].timings.usage is missing"),
    (changed(f"{FIRST}.attachments.0.url", "javascript:1"), "conversations[0].exchanges[0].attachments[0].url is"),
    (changed(f"{FIRST}.attachments.0.type", "image/`date`"), "conversations[0].exchanges[0].attachments[0].type is"),
    (changed(f"{FIRST}.attachments.0.type", None), "conversations[0].exchanges[0].attachments[0].url is"),
    (
        changed("conversations", [{**FILE["conversations"][0], "id": str(number)} for number in range(101)]),
        "The history holds 100 conversations. Delete 1 first.",
    ),
]


def test_import_checks_the_file(open_page, scripted):
    server, *_ = scripted("Never.")
    tab = open_page(server)
    dialog = open_history(tab)
    for content, problem in REJECTED:
        import_file(tab, content)
        expect(dialog.get_by_role("alert")).to_contain_text(f"chats.json: {problem}")
        expect(dialog.get_by_text("No conversations.")).to_be_visible()
    import_file(tab, json.dumps(FILE).encode())
    expect(dialog.get_by_text("Imported: 1 conversation.")).to_be_visible()
    expect(dialog.get_by_role("alert")).to_be_hidden()


def test_opened_conversations_keep_their_order(tab):
    open_history(tab).locator(".history-open").nth(1).click()
    expect(tab.response()).to_contain_text("A red circle.")
    tab.page.get_by_role("button", name="New chat").click()
    expect(open_history(tab).locator(".history-title")).to_have_text(["Hi!", "What is it?"])


OLD_SUMMARY = """() => new Promise((resolve, reject) => {
  const request = indexedDB.open("dashinfer-vlm /", 1);
  request.onsuccess = () => {
    const store = request.result.transaction("summaries", "readwrite").objectStore("summaries");
    store.getAll().onsuccess = ({ target }) => {
      for (const { text, ...old } of target.result) store.put(old);
      store.transaction.oncomplete = () => (request.result.close(), resolve());
    };
  };
  request.onerror = reject;
})"""


def test_conversations_of_an_earlier_version_are_searched(tab):
    expect(tab.page.get_by_role("button", name="History")).to_have_attribute("aria-busy", "false")
    tab.page.evaluate(OLD_SUMMARY)
    dialog = open_history(tab)
    dialog.get_by_label("Search").fill("morning")
    expect(dialog.locator(".history-title")).to_have_text(["Hi!"])
