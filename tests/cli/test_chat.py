"""`chat`: what lines name, what is said, what is typed, and the program at a terminal and behind a pipe."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path

import pytest
from PIL import Image

from dashinfer_vlm_cli.conversation import Conversation
from dashinfer_vlm_cli.media import clipboard_part, find_media, media_part
from dashinfer_vlm_cli.repl import COMMANDS, Repl
from dashinfer_vlm_core.cli.terminal import printable
from dashinfer_vlm_core.errors import (
    ConfigError,
    InvalidParameter,
    MediaUndecodable,
    MediaUnreachable,
    MissingDependency,
    QueueFull,
)
from dashinfer_vlm_core.testing import scripted_engine
from tests.cli.conftest import MAIN, process
from tests.samples import data_url


def text_of(content):
    return content if isinstance(content, str) else content[-1]["text"]


# What lines name


def test_a_file_becomes_a_data_url(pictures):
    part = media_part("image", str(pictures / "circle.png"))
    assert part["image_url"]["url"] == data_url((pictures / "circle.png").read_bytes())
    part = media_part("video", str(pictures / "moving.mp4"))
    assert part["video_url"]["url"].startswith("data:video/mp4;base64,")


def test_an_address_is_left_to_the_engine():
    assert media_part("image", "https://example.com/x")["image_url"]["url"] == "https://example.com/x"


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(MediaUnreachable, match=r"none\.png cannot be read: No such file"):
        media_part("image", "none.png")


@pytest.mark.parametrize("written", ["'{path}'", '"{path}"', "{escaped}", "file://{quoted}"])
def test_a_dropped_file_is_found_however_the_terminal_writes_it(tmp_path, pictures, written):
    path = tmp_path / "my picture.png"
    path.write_bytes((pictures / "circle.png").read_bytes())
    word = written.format(path=path, escaped=str(path).replace(" ", "\\ "), quoted=str(path).replace(" ", "%20"))
    text, parts = find_media(f"What is in {word} here?")
    assert text == "What is in here?"
    assert [part["type"] for part in parts] == ["image_url"]


def test_pictures_and_videos_in_one_line(pictures):
    text, parts = find_media(f"{pictures}/before.png https://example.com/after.JPG?x=1 {pictures}/moving.mp4 compare")
    assert text == "compare"
    assert [part["type"] for part in parts] == ["image_url", "image_url", "video_url"]


@pytest.mark.parametrize(
    "line", ["What's in none.png?", "It's 5 o'clock", "see https://example.com/page", "  two  blanks ", "/tmp"]
)
def test_other_lines_stay_as_they_are(line):
    assert find_media(line) == (line, [])


@pytest.fixture
def clipboard(tmp_path, monkeypatch):
    """Play the program that reads the clipboard of a desktop."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("DISPLAY", raising=False)

    def play(script):
        (tmp_path / "wl-paste").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "wl-paste").chmod(0o755)

    return play


def test_the_picture_in_the_clipboard(clipboard, pictures):
    clipboard(f"exec /bin/cat {pictures}/circle.png")
    data = clipboard_part()["image_url"]["url"].removeprefix("data:image/png;base64,")
    with Image.open(io.BytesIO(base64.b64decode(data))) as got, Image.open(pictures / "circle.png") as copied:
        assert got.convert("RGB").tobytes() == copied.convert("RGB").tobytes()


def test_a_clipboard_without_a_picture(clipboard):
    clipboard("echo 'Nothing is copied' >&2; exit 1")
    with pytest.raises(MediaUndecodable, match="no picture in the clipboard"):
        clipboard_part()


def test_a_clipboard_that_cannot_be_read(clipboard):
    with pytest.raises(MissingDependency, match="install wl-clipboard"):
        clipboard_part()
    clipboard("echo 'no display' >&2; exit 1")
    with pytest.raises(MissingDependency, match="install wl-clipboard"):
        clipboard_part()


def test_what_a_model_writes_does_not_steer_the_terminal():
    assert printable("a\x1b[31mred\x1b]0;title\x07\n\tb\x9b") == "a[31mred]0;title\n\tb"


# What is said


def test_pictures_wait_for_their_question():
    talk = Conversation()
    talk.attach({"type": "image_url", "image_url": {"url": "data:,"}})
    talk.add_user("What is this?")
    talk.add_assistant("A circle.")
    talk.add_user("And its colour?")
    assert [part["type"] for part in talk.messages[0]["content"]] == ["image_url", "text"]
    assert talk.messages[2]["content"] == "And its colour?"


def test_a_question_is_taken_back_or_asked_again():
    talk = Conversation()
    assert not talk.undo()
    assert not talk.retry()
    talk.add_user("one")
    talk.add_assistant("1")
    talk.add_user("two")
    talk.add_assistant("2")
    assert talk.retry()
    assert [message["content"] for message in talk.messages] == ["one", "1", "two"]
    assert talk.undo()
    assert [message["content"] for message in talk.messages] == ["one", "1"]


def test_what_the_model_is_told_stands_first_and_survives_a_reset():
    talk = Conversation()
    talk.add_user("one")
    talk.set_system("Be short.")
    assert talk.messages[0] == {"role": "system", "content": "Be short."}
    talk.reset()
    assert (talk.system, talk.turns) == ("Be short.", 0)
    talk.set_system("")
    assert talk.messages == []


def test_options_are_checked_when_they_are_set():
    talk = Conversation()
    assert talk.set("temperature", "0.2") == 0.2
    assert talk.set("stop", "END") == "END"
    assert talk.set("stop", '["a", "b"]') == ["a", "b"]
    with pytest.raises(InvalidParameter, match="`temperature` must be at most 2"):
        talk.set("temperature", "9")
    with pytest.raises(InvalidParameter, match="Did you mean `temperature`"):
        talk.set("temprature", "1")
    with pytest.raises(InvalidParameter, match="Did you mean `max_tokens` or `min_tokens`"):
        talk.set("ma_tokens", "1")
    with pytest.raises(InvalidParameter, match="`temperature` must be a finite number; got 'x'"):
        talk.set("temperature", "x")
    with pytest.raises(InvalidParameter, match="`stop` must have at most 256 characters"):
        talk.set("stop", "[" * 100_000 + "]" * 100_000)
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "strange"}}}
    with pytest.raises(InvalidParameter, match=r"`response_format\.json_schema\.schema`"):
        talk.set("response_format", json.dumps(schema))
    with pytest.raises(InvalidParameter, match="There is no option `stream`"):
        talk.set("stream", "true")
    talk.set("stop", "")
    assert talk.options == {"temperature": 0.2}


@pytest.mark.parametrize("written", ["temperature", "temperature 0.2", ""])
def test_an_option_without_a_value_is_refused(run, written):
    with pytest.raises(ConfigError, match="has no value: write --set NAME=VALUE"):
        run("chat", "--api-base", "http://127.0.0.1:9/v1", "--set", written, "x")


def test_a_wrong_option_is_refused_before_anything_is_loaded(run):
    with pytest.raises(InvalidParameter, match="`temperature` must be a finite number; got 'x'"):
        run("chat", "--model", "/none", "--set", "temperature=x", "Is it?")


def test_a_conversation_is_saved_and_loaded_with_its_pictures(tmp_path, pictures):
    talk = Conversation()
    talk.set_system("Be short.")
    talk.set("temperature", "0")
    talk.attach(media_part("image", str(pictures / "circle.png")))
    talk.add_user("Grüße?")
    talk.add_assistant("A circle.")
    talk.save(tmp_path / "talk.json")
    again = Conversation.load(tmp_path / "talk.json")
    assert (again.messages, again.options) == (talk.messages, talk.options)
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]


@pytest.mark.parametrize("text", ["no json", "[]", "{}", '{"messages": [{"role": "nobody", "content": ""}]}'])
def test_a_file_that_is_no_conversation_is_refused(tmp_path, text):
    (tmp_path / "talk.json").write_text(text)
    with pytest.raises(InvalidParameter):
        Conversation.load(tmp_path / "talk.json")


# What is typed


@pytest.fixture
def talk(tiny_checkpoint):
    """A talk with a script: `talk("Yes.").take("Is it?")`; its `shown` holds what it showed."""
    engines = []

    def start(*answers):
        engines.append(scripted_engine(*answers, model=str(tiny_checkpoint)).start())
        shown: list[str] = []
        started = Repl(engine=engines[-1], conversation=Conversation(), write=shown.append, note=shown.append)
        started.shown = shown
        return started

    yield start
    for engine in engines:
        engine.close()


def said(talk):
    return [text_of(message["content"]) for message in talk.conversation.messages]


def test_a_question_is_answered_with_its_rates(talk):
    talking = talk("A red circle.")
    talking.take("What is this?")
    assert said(talking) == ["What is this?", "A red circle."]
    assert "".join(talking.shown).startswith("A red circle.\n")
    assert all(words in talking.shown[-1] for words in ("tokens, first after", "tokens/s", "prompt"))


def test_a_picture_goes_with_the_next_question(talk, pictures):
    talking = talk("A red circle.")
    talking.take(f"{pictures}/circle.png")
    assert talking.shown == ["image attached: ask about it."]
    talking.take("What is this?")
    assert [part["type"] for part in talking.conversation.messages[0]["content"]] == ["image_url", "text"]
    assert "of pictures" in talking.shown[-1]


def test_image_and_video_commands(talk, pictures):
    talking = talk("Yes.")
    talking.take(f"/image '{pictures}/circle.png'")
    assert talking.shown[-1] == "image attached: ask about it."
    talking.take("/video https://example.com/clip")
    assert talking.shown[-1] == "image and video attached: ask about it."
    talking.take("/image")
    assert talking.shown[-1] == "Write: /image PATH or URL"
    talking.take("/image none.png")
    assert "none.png cannot be read" in talking.shown[-1]


def test_undo_retry_and_reset(talk):
    talking = talk("one", "two", "three")
    talking.take("/retry")
    assert talking.shown == ["Nothing was asked yet."]
    talking.take("Count.")
    talking.take("/retry")
    assert said(talking) == ["Count.", "two"]
    talking.take("/undo")
    assert said(talking) == []
    talking.take("Count.")
    talking.take("/reset")
    assert said(talking) == []


def test_what_fails_is_taken_back_and_the_talk_goes_on(talk):
    talking = talk(QueueFull("Busy."), "Yes.")
    talking.take("Is it?")
    assert talking.shown[-1] == "Busy. The question was taken back."
    talking.take("Is it?")
    assert said(talking) == ["Is it?", "Yes."]


def test_settings_and_system(talk):
    talking = talk("Yes.")
    talking.take("/set temperature 0.2")
    assert talking.shown[-1] == "temperature is 0.2"
    talking.take("/set")
    assert talking.shown[-1] == "temperature 0.2"
    talking.take("/set temperature=x")
    assert talking.shown[-1] == "`temperature` must be a finite number; got 'x'."
    talking.take("/set temperature = 0.3")
    assert talking.shown[-1] == "temperature is 0.3"
    talking.take("/set temperature")
    assert talking.conversation.options == {}
    talking.take("/system Be short.")
    assert talking.shown[-1] == "The model is told: Be short."
    talking.take("/system -")
    assert talking.conversation.system == ""


def test_files_of_others_are_not_overwritten(talk, tmp_path):
    talking = talk("Yes.")
    other = tmp_path / "other.json"
    other.write_text("precious")
    talking.take(f"/save {other}")
    assert "choose another name" in talking.shown[-1]
    assert other.read_text() == "precious"
    talking.take("Is it?")
    talking.take(f"/save {tmp_path}/talk.json")
    talking.take("And it?")
    talking.take(f"/save {tmp_path}/talk.json")
    assert talking.shown[-1] == f"Saved to {tmp_path}/talk.json, 2 questions."
    talking.take("/reset")
    talking.take(f"/load {tmp_path}/talk.json")
    assert said(talking) == ["Is it?", "Yes.", "And it?", "Yes."]


def test_help_lists_each_command_and_others_are_refused(talk):
    talking = talk("Yes.")
    talking.take("/help")
    assert all(f"/{name}" in talking.shown[0] for name in COMMANDS)
    talking.take("/halp")
    assert talking.shown[-1] == "There is no /halp. /help lists what there is."
    assert said(talking) == []
    talking.take("/exit")
    assert talking.over


# The program


def test_one_question_from_the_command_line(run, address, pictures):
    result = run("chat", "--api-base", address("A red circle."), "--image", pictures / "circle.png", "What is it?")
    assert (result.stdout, result.exit_code) == ("A red circle.\n", 0)


def test_the_whole_input_as_one_question(run, address):
    result = run("chat", "--api-base", address("Yes."), "--json", "-", input="one\n/exit\n")
    assert [json.loads(line)["question"] for line in result.stdout.splitlines()] == ["one\n/exit"]


def test_a_question_per_line_of_one_conversation_and_no_commands(run, address, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("chat", "--api-base", address("one", "two"), input="first\n\n/save x\n")
    assert result.stdout == "one\ntwo\n"
    assert not Path("x").exists()


def test_answers_as_json(run, address):
    answer = json.loads(run("chat", "--api-base", address("one"), "--json", "--set", "temperature=0", "Count.").stdout)
    assert (answer["question"], answer["answer"], answer["finish_reason"]) == ("Count.", "one", "stop")
    assert answer["usage"]["completion_tokens"] > 0
    assert answer["seconds_to_first_token"] > 0


def test_what_fails_is_told_and_the_exit_code_says_so(run, address):
    result = run("chat", "--api-base", address(QueueFull("Busy."), "Yes."), "--json", input="one\ntwo\n")
    first, second = map(json.loads, result.stdout.splitlines())
    assert first["error"] == {"message": "Busy.", "param": None, "code": "queue_full"}
    assert (second["answer"], result.exit_code) == ("Yes.", 1)
    result = run("chat", "--api-base", address(QueueFull("Busy.")), "one")
    assert (result.exit_code, result.stderr) == (1, "dashinfer-vlm: Busy.\n")


def test_options_of_an_engine_here_do_not_go_with_a_server(run, address):
    with pytest.raises(ConfigError, match="`--max-pixels` is for an engine in this process"):
        run("chat", "--api-base", address("Yes."), "--max-pixels", "100352", "Is it?")


@pytest.mark.slow
def test_a_model_in_this_process(pictures):
    ended = process("chat", "--set", "temperature=0", "--image", pictures / "circle.png", "Describe the picture.")
    assert (ended.stdout, ended.stderr, ended.returncode) == ("A red circle.\n", "Loading demo ...\n", 0)


@pytest.mark.slow
def test_a_server_that_is_not_there_is_said_to_be_so():
    ended = process("chat", "--api-base", "http://127.0.0.1:9/v1", "Is it?")
    assert ended.returncode == 2
    assert ended.stderr.startswith("dashinfer-vlm: http://127.0.0.1:9/v1: The server cannot be reached")


WITHOUT_ITS_EXTRA = (
    "import importlib.util as u, sys; find = u.find_spec\n"
    "u.find_spec = lambda name, *a: None if name in ('prompt_toolkit', 'rich') else find(name, *a)\n"
    "sys.modules.update({'prompt_toolkit': None, 'rich': None})\n" + MAIN
)


@pytest.mark.slow
@pytest.mark.parametrize("program", [MAIN, WITHOUT_ITS_EXTRA], ids=["with its extra", "without"])
def test_ctrl_c_stops_an_answer_and_not_the_program(terminal, address, program):
    url = address("Counting on and on and on. " * 50, "Short.", delay=0.05)
    chat = terminal("chat", "--api-base", url, program=program)
    chat.see("Ctrl-D ends.")
    chat.see(">")
    chat.type("Count.\r")
    chat.see("on and on")
    chat.type("\x03")
    chat.see("Stopped. ")
    chat.see(">")
    chat.type("And now?\r")
    chat.see("Short.")
    chat.see("tokens/s")
    chat.see(">")
    chat.type("half a line\x03")
    chat.insist("/help\r", "end; so does Ctrl-D")
    chat.see(">")
    chat.type("\x04")
    assert chat.ended() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "forbidden"),
    [({"TERM": "dumb"}, r"\x1b"), ({"NO_COLOR": "1"}, r"\x1b\[[1-9][0-9;]*m"), ({"TERM": "xterm"}, r"\x1b\[2m")],
    ids=["dumb", "no colour", "able"],
)
def test_escapes_and_colours_are_for_terminals_that_can(terminal, address, environment, forbidden):
    chat = terminal("chat", "--api-base", address("Yes."), **environment)
    shown = chat.see("Ctrl-D ends.") + chat.see(">")
    chat.type("Is it?\r")
    shown += chat.see("tokens/s") + chat.see(">")
    chat.type("/exit\r")
    assert chat.ended() == 0
    assert (re.search(forbidden, shown + chat.seen) is None) == (environment != {"TERM": "xterm"})


@pytest.mark.slow
def test_lines_are_remembered(terminal, address, tmp_path):
    chat = terminal("chat", "--api-base", address("Yes."))
    chat.see(">")
    chat.type("Is it?\r")
    chat.see("tokens/s")
    chat.see(">")
    chat.type("/exit\r")
    assert chat.ended() == 0
    history = tmp_path / "dashinfer-vlm" / "chat_history"
    assert "+Is it?" in history.read_text().splitlines()
    assert history.stat().st_mode & 0o077 == 0
