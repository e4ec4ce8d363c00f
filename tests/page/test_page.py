"""The page as a person uses it, in a real browser.

Each test ends with a look at the console: no error, no warning, nothing that the page's policy forbade, no request to
another server.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from dashinfer_vlm_core.errors import QueueFull
from dashinfer_vlm_server.api_keys import ApiKeys
from dashinfer_vlm_server.settings import Settings
from tests.page.conftest import PICTURES
from tests.waiting import HANG, until

pytestmark = pytest.mark.slow
expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

LONG = "It goes on and on. " * 60
RICH = """Two shapes:

1. a **star**
2. a `square`

```python
print("<b>2</b>")
```

<img src=x onerror=alert(1)> is text."""


def test_two_pictures_are_dropped_seen_asked_about_stopped_and_asked_about_again(visit, scripted):
    server, script, _ = scripted(LONG, "Two stars.", delay=0.02)
    tab = visit(server)
    tab.drop(PICTURES / "pair.png", PICTURES / "circle.png")
    expect(tab.tile("pair.png")).to_contain_text("30 tokens · 168×140")
    expect(tab.tile("circle.png")).to_contain_text("36 tokens · 168×168")
    expect(tab.page.get_by_text("2 pictures · 66 tokens")).to_be_visible()
    tab.screenshot("1-dropped")

    tab.ask("Compare them.")
    expect(tab.answer()).to_contain_text("It goes on and on. It")
    tab.screenshot("2-streaming")
    assert script.running == 1
    tab.page.get_by_role("button", name="Stop").click()
    expect(tab.answer()).to_contain_text("You stopped it here.")
    until(lambda: script.running == 0)
    assert len(tab.answer().inner_text()) < len(LONG)
    tab.screenshot("3-stopped")

    tab.page.get_by_role("button", name="Ask again").click()
    answer = tab.finished()
    expect(answer).to_contain_text("Two stars.")
    expect(answer).not_to_contain_text("It goes on")
    expect(answer).to_contain_text(re.compile(r"Speed\s*[\d.]+ tokens/s"))
    assert [len(request.spans) for request in script.requests] == [2, 2]
    tab.screenshot("4-asked-again")


def test_an_answer_comes_with_its_measures(visit, demo):
    """Its screenshot is the one of docs/page.md."""
    tab = visit(demo, viewport={"width": 1280, "height": 720})
    tab.drop(PICTURES / "before.png", PICTURES / "after.png")
    expect(tab.page.get_by_text("2 pictures · 72 tokens")).to_be_visible()
    tab.page.get_by_label("Temperature").fill("0")
    tab.ask("Which picture has a red square?")
    answer = tab.finished()
    expect(answer).to_contain_text("The second picture.")
    measures = (
        r"First token\s*\d+ ms",
        r"Prompt\s*\d+ tokens, 72 of them seen",
        r"Answer\s*\d+ tokens",
    )
    for measure in measures:
        expect(answer).to_contain_text(re.compile(measure))
    tab.drop(PICTURES / "pair.png", PICTURES / "moving.mp4")
    expect(tab.page.get_by_text("1 picture · 1 video · 62 tokens")).to_be_visible()
    tab.screenshot("page")


def test_a_conversation_goes_on_and_begins_anew(visit, scripted):
    server, script, _ = scripted("One.", "Two.", "Three.")
    tab = visit(server)
    tab.page.get_by_label("System prompt").fill("Be short.")
    lengths = []
    for question in ("First?", "Second?"):
        tab.ask(question)
        tab.finished()
        lengths.append(len(script.requests[-1].token_ids))
    expect(tab.page.get_by_role("article", name="Answer")).to_have_text([re.compile("One."), re.compile("Two.")])
    tab.page.get_by_role("button", name="New chat").click()
    expect(tab.page.get_by_role("heading", name="Ask about a picture or a video")).to_be_visible()
    tab.ask("First?")
    tab.finished()
    lengths.append(len(script.requests[-1].token_ids))
    assert lengths[1] > lengths[0] == lengths[2]


def test_an_error_stands_by_its_question_which_is_kept(visit, scripted):
    server, *_ = scripted(QueueFull("7 requests wait already: try again in a moment.", retry_after=2), "Now.")
    tab = visit(server)
    tab.failing = True
    tab.ask("Is there a place?")
    problem = tab.page.get_by_role("alert").filter(has_text="No answer")
    expect(problem).to_contain_text("7 requests wait already")
    expect(problem).to_contain_text("Try again in 2 seconds.")
    expect(tab.page.get_by_role("article", name="Your question")).to_have_text("Is there a place?")
    tab.screenshot("5-error")
    tab.page.get_by_role("button", name="Edit the question").click()
    field = tab.page.get_by_label("Question", exact=True)
    expect(field).to_be_focused()
    expect(field).to_have_value("Is there a place?")
    field.press("Enter")
    expect(tab.finished()).to_contain_text("Now.")


def test_what_breaks_off_in_the_midst_keeps_what_came(visit, scripted):
    server, _, engine = scripted(LONG, delay=0.02)
    tab = visit(server)
    tab.failing = True
    tab.ask("Go on.")
    expect(tab.answer()).to_contain_text("It goes on and on.")
    engine.close()
    expect(tab.answer().get_by_role("alert")).to_contain_text("No answer")
    expect(tab.answer()).to_contain_text("It goes on and on.")


def test_a_file_that_is_no_picture_says_so_where_it_lies(visit, scripted, tmp_path):
    server, *_ = scripted("Never.")
    tab = visit(server)
    tab.failing = True
    (tmp_path / "broken.png").write_bytes(b"no picture")
    (tmp_path / "notes.txt").write_text("words")
    tab.drop(tmp_path / "broken.png", tmp_path / "notes.txt")
    expect(tab.tile("broken.png")).to_contain_text("save it again in one of these formats")
    expect(tab.page.get_by_text("Neither a picture nor a video: notes.txt")).to_be_visible()
    tab.page.get_by_role("button", name="Remove broken.png").click()
    expect(tab.page.get_by_role("button", name="Add files")).to_be_focused()


def test_pictures_can_be_pasted_chosen_and_sampled(visit, scripted):
    server, *_ = scripted("Fine.")
    tab = visit(server)
    tab.drop(PICTURES / "circle.png", by=["paste"])
    tab.page.locator("input[type=file]").set_input_files([PICTURES / "circle.png", PICTURES / "moving.mp4"])
    tab.page.get_by_role("button", name="Take a sample picture").click()
    expect(tab.page.get_by_text(re.compile(r"3 pictures · 1 video · \d+ tokens"))).to_be_visible()
    names = tab.page.locator(".composer .tile-name").all_inner_texts()
    assert sorted(names) == ["circle-2.png", "circle.png", "moving.mp4", "sample.png"]


def test_the_frames_that_the_model_sees_are_shown(visit, demo):
    tab = visit(demo)
    tab.drop(PICTURES / "moving.mp4")
    expect(tab.tile("moving.mp4")).to_contain_text("32 tokens · 112×112 · 4 frames")
    tab.page.get_by_role("button", name="What the model sees of moving.mp4").click()
    dialog = tab.page.get_by_role("dialog", name="What the model sees of moving.mp4")
    expect(dialog).to_contain_text("112×112 pixels become 112×112: 2 × 4 × 4 cells, 32 tokens; 2 frames share theirs.")
    frames = dialog.get_by_role("img").all()
    assert [frame.evaluate("image => [image.naturalWidth, image.naturalHeight]") for frame in frames] == [
        [112, 112]
    ] * 4
    tab.screenshot("6-frames")


def test_a_url_that_the_server_may_not_fetch_is_refused_by_name(visit, scripted):
    server, *_ = scripted("Never.", allow_remote_media=False)
    tab = visit(server)
    tab.failing = True
    tab.page.get_by_role("button", name="Add a URL").click()
    tab.page.get_by_label("Address").fill("https://pictures.example/cat.png")
    tab.page.get_by_role("button", name="Add", exact=True).click()
    expect(tab.tile("cat.png")).to_contain_text("This server fetches no media")
    tab.ask("What is it?")
    expect(tab.finished().get_by_role("alert")).to_contain_text("messages[0].content[0]")


CHOSEN = {"Temperature": "0.5", "Top p": "0.9", "Top k": "7", "Seed": "3", "Most tokens": "2", "Repetition": "1.1"}


def test_the_settings_are_what_is_asked_for(visit, scripted):
    server, script, _ = scripted("Cut off here.", '{"shapes": []}')
    tab = visit(server)
    for label, value in CHOSEN.items():
        tab.page.get_by_label(label, exact=True).fill(value)
    tab.ask("Hello?")
    expect(tab.finished()).to_contain_text("It was cut off at the most tokens")
    sampling = script.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 7, 3)
    assert (sampling.max_tokens, sampling.repetition_penalty) == (2, 1.1)

    tab.page.get_by_label("Most tokens").fill("")
    tab.page.get_by_label("Format of the answer").select_option("json_schema")
    schema = tab.page.get_by_label("JSON schema", exact=True)
    schema.fill("{")
    tab.ask("Again?")
    expect(schema).to_be_focused()
    schema.fill('{"type": "object", "properties": {"shapes": {"type": "array"}}}')
    tab.page.get_by_label("Question", exact=True).press("Enter")
    expect(tab.finished()).to_contain_text('"shapes"')
    assert script.requests[1].grammar is not None


def test_an_answer_is_shown_as_text_whatever_it_holds(visit, scripted):
    server, *_ = scripted(RICH)
    tab = visit(server)
    tab.ask("Count them.")
    answer = tab.finished()
    expect(answer.get_by_role("listitem")).to_have_text(["a star", "a square"])
    expect(answer.locator("pre code")).to_have_text('print("<b>2</b>")')
    expect(answer).to_contain_text("<img src=x onerror=alert(1)> is text.")
    assert answer.locator("img, b, script").count() == 0


def test_a_key_is_asked_for_and_kept_for_this_tab_alone(visit, scripted):
    server, *_ = scripted("Come in.", settings=Settings(keys=ApiKeys(["sesame"])))
    tab = visit(server)
    tab.failing = True
    field = tab.page.get_by_label("API key")
    expect(tab.page.get_by_role("status").filter(has_text="An API key is needed")).to_be_visible()
    tab.ask("May I?")
    expect(tab.finished().get_by_role("alert")).to_contain_text("Enter the API key in the settings")
    field.fill("sesame")
    field.press("Tab")
    expect(tab.page.get_by_role("status").filter(has_text="demo")).to_be_visible()
    tab.page.get_by_role("button", name="Ask again").click()
    expect(tab.finished()).to_contain_text("Come in.")
    stores = tab.page.evaluate("[sessionStorage.length, localStorage.length, document.cookie, location.href]")
    assert stores == [1, 0, "", f"{server.url}/"]
    for language in ("curl", "openai", "LangChain"):
        code = code_of(tab, language)
        assert "sesame" not in code
        assert "OPENAI_API_KEY" in code


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 375])
def test_everybody_can_use_it(visit, scripted, scheme, width):
    """axe finds no fault, in any state, and nothing is wider than the screen."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    server, *_ = scripted(RICH, QueueFull("Busy."))
    tab = visit(server, color_scheme=scheme, viewport={"width": width, "height": 700}, reduced_motion="reduce")
    tab.failing = True

    def look(name):
        found = axe.run(tab.page)
        assert found.violations_count == 0, found.generate_report()
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
        tab.screenshot(f"{scheme}-{width}-{name}")

    look("welcome")
    tab.drop(PICTURES / "pair.png", PICTURES / "moving.mp4")
    expect(tab.page.get_by_text("1 picture · 1 video · 62 tokens")).to_be_visible()
    look("tray")
    tab.page.get_by_role("button", name="What the model sees of pair.png").click()
    look("frames")
    tab.page.keyboard.press("Escape")
    tab.ask("What do they show?")
    tab.finished()
    look("answer")
    tab.page.get_by_role("button", name="Code of this request").click()
    look("code")
    tab.page.keyboard.press("Escape")
    tab.page.get_by_role("button", name="Add a URL").click()
    look("url")
    tab.page.keyboard.press("Escape")
    tab.ask("And again?")
    tab.finished()
    look("error")
    if width < 1024:
        tab.page.get_by_role("button", name="Settings").click()
        look("settings")


def test_a_keyboard_is_enough(visit, scripted):
    server, *_ = scripted(LONG, "Short.", delay=0.02)
    tab = visit(server)
    keys = tab.page.keyboard
    field = tab.page.get_by_label("Question", exact=True)
    expect(field).to_be_focused()
    with tab.page.expect_file_chooser() as chooser:
        reach(tab, "Add files")
        keys.press("Enter")
    chooser.value.set_files(PICTURES / "pair.png")
    expect(tab.tile("pair.png")).to_contain_text("30 tokens")
    reach(tab, "What the model sees of pair.png", "Shift+Tab")
    keys.press("Enter")
    expect(tab.page.get_by_role("dialog")).to_be_visible()
    keys.press("Escape")
    expect(tab.page.get_by_role("button", name="What the model sees of pair.png")).to_be_focused()
    reach(tab, "Question")
    keys.type("What?")
    keys.press("Shift+Enter")
    keys.type("Really?")
    keys.press("Enter")
    expect(tab.answer()).to_contain_text("It goes on")
    expect(field).to_be_focused()
    keys.press("Escape")
    expect(tab.answer()).to_contain_text("You stopped it here.")
    reach(tab, "Ask again", "Shift+Tab")
    keys.press("Space")
    expect(tab.finished()).to_contain_text("Short.")
    expect(field).to_be_focused()
    reach(tab, "Code of this request", "Shift+Tab")
    keys.press("Enter")
    expect(tab.page.get_by_role("tab", name="curl")).to_be_focused()
    keys.press("ArrowRight")
    expect(tab.page.get_by_role("tab", name="openai")).to_be_focused()
    expect(tab.page.locator("#code")).to_contain_text("from openai import OpenAI")


def test_screen_readers_hear_an_answer_once(visit, scripted):
    server, *_ = scripted("A star. " * 20, delay=0.005)
    tab = visit(server)
    tab.page.evaluate(
        """() => { window.heard = [];
        new MutationObserver(() => window.heard.push(document.getElementById("announcer").textContent))
          .observe(document.getElementById("announcer"), { childList: true, characterData: true, subtree: true }); }"""
    )
    tab.ask("What is it?")
    assert tab.finished().get_attribute("aria-live") is None
    asked, heard = tab.page.evaluate("window.heard")
    assert asked == "Asked. The answer comes."
    assert heard.startswith("Answer: A star. A star.")


PROGRAMS = {"curl": ["bash", "-c"], "openai": [sys.executable, "-c"], "LangChain": [sys.executable, "-c"]}


@pytest.mark.parametrize("language", PROGRAMS)
def test_the_code_that_the_page_gives_runs_and_says_the_same(visit, demo, tmp_path, language):
    awkward = """She said "it's $HOME `ls` \\ {x}" and left. Describe the picture."""
    tab = visit(demo)
    for name in ("circle.png", "moving.mp4"):
        (tmp_path / name).write_bytes((PICTURES / name).read_bytes())
    for label, value in (("Temperature", "0"), ("Top k", "5"), ("Most tokens", "40")):
        tab.page.get_by_label(label, exact=True).fill(value)
    tab.page.get_by_label("Format of the answer").select_option("json_object")
    tab.drop(PICTURES / "circle.png", PICTURES / "moving.mp4")
    expect(tab.tile("moving.mp4")).to_contain_text("32 tokens")
    tab.ask(awkward)
    tab.finished()
    tab.ask("And now?")
    said = tab.finished().locator(".answer-text").inner_text()
    program = code_of(tab, language)
    environment = os.environ | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    command = [*PROGRAMS[language], program]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG, check=False
    )
    assert ended.returncode == 0, ended.stderr
    output = ended.stdout
    if language == "curl":
        output = json.loads(output)["choices"][0]["message"]["content"]
    assert " ".join(output.split()) == " ".join(said.split())
    assert said.strip().startswith("{")


def test_the_code_can_be_copied(visit, scripted):
    server, *_ = scripted("Never.")
    tab = visit(server, permissions=["clipboard-read", "clipboard-write"])
    tab.page.get_by_role("button", name="Code", exact=True).click()
    tab.page.get_by_role("button", name="Copy").click()
    expect(tab.page.get_by_text("Copied.")).to_be_visible()
    assert tab.page.evaluate("navigator.clipboard.readText()").startswith("curl http://127.0.0.1")


def code_of(tab, language):
    tab.page.get_by_role("button", name="Code of this request").last.click()
    tab.page.get_by_role("tab", name=language).click()
    code = tab.page.locator("#code").inner_text()
    tab.page.keyboard.press("Escape")
    return code


NAME = "(it => it.ariaLabel || it.labels?.[0]?.innerText || it.innerText)(document.activeElement)"


def reach(tab, name, key="Tab"):
    """Press `key` until what has this name has the focus."""
    for _ in range(40):
        tab.page.keyboard.press(key)
        if tab.page.evaluate(NAME).strip() == name:
            return
    raise AssertionError(f"{name} cannot be reached")
