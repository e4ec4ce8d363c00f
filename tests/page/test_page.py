"""Tests of the page in a browser.

Each test fails if the console has an error, a warning or a policy violation, or if the page sends a request to another
server.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from dashinfer_vlm_core.errors import QueueFull
from dashinfer_vlm_core.structured_output.grammar.schema_shape import NOT_GUARANTEED
from dashinfer_vlm_server import sse
from dashinfer_vlm_server.api_keys import ApiKeys
from dashinfer_vlm_server.endpoints.page import STATIC
from dashinfer_vlm_server.settings import Settings
from tests.core.test_reasoning import TEMPLATE
from tests.forked import forked
from tests.page.conftest import DROP, IMAGES
from tests.pdfs import document
from tests.waiting import HANG, NEVER, until

pytestmark = pytest.mark.slow
expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

CHECKPOINT = Path(__file__).parents[2] / "plugins" / "dashinfer_vlm_demo" / "checkpoint"
LONG = "It goes on and on. " * 240
RICH = """Two shapes:

1. a **star**
2. a `square`

```python
print("<b>2</b>")
```

<img src=x onerror=alert(1)> is text."""


def test_page_shows_what_is_encoded_until_the_first_token(open_page, scripted, monkeypatch):
    monkeypatch.setattr(sse, "COMMENT_SECONDS", 0.05)
    server, script, _ = scripted("Two stars.", "Two stars.", delay=60)
    tab = open_page(server)
    tab.drop(IMAGES / "pair.png", IMAGES / "circle.png")
    tab.send("Compare them.")
    progress = tab.page.get_by_role("progressbar")
    expect(progress).to_have_attribute("max", "2")
    expect(tab.response()).to_contain_text("Reading the prompt.")
    tab.screenshot("progress")
    tab.page.get_by_role("button", name="Stop").click()
    expect(progress).to_have_count(0)
    script.delay = 0.0
    tab.page.get_by_role("button", name="Regenerate").click()
    expect(tab.response()).to_contain_text("Two stars.")
    expect(progress).to_have_count(0)


def test_drop_images_send_stop_and_regenerate(open_page, scripted):
    server, script, _ = scripted(LONG, "Two stars.", delay=0.02)
    tab = open_page(server)
    tab.drop(IMAGES / "pair.png", IMAGES / "circle.png")
    expect(tab.tile("pair.png")).to_contain_text("30 tokens · 168×140")
    expect(tab.tile("circle.png")).to_contain_text("36 tokens · 168×168")
    expect(tab.page.get_by_text("2 images · 66 tokens")).to_be_visible()
    tab.screenshot("1-dropped")

    tab.send("Compare them.")
    expect(tab.response()).to_contain_text("It goes on and on. It")
    tab.screenshot("2-streaming")
    script.delay = NEVER
    assert script.running == 1
    tab.page.get_by_role("button", name="Stop").click()
    expect(tab.response()).to_contain_text("You stopped the response here.")
    until(lambda: script.running == 0)
    script.delay = 0.02
    assert len(tab.response().inner_text()) < len(LONG)
    tab.screenshot("3-stopped")

    tab.page.get_by_role("button", name="Regenerate").click()
    response = tab.finished()
    expect(response).to_contain_text("Two stars.")
    expect(response).not_to_contain_text("It goes on")
    expect(response).to_contain_text(re.compile(r"Speed\s*[\d.]+ tokens/s"))
    assert [len(request.spans) for request in script.requests] == [2, 2]
    tab.screenshot("4-regenerated")


def test_empty_page_shows_what_the_model_can_do(open_page, scripted):
    server, script, _ = scripted("A star.")
    tab = open_page(server)
    welcome = tab.page.get_by_role("heading", name="Start with an image, a video or a PDF")
    expect(tab.page.get_by_text("demo: A tiny model to try the API with. It knows five shapes")).to_be_visible()
    expect(tab.page.get_by_label("Temperature")).to_have_value("0")  # of its generation_config.json
    tab.drop(IMAGES / "circle.png")
    expect(welcome).to_be_hidden()
    tab.page.get_by_role("button", name="Where is the star?").click()
    expect(tab.page.get_by_label("Prompt", exact=True)).to_have_value("Where is the star?")
    tab.page.get_by_label("Prompt", exact=True).press("Enter")
    tab.finished()
    expect(tab.page.get_by_role("list", name="Example prompts")).to_be_hidden()
    assert script.requests[0].sampling.temperature == 0


def test_settings_on_a_phone_can_be_closed(open_page, scripted):
    server, *_ = scripted("Never.")
    tab = open_page(server, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    expect(tab.page.get_by_text("Drop files anywhere")).to_be_hidden()
    button = tab.page.get_by_role("button", name="Settings")
    for close in (
        lambda: tab.page.get_by_role("button", name="Close").click(),
        lambda: tab.page.keyboard.press("Escape"),
    ):
        button.click()
        expect(tab.page.get_by_label("Prompt", exact=True)).to_be_hidden()
        close()
        expect(button).to_be_focused()
        expect(tab.page.get_by_label("Prompt", exact=True)).to_be_visible()


def test_response_shows_statistics(open_page, demo):
    """The screenshot is used in docs/page.md."""
    tab = open_page(demo, viewport={"width": 1280, "height": 720})
    tab.drop(IMAGES / "before.png", IMAGES / "after.png")
    expect(tab.page.get_by_text("2 images · 72 tokens")).to_be_visible()
    tab.send("Which picture has a red square?")
    response = tab.finished()
    expect(response).to_contain_text("The second picture.")
    statistics = (
        r"First token\s*[\d.]+ m?s",
        r"Prompt\s*\d+ tokens, 72 of them visual",
        r"Response\s*\d+ tokens",
    )
    for statistic in statistics:
        expect(response).to_contain_text(re.compile(statistic))
    tab.drop(IMAGES / "pair.png", IMAGES / "moving.mp4")
    expect(tab.page.get_by_text("1 image · 1 video · 62 tokens")).to_be_visible()
    tab.screenshot("page")


def test_conversation_history_and_new_chat(open_page, scripted):
    server, script, _ = scripted("One.", "Two.", "Three.")
    tab = open_page(server)
    tab.page.get_by_label("System prompt").fill("Be short.")
    lengths = []
    for prompt in ("First?", "Second?"):
        tab.send(prompt)
        tab.finished()
        lengths.append(len(script.requests[-1].token_ids))
    expect(tab.page.get_by_role("article", name="Response")).to_have_text([re.compile("One."), re.compile("Two.")])
    tab.page.get_by_role("button", name="New chat").click()
    expect(tab.page.get_by_role("heading", name="Start with an image, a video or a PDF")).to_be_visible()
    tab.send("First?")
    tab.finished()
    lengths.append(len(script.requests[-1].token_ids))
    assert lengths[1] > lengths[0] == lengths[2]


def test_error_is_shown_and_the_prompt_is_kept(open_page, scripted):
    server, *_ = scripted(QueueFull("7 requests are already waiting: try again in a moment.", retry_after=2), "Now.")
    tab = open_page(server)
    tab.expects_errors = True
    tab.send("Is there a slot?")
    problem = tab.page.get_by_role("alert").filter(has_text="The request failed")
    expect(problem).to_contain_text("Status 429")
    expect(problem).to_contain_text("7 requests are already waiting")
    expect(problem).to_contain_text("Try again in 2 seconds.")
    expect(tab.page.get_by_role("article", name="Your prompt")).to_have_text("Is there a slot?")
    tab.screenshot("5-error")
    tab.page.get_by_role("button", name="Edit the prompt").click()
    field = tab.page.get_by_label("Prompt", exact=True)
    expect(field).to_be_focused()
    expect(field).to_have_value("Is there a slot?")
    field.press("Enter")
    expect(tab.finished()).to_contain_text("Now.")


def test_failed_stream_keeps_the_partial_response(open_page, scripted):
    server, _, engine = scripted(LONG, delay=0.02)
    tab = open_page(server)
    tab.expects_errors = True
    tab.send("Go on.")
    expect(tab.response()).to_contain_text("It goes on and on.")
    engine.close()
    expect(tab.response().get_by_role("alert")).to_contain_text("The request failed")
    expect(tab.response()).to_contain_text("It goes on and on.")


LOSE_CONNECTIONS = """() => {
  const { fetch } = window;
  const body = () => new ReadableStream({ pull: (controller) => controller.error(new TypeError("network error")) });
  window.fetch = async (path, options) =>
    path === "v1/chat/completions" ? new Response(body()) : fetch(path, options);
}"""


def test_lost_connection_is_named(open_page, scripted):
    server, *_ = scripted("Never.")
    tab = open_page(server)
    tab.page.evaluate(LOSE_CONNECTIONS)
    tab.send("Go on.")
    expect(tab.finished().get_by_role("alert")).to_contain_text("The connection was lost")


def test_invalid_file_shows_an_error(open_page, scripted, tmp_path):
    server, *_ = scripted("Never.")
    tab = open_page(server)
    tab.expects_errors = True
    (tmp_path / "broken.png").write_bytes(b"not an image")
    (tmp_path / "notes.txt").write_text("words")
    tab.drop(tmp_path / "broken.png", tmp_path / "notes.txt")
    expect(tab.tile("broken.png")).to_contain_text("Save it again in one of these formats")
    expect(tab.page.get_by_text("notes.txt is not an image, a video or a PDF. Add PNG,")).to_be_visible()
    tab.page.get_by_role("button", name="Remove broken.png").click()
    expect(tab.page.get_by_role("button", name="Add files")).to_be_focused()
    tab.send("Hello?")
    tab.finished()
    expect(tab.page.get_by_text("notes.txt is not")).to_be_hidden()


def test_file_without_preview_is_not_loading(open_page, scripted):
    server, *_ = scripted("Fine.")
    tab = open_page(server, expects_errors=True)
    error = {"message": "Previews are not supported.", "code": "not_supported"}
    tab.page.route("**/v1/media/preview", lambda route: route.fulfill(status=501, json={"error": error}))
    tab.drop(IMAGES / "circle.png")
    expect(tab.tile("circle.png")).to_have_attribute("aria-busy", "false")
    expect(tab.tile("circle.png").locator(".tile-cost")).to_be_empty()


def test_document_shows_its_pages_and_sends_the_chosen_ones(open_page, scripted, tmp_path):
    server, script, _ = scripted("Fine.")
    tab = open_page(server)
    (tmp_path / "report.pdf").write_bytes(document("One", "Two", "Three", size=(84, 84)))
    tab.drop(tmp_path / "report.pdf")
    expect(tab.tile("report.pdf")).to_contain_text("108 tokens · 3 pages")
    expect(tab.page.get_by_text("1 document · 108 tokens")).to_be_visible()
    tab.page.get_by_role("button", name="Preview of report.pdf").click()
    expect(tab.page.locator("#frames img")).to_have_count(3)
    tab.page.keyboard.press("Escape")
    tab.page.get_by_label("Pages of report.pdf").fill("2-3")
    tab.page.get_by_label("Pages of report.pdf").press("Tab")
    expect(tab.tile("report.pdf")).to_contain_text("72 tokens · 2 pages")
    tab.send("What is on page 2?")
    tab.finished()
    assert len(script.requests[-1].spans) == 2
    tab.page.get_by_role("button", name="Code for this request").click()
    expect(tab.page.locator("#code")).to_contain_text('"pages": "2-3"')


def test_images_can_be_pasted_and_chosen(open_page, scripted):
    server, *_ = scripted("Fine.")
    tab = open_page(server)
    tab.page.get_by_role("button", name="Use a sample image").click()
    expect(tab.tile("sample.png")).to_be_visible()
    tab.drop(IMAGES / "circle.png", by=["paste"])
    tab.page.locator("#files").set_input_files([IMAGES / "circle.png", IMAGES / "moving.mp4"])
    expect(tab.page.get_by_text(re.compile(r"3 images · 1 video · \d+ tokens"))).to_be_visible()
    names = tab.page.locator(".composer .tile-name").all_inner_texts()
    assert sorted(names) == ["circle-2.png", "circle.png", "moving.mp4", "sample.png"]


def test_preview_dialog_shows_frames(open_page, demo):
    tab = open_page(demo)
    tab.drop(IMAGES / "moving.mp4")
    expect(tab.tile("moving.mp4")).to_contain_text("32 tokens · 112×112 · 4 frames")
    tab.page.get_by_role("button", name="Preview of moving.mp4").click()
    dialog = tab.page.get_by_role("dialog", name="moving.mp4 as the model sees it")
    expect(dialog).to_contain_text("112×112 pixels: 2 × 4 × 4 cells, 32 tokens; 2 frames share each token.")
    frames = dialog.get_by_role("img").all()
    assert [frame.evaluate("image => [image.naturalWidth, image.naturalHeight]") for frame in frames] == [
        [112, 112]
    ] * 4
    tab.screenshot("6-frames")


def test_forbidden_url_names_the_file_and_the_field(open_page, scripted):
    server, *_ = scripted("Never.", allow_remote_media=False)
    tab = open_page(server)
    tab.expects_errors = True
    tab.page.get_by_role("button", name="Add a URL").click()
    tab.page.get_by_label("URL", exact=True).fill("https://pictures.example/cat.png")
    tab.page.get_by_role("button", name="Add", exact=True).click()
    expect(tab.tile("cat.png")).to_contain_text("The engine does not fetch media")
    tab.send("What is it?")
    problem = tab.finished().get_by_role("alert")
    expect(problem).to_contain_text("cat.png could not be used")
    expect(problem).to_contain_text("Status 400, field messages[0].content[0]")


SETTINGS = {
    "Temperature": "0.5",
    "Top p": "0.9",
    "Top k": "7",
    "Seed": "3",
    "Max tokens": "2",
    "Repetition penalty": "1.1",
}


def test_settings_are_sent_with_the_request(open_page, scripted):
    server, script, _ = scripted("Cut off here.", '{"shapes": []}')
    tab = open_page(server)
    for label, value in SETTINGS.items():
        tab.page.get_by_label(label, exact=True).fill(value)
    tab.send("Hello?")
    expect(tab.finished()).to_contain_text("The response reached Max tokens")
    sampling = script.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 7, 3)
    assert (sampling.max_tokens, sampling.repetition_penalty) == (2, 1.1)

    tab.page.get_by_label("Max tokens").fill("")
    tab.page.get_by_label("Response format").select_option("json_schema")
    schema = tab.page.get_by_label("JSON schema", exact=True)
    schema.fill("{")
    tab.send("Again?")
    expect(schema).to_be_focused()
    schema.fill('{"type": "object", "properties": {"shapes": {"type": "array"}}}')
    tab.page.get_by_label("Prompt", exact=True).press("Enter")
    expect(tab.finished()).to_contain_text('"shapes"')
    assert script.requests[1].grammar is not None


def test_stop_sequences_are_one_per_line(open_page, scripted):
    server, *_ = scripted("One, two, three.")
    tab = open_page(server)
    tab.page.get_by_label("Stop sequences").fill(" four\n three\n")
    tab.send("Count.")
    expect(tab.finished().locator(".response-text")).to_have_text("One, two,")


SCHEMA_PROBLEMS = {
    "{": "Not valid JSON",
    "[]": "The schema must be an object.",
    '{"type": "thing"}': "type must be one of object, array",
    '{"properties": {"a": {"minLength": -1}}}': "properties.a.minLength must be an integer of at least 0.",
    '{"items": {"anyOf": [{}, 5]}}': "items.anyOf[1] must be an object.",
    '{"properties": {"a": {"not": {}}}}': "properties.a.not cannot be guaranteed. Remove it.",
}


def test_schema_is_checked_while_it_is_edited(open_page, scripted):
    server, script, _ = scripted('"a"')
    tab = open_page(server)
    tab.expects_errors = True
    tab.page.get_by_label("Response format").select_option("json_schema")
    schema, problem = tab.page.get_by_label("JSON schema", exact=True), tab.page.locator("#schema-error")
    for text, message in SCHEMA_PROBLEMS.items():
        schema.fill(text)
        expect(problem).to_contain_text(message)
        tab.send("Hello?")
        expect(schema).to_be_focused()
    tab.screenshot("7-schema")
    schema.fill('{"type":"string","pattern":"("}')
    expect(problem).to_be_empty()
    tab.page.get_by_role("button", name="Format the JSON schema").click()
    expect(schema).to_have_value('{\n  "type": "string",\n  "pattern": "("\n}')
    tab.page.get_by_label("Prompt", exact=True).press("Enter")
    expect(problem).to_contain_text("is not a supported regular expression")
    assert script.requests == []
    schema.fill('{"type": "string", "maxLength": 5}')
    expect(problem).to_be_empty()
    tab.page.get_by_role("button", name="Regenerate").click()
    expect(tab.finished()).to_contain_text('"a"')


def test_keywords_rejected_by_the_page_are_those_of_the_server():
    listed = re.search(r"NOT_GUARANTEED = \[(.*?)\]", (STATIC / "schema.js").read_text(encoding="utf-8"), re.DOTALL)
    assert set(re.findall(r'"(.*?)"', listed[1])) == NOT_GUARANTEED


TOOLS_PROBLEMS = {
    "[": "Not valid JSON",
    "{}": "The tools must be an array.",
    '[{"type": "function"}]': '[0] must be {"type": "function"',
    '[{"type": "function", "function": {"name": "a b"}}]': "[0].function.name must be 1 to 128 letters",
    '[{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]': "parameters.type must be",
}
CALL = '<tool_call>\n{"name": "find_shapes", "arguments": {"color": "red"}}\n</tool_call>'


def test_tool_calls_are_shown_and_answered(open_page, scripted):
    server, script, _ = scripted(f"Let me look.\n{CALL}\n{CALL.replace('red', 'blue')}", "Two of each.", "Yes.")
    tab = open_page(server)
    tools = tab.page.get_by_label("Tools", exact=True)
    for text, message in TOOLS_PROBLEMS.items():
        tools.fill(text)
        expect(tab.page.locator("#tools-error")).to_contain_text(message)
    tab.send("Find them.")
    expect(tools).to_be_focused()
    tools.fill("")
    tab.page.get_by_role("button", name="Insert an example").click()
    tab.page.get_by_label("Prompt", exact=True).press("Enter")
    response = tab.finished()
    expect(response.locator(".response-text")).to_have_text("Let me look.")
    expect(response.locator(".call-name")).to_have_text(["find_shapes"] * 2)
    expect(response.locator(".calls pre")).to_have_text(['{\n  "color": "red"\n}', '{\n  "color": "blue"\n}'])
    tab.screenshot("8-calls")

    first, second = response.get_by_label("Result of find_shapes").all()
    expect(response.get_by_label('Result of find_shapes {"color": "blue"}')).to_have_count(1)
    first.fill("two stars")
    second.fill('{"stars": 2}')
    tab.page.get_by_role("button", name="Send results").click()
    expect(tab.finished()).to_contain_text("Two of each.")
    expect(tab.page.get_by_role("article", name="Tool results").locator("pre")).to_have_text(
        ["two stars", '{"stars": 2}']
    )
    expect(tab.page.get_by_role("button", name="Send results")).to_be_hidden()
    tab.screenshot("9-results")
    prompt = prompt_of(script.requests[1])
    for text in ("find_shapes", '"color": "red"', "two stars", '{"stars": 2}'):
        assert text in prompt
    tab.send("Sure?")
    expect(tab.finished()).to_contain_text("Yes.")
    assert "Two of each." in prompt_of(script.requests[2])
    for language in ("openai", "LangChain"):
        code = code_of(tab, language)
        compile(code, language, "exec")
        assert '"tool_call_id": "call_' in code
        assert "tool_choice=" in code


def test_stopped_tool_call_is_not_answered(open_page, scripted):
    server, script, _ = scripted(f"Wait. {'So. ' * 200}{CALL}", "Fine.", delay=0.05)
    tab = open_page(server)
    tab.page.get_by_role("button", name="Insert an example").click()
    tab.send("Find them.")
    expect(tab.response()).to_contain_text("Wait.")
    tab.page.get_by_role("button", name="Stop").click()
    expect(tab.page.get_by_role("button", name="Send results")).to_have_count(0)
    script.delay = 0
    tab.send("And now?")
    expect(tab.finished()).to_contain_text("Fine.")
    assert "<tool_call>" not in prompt_of(script.requests[1]).rpartition("Wait.")[2]


def prompt_of(request):
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    return tokenizer.decode(request.token_ids.tolist(), skip_special_tokens=False)


def reload(tab):
    """Reload the page, once the conversation is stored."""
    expect(tab.page.get_by_role("button", name="History")).to_have_attribute("aria-busy", "false")
    tab.page.reload()
    tab.wait_for_scripts()


def open_history(tab):
    tab.page.get_by_role("button", name="History").click()
    return tab.page.get_by_role("dialog", name="History")


def test_history_is_kept_in_the_browser(open_page, scripted):
    server, script, _ = scripted("A red circle.", "It is red.", "Hello.", "It is round.")
    tab = open_page(server)
    tab.drop(IMAGES / "circle.png")
    expect(tab.tile("circle.png")).to_contain_text("36 tokens")
    tab.send("What is it?")
    tab.finished()
    tab.send("Which color?")
    tab.finished()
    tab.page.get_by_role("button", name="New chat").click()
    tab.send("Hi!")
    tab.finished()
    reload(tab)
    dialog = open_history(tab)
    expect(dialog.locator(".history-title")).to_have_text(["Hi!", "What is it?"])
    expect(dialog.get_by_role("listitem").nth(1)).to_contain_text("2 prompts")
    tab.screenshot("10-history")
    dialog.locator(".history-open").nth(1).click()
    expect(tab.page.get_by_role("article", name="Response")).to_have_text(
        [re.compile("A red circle."), re.compile("It is red.")]
    )
    expect(tab.page.locator(".exchange .tile")).to_contain_text("36 tokens · 168×168")
    tab.screenshot("11-restored")
    tab.send("Which shape?")
    expect(tab.finished()).to_contain_text("It is round.")
    assert [len(request.spans) for request in script.requests] == [1, 1, 0, 1]
    assert len(script.requests[3].token_ids) > len(script.requests[1].token_ids)

    dialog = open_history(tab)
    expect(dialog.locator(".history-title")).to_have_text(["What is it?", "Hi!"])
    dialog.get_by_role("button", name="Delete Hi!").click()
    expect(dialog.locator(".history-title")).to_have_text(["What is it?"])
    dialog.get_by_role("button", name="Delete all").click()
    dialog.get_by_role("button", name="Delete all conversations?").click()
    expect(dialog.get_by_text("No conversations.")).to_be_visible()


def test_history_can_be_disabled(open_page, scripted):
    server, *_ = scripted("Fine.")
    tab = open_page(server)
    dialog = open_history(tab)
    dialog.get_by_label("Keep conversations").uncheck()
    tab.page.keyboard.press("Escape")
    tab.send("Hello?")
    tab.finished()
    tab.page.reload()
    tab.wait_for_scripts()
    dialog = open_history(tab)
    expect(dialog.get_by_label("Keep conversations")).not_to_be_checked()
    expect(dialog.get_by_text("No conversations.")).to_be_visible()


def test_calls_and_failures_are_restored(open_page, scripted):
    server, script, _ = scripted(CALL, QueueFull("Busy."), "None.")
    tab = open_page(server)
    tab.expects_errors = True
    tab.page.get_by_role("button", name="Insert an example").click()
    tab.send("Find them.")
    tab.finished().get_by_label("Result of find_shapes").fill("none")
    tab.page.get_by_role("button", name="Send results").click()
    expect(tab.finished().get_by_role("alert")).to_contain_text("Busy.")
    reload(tab)
    open_history(tab).locator(".history-open").click()
    expect(tab.response(0).locator(".call-name")).to_have_text(["find_shapes"])
    expect(tab.response(1).get_by_role("alert")).to_contain_text("Busy.")
    tab.page.get_by_role("button", name="Insert an example").click()
    tab.page.get_by_role("button", name="Regenerate").click()
    expect(tab.finished()).to_contain_text("None.")
    assert len(script.requests) == 3


def test_reasoning_is_shown_apart_from_the_response(open_page, scripted, tmp_path):
    """It is open while the model reasons, and closed once the model responds."""
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    server, *_ = scripted(LONG, "It has <b>wheels</b>.</think>\n\nA car.", delay=0.02, chat_template=template)
    tab = open_page(server)
    tab.send("What is it?")
    reasoning = tab.response().locator(".reasoning-text")
    expect(reasoning).to_contain_text("It goes on and on. It")
    expect(reasoning).to_be_visible()
    tab.page.get_by_role("button", name="Stop").click()
    tab.page.get_by_role("button", name="Regenerate").click()
    response = tab.finished()
    expect(response.locator(".response-text")).to_have_text("A car.")
    expect(reasoning).to_be_hidden()
    expect(response).to_contain_text(re.compile(r"Response\s*\d+ tokens, \d+ of them reasoning"))
    reload(tab)
    open_history(tab).locator(".history-open").click()
    tab.response().get_by_text("Reasoning", exact=True).click()
    expect(tab.response().locator(".reasoning-text")).to_have_text("It has <b>wheels</b>.")
    tab.screenshot("12-reasoning")


def test_markup_in_a_response_is_shown_as_text(open_page, scripted):
    server, *_ = scripted(RICH)
    tab = open_page(server)
    tab.send("Count them.")
    response = tab.finished()
    expect(response.get_by_role("listitem")).to_have_text(["a star", "a square"])
    expect(response.locator("pre code")).to_have_text('print("<b>2</b>")')
    expect(response).to_contain_text("<img src=x onerror=alert(1)> is text.")
    assert response.locator("img, b, script").count() == 0


def test_api_key_is_stored_for_this_tab_only(open_page, scripted):
    server, *_ = scripted("Come in.", settings=Settings(keys=ApiKeys(["sesame"])))
    tab = open_page(server, expects_errors=True)
    field = tab.page.get_by_label("API key")
    expect(tab.page.get_by_role("status").filter(has_text="API key required")).to_be_visible()
    tab.send("May I?")
    expect(tab.finished().get_by_role("alert")).to_contain_text("Enter the API key in the settings")
    field.fill("open")
    field.press("Tab")
    expect(tab.page.get_by_role("status").filter(has_text="API key rejected")).to_be_visible()
    field.fill("sesame")
    field.press("Tab")
    expect(tab.page.get_by_role("status").filter(has_text="demo")).to_be_visible()
    tab.page.get_by_role("button", name="Regenerate").click()
    expect(tab.finished()).to_contain_text("Come in.")
    stores = tab.page.evaluate("[sessionStorage.length, localStorage.length, document.cookie, location.href]")
    assert stores == [1, 0, "", f"{server.url}/"]
    for language in ("curl", "openai", "LangChain"):
        code = code_of(tab, language)
        assert "sesame" not in code
        assert "DASHINFER_VLM_API_KEY" in code


SCREENS = [("light", 1280), ("dark", 375)]


@pytest.fixture
def checked_page(open_page, scripted):
    """Open the page, and return its tab, and a function that checks that axe finds no violation in the current state,
    and that nothing is wider than the screen."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()

    def start(scheme, width, *responses):
        server, *_ = scripted(*responses)
        screen = {"color_scheme": scheme, "viewport": {"width": width, "height": 700}}
        tab = open_page(server, **screen, reduced_motion="reduce")
        tab.expects_errors = True

        def check(name):
            results = axe.run(tab.page)
            assert results.violations_count == 0, results.generate_report()
            assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
            tab.screenshot(f"{scheme}-{width}-{name}")

        return tab, check

    return start


@pytest.mark.parametrize(("scheme", "width"), SCREENS)
def test_page_is_accessible(checked_page, scheme, width):
    tab, check = checked_page(scheme, width, RICH, QueueFull("Busy."), CALL)
    check("welcome")
    tab.drop(IMAGES / "pair.png", IMAGES / "moving.mp4")
    expect(tab.page.get_by_text("1 image · 1 video · 62 tokens")).to_be_visible()
    check("attachments")
    tab.page.get_by_role("button", name="Preview of pair.png").click()
    check("frames")
    tab.page.keyboard.press("Escape")
    tab.send("What do they show?")
    tab.finished()
    check("response")
    tab.page.get_by_role("button", name="Code for this request").click()
    check("code")
    tab.page.keyboard.press("Escape")
    tab.page.get_by_role("button", name="Add a URL").click()
    check("url")
    tab.page.keyboard.press("Escape")
    tab.send("And again?")
    tab.finished()
    check("error")
    tab.page.get_by_role("button", name="History").click()
    check("history")
    tab.page.keyboard.press("Escape")
    if width < 1024:
        tab.page.get_by_role("button", name="Settings").click()
    tab.page.get_by_role("button", name="Insert an example").click()
    tab.page.get_by_label("Response format").select_option("json_schema")
    tab.page.get_by_label("JSON schema", exact=True).fill("{")
    check("settings")
    tab.page.get_by_label("Response format").select_option("text")
    if width < 1024:
        tab.page.get_by_role("button", name="Settings").click()
    tab.send("Find them.")
    expect(tab.finished().locator(".call-name")).to_have_text(["find_shapes"])
    check("calls")


@pytest.mark.parametrize(("scheme", "width"), SCREENS)
def test_camera_and_measurement_are_accessible(checked_page, scheme, width):
    tab, check = checked_page(scheme, width, "Yes.")
    tab.page.get_by_role("button", name="Camera").click()
    expect(tab.page.get_by_role("dialog", name="Camera")).to_be_visible()
    check("camera")
    tab.page.keyboard.press("Escape")
    if width < 1024:
        tab.page.get_by_role("button", name="Settings").click()
    tab.page.get_by_role("button", name="Measure the speed").click()
    check("speed")


def test_keyboard_navigation(open_page, scripted):
    server, *_ = scripted(LONG, "Short.", delay=0.02)
    tab = open_page(server)
    keys = tab.page.keyboard
    field = tab.page.get_by_label("Prompt", exact=True)
    expect(field).to_be_focused()
    with tab.page.expect_file_chooser() as chooser:
        reach(tab, "Add files")
        keys.press("Enter")
    chooser.value.set_files(IMAGES / "pair.png")
    expect(tab.tile("pair.png")).to_contain_text("30 tokens")
    reach(tab, "Preview of pair.png", "Shift+Tab")
    keys.press("Enter")
    expect(tab.page.get_by_role("dialog")).to_be_visible()
    keys.press("Escape")
    expect(tab.page.get_by_role("button", name="Preview of pair.png")).to_be_focused()
    reach(tab, "Prompt")
    keys.type("What?")
    keys.press("Shift+Enter")
    keys.type("Really?")
    keys.press("Enter")
    expect(tab.response()).to_contain_text("It goes on")
    expect(field).to_be_focused()
    keys.press("Escape")
    expect(tab.response()).to_contain_text("You stopped the response here.")
    reach(tab, "Regenerate", "Shift+Tab")
    keys.press("Space")
    expect(tab.finished()).to_contain_text("Short.")
    expect(field).to_be_focused()
    reach(tab, "Code for this request", "Shift+Tab")
    keys.press("Enter")
    expect(tab.page.get_by_role("tab", name="curl")).to_be_focused()
    keys.press("ArrowRight")
    expect(tab.page.get_by_role("tab", name="openai")).to_be_focused()
    expect(tab.page.locator("#code")).to_contain_text("from openai import OpenAI")


def test_response_is_announced_once(open_page, scripted):
    server, *_ = scripted("A star. " * 20, delay=0.005)
    tab = open_page(server)
    tab.page.evaluate(
        """() => { window.announced = [];
        new MutationObserver(() => window.announced.push(document.getElementById("announcer").textContent))
          .observe(document.getElementById("announcer"), { childList: true, characterData: true, subtree: true }); }"""
    )
    tab.send("What is it?")
    assert tab.finished().get_attribute("aria-live") is None
    sent, announced = tab.page.evaluate("window.announced")
    assert sent == "Sent. Waiting for the response."
    assert announced.startswith("Response: A star. A star.")


PROGRAMS = {"curl": lambda: ["bash"], "openai": forked, "LangChain": forked}
"""The interpreters of generated code."""


@pytest.mark.parametrize("language", PROGRAMS)
def test_generated_code_returns_the_same_response(open_page, demo, tmp_path, language):
    awkward = """She said "it's $HOME `ls` \\ {x}" and left. Describe the picture."""
    tab = open_page(demo)
    for name in ("circle.png", "moving.mp4"):
        (tmp_path / name).write_bytes((IMAGES / name).read_bytes())
    for label, value in (("Temperature", "0"), ("Top k", "5"), ("Max tokens", "40")):
        tab.page.get_by_label(label, exact=True).fill(value)
    tab.page.get_by_label("Response format").select_option("json_object")
    tab.drop(IMAGES / "circle.png", IMAGES / "moving.mp4")
    expect(tab.tile("moving.mp4")).to_contain_text("32 tokens")
    tab.send(awkward)
    tab.finished()
    tab.send("And now?")
    expected = tab.finished().locator(".response-text").inner_text()
    program = code_of(tab, language)
    output = run_program(language, program, tmp_path)
    if language == "curl":
        output = json.loads(output)["choices"][0]["message"]["content"]
    assert " ".join(output.split()) == " ".join(expected.split())
    assert expected.strip().startswith("{")


def test_file_name_cannot_add_commands_to_generated_code(open_page, demo, tmp_path):
    hostile = "a.\nJSON\ntouch added #"
    tab = open_page(demo)
    (tmp_path / hostile).write_bytes((IMAGES / "circle.png").read_bytes())
    tab.drop(tmp_path / hostile)
    tab.send("Describe the picture.")
    tab.finished()
    (tmp_path / hostile).rename(tmp_path / "a._JSON_touch added #")  # as the page names it
    run_program("curl", code_of(tab, "curl"), tmp_path)
    assert not (tmp_path / "added").exists()


def test_type_of_a_file_cannot_add_commands_to_generated_code(open_page, scripted, tmp_path):
    server, *_ = scripted("Never.")
    tab = open_page(server, expects_errors=True)
    (tmp_path / "a.png").touch()
    file = {"name": "a.png", "type": "image/`touch added`$(touch added)", "data": ""}
    tab.page.evaluate(DROP, [[file], ["dragenter", "dragover", "drop"]])
    tab.tile("a.png").wait_for()
    tab.send("Describe the picture.")
    tab.finished()
    run_program("curl", code_of(tab, "curl"), tmp_path)
    assert not (tmp_path / "added").exists()


@pytest.mark.parametrize("language", ["curl", "openai"])
def test_generated_code_for_the_responses_api(open_page, demo, tmp_path, language):
    tab = open_page(demo)
    for name in ("circle.png", "moving.mp4"):
        (tmp_path / name).write_bytes((IMAGES / name).read_bytes())
    for label, value in (("Temperature", "0"), ("Top k", "5"), ("Max tokens", "40"), ("System prompt", "Be short.")):
        tab.page.get_by_label(label, exact=True).fill(value)
    tab.page.get_by_label("Response format").select_option("json_schema")
    tab.drop(IMAGES / "circle.png", IMAGES / "moving.mp4")
    expect(tab.tile("moving.mp4")).to_contain_text("32 tokens")
    tab.send("Describe the picture.")
    tab.finished()
    tab.send("And now?")
    expected = tab.finished().locator(".response-text").inner_text()
    output = run_program(language, code_of(tab, language, api="Responses"), tmp_path)
    if language == "curl":
        (message,) = json.loads(output)["output"]
        output = message["content"][0]["text"]
    assert " ".join(output.split()) == " ".join(expected.split())


def test_code_for_responses_converts_the_request(open_page, scripted):
    server, *_ = scripted(CALL, "Two.")
    tab = open_page(server)
    tab.page.get_by_label("System prompt").fill("Be short.")
    tab.page.get_by_label("Max tokens").fill("99")
    tab.page.get_by_role("button", name="Insert an example").click()
    tab.drop(IMAGES / "circle.png")
    tab.send("Find them.")
    tab.finished().get_by_label("Result of find_shapes").fill("two stars")
    tab.page.get_by_role("button", name="Send results").click()
    tab.finished()
    code = code_of(tab, "curl", api="Responses")
    body = json.loads(
        re.sub(r"\\([\\$`])", r"\1", re.search(r"<<JSON\n(.*)\nJSON", code, re.DOTALL)[1])
    )  # as bash reads it
    prompt, call, result = body["input"]
    assert "/v1/responses" in code
    assert prompt["content"][0]["type"] == "input_image"
    assert prompt["content"][0]["image_url"].startswith("data:image/png;base64,$(base64 < circle.png")
    assert prompt["content"][1] == {"type": "input_text", "text": "Find them."}
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "find_shapes", '{"color": "red"}')
    assert result == {"type": "function_call_output", "call_id": call["call_id"], "output": "two stars"}
    assert (body["instructions"], body["max_output_tokens"]) == ("Be short.", 99)
    assert [(tool["type"], tool["name"]) for tool in body["tools"]] == [("function", "find_shapes")]
    expect(tab.page.get_by_role("tab", name="LangChain")).to_have_count(0)
    compile(code_of(tab, "openai", api="Responses"), "openai", "exec")


def test_files_of_the_code_can_be_saved(open_page, scripted):
    server, *_ = scripted("Never.")
    tab = open_page(server)
    tab.drop(IMAGES / "circle.png")
    tab.page.get_by_role("button", name="Code", exact=True).click()
    with tab.page.expect_download() as download:
        tab.page.get_by_role("link", name="circle.png").click()
    assert download.value.suggested_filename == "circle.png"
    assert download.value.path().read_bytes() == (IMAGES / "circle.png").read_bytes()


def test_code_can_be_copied(open_page, scripted):
    server, *_ = scripted("Never.")
    tab = open_page(server, permissions=["clipboard-read", "clipboard-write"])
    tab.page.get_by_role("button", name="Code", exact=True).click()
    tab.page.get_by_role("button", name="Copy").click()
    expect(tab.page.get_by_text("Copied.")).to_be_visible()
    assert tab.page.evaluate("navigator.clipboard.readText()").startswith("curl http://127.0.0.1")


def run_program(language, code, folder):
    command = [*PROGRAMS[language](), "-c", code]
    environment = os.environ | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    completed = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG, check=False
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def code_of(tab, language, *, api="Chat completions"):
    tab.page.get_by_role("button", name="Code for this request").last.click()
    tab.page.get_by_label(api).check()
    tab.page.get_by_role("tab", name=language).click()
    code = tab.page.locator("#code").inner_text()
    tab.page.keyboard.press("Escape")
    return code


NAME = "(it => it.ariaLabel || it.labels?.[0]?.innerText || it.innerText)(document.activeElement)"


def reach(tab, name, key="Tab"):
    """Press `key` until the element with this name has the focus."""
    for _ in range(40):
        tab.page.keyboard.press(key)
        if tab.page.evaluate(NAME).strip() == name:
            return
    raise AssertionError(f"{name} did not get the focus")
