"""`chat`: media in prompts, conversations, REPL commands, and the program in a terminal and behind a pipe."""

from __future__ import annotations

import base64
import io
import json
import re
import struct
from pathlib import Path

import pytest
from openai.types.chat import ChatCompletionChunk
from PIL import Image

from dashinfer_vlm_cli.chat import chat
from dashinfer_vlm_cli.completion_stats import Completion
from dashinfer_vlm_cli.conversation import Conversation
from dashinfer_vlm_cli.engines import EngineSource
from dashinfer_vlm_cli.line_reader import line_reader
from dashinfer_vlm_cli.media import clipboard_part, find_media, media_part
from dashinfer_vlm_cli.repl import COMMANDS, Repl
from dashinfer_vlm_cli.run import run as run_command
from dashinfer_vlm_core.cli.terminal import printable
from dashinfer_vlm_core.errors import (
    ConfigError,
    InvalidParameter,
    MediaError,
    MediaUndecodable,
    MediaUnreachable,
    MissingDependency,
    QueueFull,
)
from dashinfer_vlm_core.testing import scripted_engine
from tests.cli.conftest import MAIN, run_process
from tests.core.test_reasoning import TEMPLATE
from tests.pdfs import document
from tests.samples import data_url, encode, noise

BITMAP = encode(noise(4, 4), "BMP")
BOMB = BITMAP[:18] + struct.pack("<ii", 20_000, 16_000) + BITMAP[26:]
REASONED = "It has wheels.\n</think>\n\nA car."


def text_of(content):
    return content if isinstance(content, str) else content[-1]["text"]


# Media in prompts


def test_media_part_embeds_file_as_data_url(images):
    part = media_part("image", str(images / "circle.png"))
    assert part["image_url"]["url"] == data_url((images / "circle.png").read_bytes())
    part = media_part("video", str(images / "moving.mp4"))
    assert part["video_url"]["url"].startswith("data:video/mp4;base64,")


def test_media_part_keeps_url():
    assert media_part("image", "https://example.com/x")["image_url"]["url"] == "https://example.com/x"


def test_media_part_reports_missing_file():
    for name in ("none.png", "~none.png"):  # the latter is not of a user of this name
        with pytest.raises(MediaUnreachable, match=rf"^{name} cannot be read: No such file"):
            media_part("image", name)


@pytest.mark.parametrize(
    ("data", "problem"), [(b"", "has 0 bytes"), (b"words", "is not a complete PNG"), (BOMB, "20000 x 16000 pixels")]
)
def test_media_part_names_file_that_is_no_image(tmp_path, data, problem):
    (tmp_path / "notes.png").write_bytes(data)
    with pytest.raises(MediaError, match=rf"notes\.png.* {problem}"):
        media_part("image", str(tmp_path / "notes.png"))


@pytest.mark.parametrize("written", ["'{path}'", '"{path}"', "{escaped}", "file://{quoted}"])
def test_find_media_handles_quoting_of_dropped_files(tmp_path, images, written):
    path = tmp_path / "my picture.png"
    path.write_bytes((images / "circle.png").read_bytes())
    word = written.format(path=path, escaped=str(path).replace(" ", "\\ "), quoted=str(path).replace(" ", "%20"))
    text, parts = find_media(f"What is in {word} here?")
    assert text == "What is in here?"
    assert [part["type"] for part in parts] == ["image_url"]


def test_find_media_finds_images_videos_and_documents(tmp_path, images):
    (tmp_path / "A.PDF").write_bytes(b"%PDF-")
    words = (
        f"{images}/before.png https://example.com/after.JPG?x=1 {images}/moving.mp4 {tmp_path}/A.PDF http://a/b.pdf ok"
    )
    text, parts = find_media(words)
    assert text == "ok"
    assert [part["type"] for part in parts] == ["image_url", "image_url", "video_url", "file", "file"]
    assert [part["file"] for part in parts[3:]] == [
        {"file_data": "data:application/pdf;base64,JVBERi0="},
        {"file_url": "http://a/b.pdf"},
    ]


@pytest.mark.parametrize(
    "line",
    ["What's in none.png?", "It's 5 o'clock", "see https://example.com/page", "  two  blanks ", "/tmp", "~none.png"],
)
def test_find_media_keeps_other_lines_unchanged(line):
    assert find_media(line) == (line, [])


@pytest.fixture
def clipboard(tmp_path, monkeypatch):
    """Replace the program that reads the clipboard."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("DISPLAY", raising=False)

    def install(script):
        (tmp_path / "wl-paste").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "wl-paste").chmod(0o755)

    return install


def test_clipboard_image_becomes_png_part(clipboard, images):
    clipboard(f"exec /bin/cat {images}/circle.png")
    data = clipboard_part()["image_url"]["url"].removeprefix("data:image/png;base64,")
    with Image.open(io.BytesIO(base64.b64decode(data))) as pasted, Image.open(images / "circle.png") as original:
        assert pasted.convert("RGB").tobytes() == original.convert("RGB").tobytes()


def test_clipboard_without_image_is_rejected(clipboard):
    clipboard("echo 'Nothing is copied' >&2; exit 1")
    with pytest.raises(MediaUndecodable, match="no image in the clipboard"):
        clipboard_part()


def test_clipboard_without_tool_names_package(clipboard):
    with pytest.raises(MissingDependency, match="Install wl-clipboard"):
        clipboard_part()
    clipboard("echo 'no display' >&2; exit 1")
    with pytest.raises(MissingDependency, match="Install wl-clipboard"):
        clipboard_part()


def test_printable_removes_escape_sequences():
    assert printable("a\x1b[31mred\x1b]0;title\x07\n\tb\x9b") == "a[31mred]0;title\n\tb"


# Conversations


def test_attachments_go_before_next_prompt():
    conversation = Conversation()
    conversation.attachments.append({"type": "image_url", "image_url": {"url": "data:,"}})
    conversation.add_user("What is this?")
    conversation.add_assistant("A circle.")
    conversation.add_user("And its color?")
    assert [part["type"] for part in conversation.messages[0]["content"]] == ["image_url", "text"]
    assert conversation.messages[2]["content"] == "And its color?"


def test_undo_removes_prompt_and_retry_removes_response():
    conversation = Conversation()
    assert not conversation.undo()
    assert not conversation.retry()
    conversation.add_user("one")
    conversation.add_assistant("1")
    conversation.add_user("two")
    conversation.add_assistant("2")
    assert conversation.retry()
    assert [message["content"] for message in conversation.messages] == ["one", "1", "two"]
    assert conversation.undo()
    assert [message["content"] for message in conversation.messages] == ["one", "1"]


def test_system_prompt_is_first_and_survives_reset():
    conversation = Conversation()
    conversation.add_user("one")
    conversation.set_system("Be short.")
    assert conversation.messages[0] == {"role": "system", "content": "Be short."}
    conversation.reset()
    assert (conversation.system, conversation.num_prompts) == ("Be short.", 0)
    conversation.set_system("")
    assert conversation.messages == []


def test_options_are_validated_when_set():
    conversation = Conversation()
    assert conversation.set("temperature", "0.2") == 0.2
    assert conversation.set("stop", "END") == "END"
    assert conversation.set("stop", '["a", "b"]') == ["a", "b"]
    with pytest.raises(InvalidParameter, match="`temperature` must be at most 2"):
        conversation.set("temperature", "9")
    with pytest.raises(InvalidParameter, match="Did you mean `temperature`"):
        conversation.set("temprature", "1")
    with pytest.raises(InvalidParameter, match="Did you mean `max_tokens` or `min_tokens`"):
        conversation.set("ma_tokens", "1")
    with pytest.raises(InvalidParameter, match="`temperature` must be a finite number; got 'x'"):
        conversation.set("temperature", "x")
    with pytest.raises(InvalidParameter, match="`stop` must have at most 256 characters"):
        conversation.set("stop", "[" * 100_000 + "]" * 100_000)
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"properties": 5}}}
    with pytest.raises(InvalidParameter, match=r"`response_format\.json_schema\.schema`"):
        conversation.set("response_format", json.dumps(schema))
    with pytest.raises(InvalidParameter, match="Unknown request field `stream`"):
        conversation.set("stream", "true")
    conversation.set("stop", "")
    assert conversation.options == {"temperature": 0.2}


def test_set_model_selects_lora():
    conversation = Conversation()
    conversation.set("model", "sql")
    assert conversation.request["model"] == "sql"


@pytest.mark.parametrize("written", ["temperature", "temperature 0.2", ""])
def test_set_option_without_value_is_rejected(run, written):
    with pytest.raises(ConfigError, match=r"has no value\. Write --set NAME=VALUE"):
        run("chat", "--api-base", "http://127.0.0.1:9/v1", "--set", written, "x")


def test_invalid_option_is_rejected_before_loading(run):
    with pytest.raises(InvalidParameter, match="`temperature` must be a finite number; got 'x'"):
        run("chat", "--model", "/none", "--set", "temperature=x", "Is it?")


def test_conversation_roundtrips_through_file_with_images(tmp_path, images):
    conversation = Conversation()
    conversation.set_system("Be short.")
    conversation.set("temperature", "0")
    conversation.attachments.append(media_part("image", str(images / "circle.png")))
    conversation.add_user("Grüße?")
    conversation.add_assistant("A circle.")
    conversation.save(tmp_path / "talk.json")
    again = Conversation.load(tmp_path / "talk.json")
    assert (again.messages, again.options) == (conversation.messages, conversation.options)
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]


@pytest.mark.parametrize("text", ["no json", "[]", "{}", '{"messages": [{"role": "nobody", "content": ""}]}'])
def test_load_rejects_invalid_conversation(tmp_path, text):
    (tmp_path / "talk.json").write_text(text)
    with pytest.raises(InvalidParameter):
        Conversation.load(tmp_path / "talk.json")


# REPL


@pytest.fixture
def thinking(tmp_path):
    """A chat template whose prompts end with `<think>`."""
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    return path


@pytest.fixture
def repl(tiny_checkpoint):
    """Return a Repl with scripted responses: `repl("Yes.").handle("Is it?")`; `shown` is its output."""
    engines = []

    def start(*responses, **options):
        engines.append(scripted_engine(*responses, model=str(tiny_checkpoint), **options).start())
        shown: list[str] = []
        reasoning: list[str] = []
        started = Repl(
            engine=engines[-1],
            conversation=Conversation(),
            write=shown.append,
            write_reasoning=reasoning.append,
            notify=shown.append,
        )
        started.shown, started.reasoning = shown, reasoning
        return started

    yield start
    for engine in engines:
        engine.close()


def message_texts(repl):
    return [text_of(message["content"]) for message in repl.conversation.messages]


def test_repl_shows_response_and_rates(repl):
    session = repl("A red circle.")
    session.handle("What is this?")
    assert message_texts(session) == ["What is this?", "A red circle."]
    assert "".join(session.shown).startswith("A red circle.\n")
    assert re.fullmatch(r"\d+ tokens, first after [\d.]+ s(, [\d.]+ tokens/s)?, prompt \d+ tokens", session.shown[-1])


@pytest.mark.parametrize(
    ("chunk_times", "text"),
    [
        ([1.0], "1 token, first after 1.00 s"),
        ([1.0, 1.04], "2 tokens, first after 1.00 s"),
        ([1.0, 1.01, 1.05], "3 tokens, first after 1.00 s, 40.0 tokens/s"),
        ([], "0 tokens"),
    ],
)
def test_rate_needs_50_milliseconds(chunk_times, text):
    completion = Completion(started_at=0.0, chunk_times=chunk_times)
    assert completion.as_text() == text
    assert (completion.as_json()["tokens_per_second"] is None) == ("tokens/s" not in text)


def test_tokens_of_reasoning_and_calls_are_timed():
    call = {"index": 0, "function": {"arguments": "{}"}}
    deltas = [{"role": "assistant"}, {"reasoning_content": "Hm."}, {"content": "Yes."}, {"tool_calls": [call]}]
    completion = Completion(started_at=0.0)
    for now, delta in enumerate(deltas):
        choice = {"index": 0, "delta": delta, "finish_reason": None}
        chunk = {"id": "1", "choices": [choice], "created": 0, "model": "m", "object": "chat.completion.chunk"}
        completion.add_chunk(ChatCompletionChunk.model_validate(chunk), now)
    assert (completion.text, completion.chunk_times) == ("Yes.", [1, 2, 3])


def test_repl_shows_reasoning_and_that_a_response_was_cut(repl, thinking):
    session = repl(REASONED, chat_template=thinking)
    session.handle("What is it?")
    assert "".join(session.reasoning) == "It has wheels.\n\n"
    assert "".join(session.shown).startswith("A car.\n")
    session.handle("/set max_tokens 3")
    session.handle("And now?")
    warning = "The response was cut after 3 tokens. Set a higher `max_tokens`."
    assert session.shown[-1] == f"{warning} The prompt was removed."
    assert message_texts(session) == ["What is it?", "A car."]


def test_repl_attaches_image_to_next_prompt(repl, images):
    session = repl("A red circle.")
    session.handle(f"{images}/circle.png")
    assert session.shown == ["Attached to the next prompt: image."]
    session.handle("What is this?")
    assert [part["type"] for part in session.conversation.messages[0]["content"]] == ["image_url", "text"]
    assert "for images" in session.shown[-1]


def test_repl_image_and_video_commands(repl, images):
    session = repl("Yes.")
    session.handle(f"/image '{images}/circle.png'")
    assert session.shown[-1] == "Attached to the next prompt: image."
    session.handle("/video https://example.com/clip")
    assert session.shown[-1] == "Attached to the next prompt: image, video."
    session.handle("/file https://example.com/a")
    assert session.shown[-1] == "Attached to the next prompt: image, video, file."
    session.handle("/image")
    assert session.shown[-1] == "Usage: /image PATH or URL"
    session.handle("/image none.png")
    assert "none.png cannot be read" in session.shown[-1]


def test_repl_checks_files_that_are_attached(repl, tmp_path, images):
    session = repl("Yes.")
    text = tmp_path / "README.md"
    text.write_text("# Not an image")
    incomplete = tmp_path / "incomplete.png"
    incomplete.write_bytes((images / "circle.png").read_bytes()[:-100])
    for line, message in (
        (f"/image {text}", f"{text}: This is not a complete PNG, JPEG"),
        (f"/video {text}", f"{text}: The video is incomplete or its format is not supported"),
        (f"/image {images}/moving.mp4", f"{images}/moving.mp4: This is not a complete PNG"),
        (f"{incomplete} What is it?", f"{incomplete}: This is not a complete PNG"),
        (str(incomplete), f"{incomplete}: This is not a complete PNG"),
    ):
        session.handle(line)
        assert session.shown[-1].startswith(message)
    assert session.conversation == Conversation()


def test_repl_undo_retry_and_reset(repl):
    session = repl("one", "two", "three")
    session.handle("/retry")
    assert session.shown == ["There is no prompt yet."]
    session.handle("Count.")
    session.handle("/retry")
    assert message_texts(session) == ["Count.", "two"]
    session.handle("/undo")
    assert message_texts(session) == []
    session.handle("Count.")
    session.handle("/reset")
    assert message_texts(session) == []


def test_repl_removes_failed_prompt_and_continues(repl):
    session = repl(QueueFull("Busy."), "Yes.")
    session.handle("Is it?")
    assert session.shown[-1] == "Busy. The prompt was removed."
    session.handle("Is it?")
    assert message_texts(session) == ["Is it?", "Yes."]


def test_repl_set_and_system_commands(repl):
    session = repl("Yes.")
    session.handle("/set temperature 0.2")
    assert session.shown[-1] == "temperature is 0.2"
    session.handle("/set")
    assert session.shown[-1] == "temperature 0.2"
    session.handle("/set temperature=x")
    assert session.shown[-1] == "`temperature` must be a finite number; got 'x'."
    session.handle("/set temperature = 0.3")
    assert session.shown[-1] == "temperature is 0.3"
    session.handle("/set temperature")
    assert session.conversation.options == {}
    session.handle("/system Be short.")
    assert session.shown[-1] == "System prompt: Be short."
    session.handle("/system -")
    assert session.conversation.system == ""


def test_repl_save_does_not_overwrite_other_files(repl, tmp_path):
    session = repl("Yes.")
    other = tmp_path / "other.json"
    other.write_text("precious")
    session.handle(f"/save {other}")
    assert "Choose another name" in session.shown[-1]
    assert other.read_text() == "precious"
    session.handle("Is it?")
    session.handle(f"/save {tmp_path}/talk.json")
    assert session.shown[-1] == f"Saved to {tmp_path}/talk.json, 1 prompt."
    session.handle("And it?")
    session.handle(f"/save {tmp_path}/talk.json")
    assert session.shown[-1] == f"Saved to {tmp_path}/talk.json, 2 prompts."
    session.handle("/reset")
    session.handle(f"/load {tmp_path}/talk.json")
    assert message_texts(session) == ["Is it?", "Yes.", "And it?", "Yes."]
    session.handle("/load ~none.json")
    assert session.shown[-1] == "~none.json: No such file or directory."


def test_repl_help_lists_commands_and_unknown_is_rejected(repl):
    session = repl("Yes.")
    session.handle("/help")
    assert all(f"/{name}" in session.shown[0] for name in COMMANDS)
    session.handle("/halp")
    assert session.shown[-1] == "Unknown command /halp. /help lists all commands."
    assert message_texts(session) == []


@pytest.mark.parametrize("line", ["/exit", "/bye", "/quit", "exit", " quit "])
def test_repl_ends(repl, line):
    session = repl("Yes.")
    session.handle(line)
    assert session.done
    assert message_texts(session) == []


# The program


def test_single_prompt_with_image(run, server_url, images):
    result = run("chat", "--api-base", server_url("A red circle."), "--image", images / "circle.png", "What is it?")
    assert (result.stdout, result.exit_code) == ("A red circle.\n", 0)


def test_single_prompt_with_document(run, server_url, tmp_path):
    (tmp_path / "report.pdf").write_bytes(document("One", "Two", size=(84, 84)))
    url = server_url(lambda request: f"{len(request.spans)} pages.")
    result = run("chat", "--api-base", url, "--file", tmp_path / "report.pdf", "What is it?")
    assert (result.stdout, result.exit_code) == ("2 pages.\n", 0)


@pytest.mark.parametrize(
    ("words", "model", "prompt"),
    [
        (["demo"], "demo", None),
        (["CHECKPOINT"], "CHECKPOINT", None),
        (["demo", "demo"], "demo", "demo"),
        (["maker/model", "Is it?"], "maker/model", "Is it?"),
        (["Is it?", "--model", "demo"], "demo", "Is it?"),
        (["demonstration"], None, "demonstration"),
        (["-"], None, "-"),
        ([""], None, ""),
        (["~nobody"], None, "~nobody"),
        (["long" * 1000], None, "long" * 1000),
        ([], None, None),
    ],
)
def test_single_argument_is_model_or_prompt(tiny_checkpoint, monkeypatch, words, model, prompt):
    monkeypatch.chdir(tiny_checkpoint)
    given = [str(tiny_checkpoint) if word == "CHECKPOINT" else word for word in words]
    with chat.make_context("chat", given) as context:
        found = (context.params["model"], context.params["prompt"])
    assert found == (str(tiny_checkpoint) if model == "CHECKPOINT" else model, prompt)


def test_model_of_server_is_selected_by_argument(run, server_url):
    url = server_url("Yes.")
    assert run("chat", "--api-base", url, "tiny", "Is it?").stdout == "Yes.\n"
    assert "'other' is not served here" in run("chat", "--api-base", url, "other", "Is it?").stderr


def test_dash_reads_standard_input_as_one_prompt(run, server_url):
    result = run("chat", "--api-base", server_url("Yes."), "--json", "-", input="one\n/exit\n")
    assert [json.loads(line)["prompt"] for line in result.stdout.splitlines()] == ["one\n/exit"]


def test_piped_lines_are_prompts_and_not_commands(run, server_url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("chat", "--api-base", server_url("one", "two"), input="first\n\n/save x\n")
    assert result.stdout == "one\ntwo\n"
    assert not Path("x").exists()


def test_json_output_has_response_and_usage(run, server_url):
    line = json.loads(run("chat", "--api-base", server_url("one"), "--json", "--set", "temperature=0", "Count.").stdout)
    assert (line["prompt"], line["response"], line["finish_reason"]) == ("Count.", "one", "stop")
    assert line["usage"]["completion_tokens"] > 0
    assert line["seconds_to_first_token"] > 0


@pytest.mark.parametrize(("arguments", "text"), [(["demo"], "\n"), (["demo", "-"], " \n"), ([], "")])
@pytest.mark.parametrize("command", ["chat", "run"])
def test_input_without_prompt_is_an_error_before_a_model_is_loaded(run, monkeypatch, command, arguments, text):
    monkeypatch.setattr(EngineSource, "open", lambda _: pytest.fail("the model was loaded"))
    result = run(command, *arguments, input=text)
    assert result.exit_code == 2
    assert f'Standard input has no prompt. Pass one, as in dashinfer-vlm {command} demo "' in result.stderr


@pytest.mark.parametrize(
    ("word", "model"), [("Is it?", None), ("demo", "demo"), ("maker/model", "maker/model"), ("dmeo", "dmeo")]
)
def test_single_argument_of_run_with_spaces_is_a_prompt(word, model):
    with run_command.make_context("run", [word]) as context:
        assert (context.params["model"], context.params["prompt"]) == (model, None if model else word)


def test_failed_prompt_is_reported_and_sets_exit_code(run, server_url):
    result = run("chat", "--api-base", server_url(QueueFull("Busy."), "Yes."), "--json", input="one\ntwo\n")
    first, second = map(json.loads, result.stdout.splitlines())
    assert first["error"] == {"message": "Busy.", "param": None, "code": "queue_full"}
    assert (first["prompt"], second["response"], result.exit_code) == ("one", "Yes.", 1)
    result = run("chat", "--api-base", server_url(QueueFull("Busy.")), "one")
    assert (result.exit_code, result.stderr) == (1, "dashinfer-vlm: Busy.\n")


def test_response_without_text_sets_exit_code(run, server_url, thinking):
    url = server_url(REASONED, chat_template=thinking)
    result = run("chat", "--api-base", url, "--set", "max_tokens=3", "What is it?")
    warning = "dashinfer-vlm: The response was cut after 3 tokens. Set a higher `max_tokens`.\n"
    assert (result.stdout, result.stderr, result.exit_code) == ("\n", warning, 1)


def test_engine_option_with_api_base_is_rejected(run, server_url):
    with pytest.raises(ConfigError, match="`--max-pixels` configures an engine in this process"):
        run("chat", "--api-base", server_url("Yes."), "--max-pixels", "100352", "Is it?")


@pytest.mark.slow
def test_bundled_model_in_process(images):
    result = run_process("chat", "--set", "temperature=0", "--image", images / "circle.png", "Describe the picture.")
    assert (result.stdout, result.returncode) == ("A red circle.\n", 0)
    assert " dashinfer_vlm_core.progress: Loading demo ...\n" in result.stderr
    assert re.search(r"^(\S+ \S+ INFO dashinfer_vlm_core\.progress: Loading .*\n)+$", result.stderr)


LOADING = """
import threading
from dashinfer_vlm_core.progress import Progress, show_progress
with show_progress("Loading demo"), Progress(total=2, desc="Loading layers", unit="") as bar:
    bar.update()
    threading.Event().wait()
"""


@pytest.mark.slow
def test_terminal_shows_a_bar_of_what_is_loaded(terminal):
    shown = terminal(program=LOADING).wait_for(" 1/2 [")
    assert re.fullmatch(r"\rLoading layers:  50%\|.+\| 1/2 \[", shown)


def test_unwritable_cache_is_reported_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    for _ in range(2):
        line_reader(tmp_path / "file", [])
    (message,) = caplog.messages
    problem = f"The cache folder {tmp_path / 'file'} cannot be written to: File exists."
    assert message.startswith(f"Prompts are not stored for later. {problem}")
    assert "`export DASHINFER_VLM_CACHE_DIR=FOLDER`" in caplog.text


@pytest.mark.slow
def test_unreachable_server_is_reported():
    result = run_process("chat", "--api-base", "http://127.0.0.1:9/v1", "Is it?")
    assert result.returncode == 2
    assert result.stderr.startswith("dashinfer-vlm: http://127.0.0.1:9/v1: The server cannot be reached")
    assert "that a server such as `dashinfer-vlm serve` is running there" in result.stderr


WITHOUT_EXTRA = (
    "import importlib.util as u, sys; find = u.find_spec\n"
    "u.find_spec = lambda name, *a: None if name == 'prompt_toolkit' else find(name, *a)\n"
    "sys.modules.update({'prompt_toolkit': None})\n" + MAIN
)


@pytest.mark.slow
@pytest.mark.parametrize("program", [MAIN, WITHOUT_EXTRA], ids=["with extra", "without extra"])
def test_ctrl_c_stops_response_but_not_program(terminal, server_url, program):
    url = server_url("Counting on and on and on. " * 50, "Short.", delay=0.05)
    chat = terminal("chat", "--api-base", url, program=program)
    chat.wait_for("Ctrl-D exits.")
    chat.wait_for(">")
    chat.type("Count.\r")
    chat.wait_for("on and on")
    chat.type("\x03")
    chat.wait_for("Stopped. ")
    chat.wait_for(">")
    chat.type("And now?\r")
    chat.wait_for("Short.")
    chat.wait_for("first after")
    chat.wait_for(">")
    chat.type("half a line\x03")
    chat.type_until("/help\r", "Ctrl-C stops a response")
    chat.wait_for(">")
    chat.type("\x04")
    assert chat.wait() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "forbidden"),
    [({"TERM": "dumb"}, r"\x1b"), ({"NO_COLOR": "1"}, r"\x1b\[[1-9][0-9;]*m"), ({"TERM": "xterm"}, r"\x1b\[2m")],
    ids=["dumb", "no color", "color"],
)
def test_colors_require_capable_terminal(terminal, server_url, environment, forbidden):
    chat = terminal("chat", "--api-base", server_url("Yes."), **environment)
    shown = chat.wait_for("Ctrl-D exits.") + chat.wait_for(">")
    chat.type("Is it?\r")
    shown += chat.wait_for("first after") + chat.wait_for(">")
    chat.type("/exit\r")
    assert chat.wait() == 0
    assert (re.search(forbidden, shown + chat.output) is None) == (environment != {"TERM": "xterm"})


@pytest.mark.slow
def test_prompt_history_is_stored_privately(terminal, server_url, tmp_path):
    chat = terminal("chat", "--api-base", server_url("Yes."))
    chat.wait_for(">")
    chat.type("Is it?\r")
    chat.wait_for("first after")
    chat.wait_for(">")
    chat.type("/exit\r")
    assert chat.wait() == 0
    history = tmp_path / "dashinfer-vlm" / "chat_history"
    assert "+Is it?" in history.read_text().splitlines()
    assert history.stat().st_mode & 0o077 == 0
