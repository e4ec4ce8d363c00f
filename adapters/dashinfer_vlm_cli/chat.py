"""`dashinfer-vlm chat`."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from dashinfer_vlm_core.cli.terminal import printable, show_aside
from dashinfer_vlm_core.config.config_file import ConfiguredCommand
from dashinfer_vlm_core.errors import ConfigError, DashInferVLMError

from .completion_stats import complete
from .conversation import Conversation
from .engines import EngineSource, engine_options
from .media import media_part

if TYPE_CHECKING:
    from .engines import AnyEngine

WHOLE_INPUT = "-"


@click.command(cls=ConfiguredCommand)
@click.argument("prompt", required=False)
@click.option(
    "--image", "images", multiple=True, metavar="PATH|URL", help="Picture for the first question; repeat it for more."
)
@click.option(
    "--video", "videos", multiple=True, metavar="PATH|URL", help="Video for the first question; repeat it for more."
)
@click.option("--system", default="", metavar="TEXT", help="How the model is to behave.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE",
              help="Option of the requests, such as temperature=0; repeat it for more.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print each answer as a line of JSON.")
@engine_options
def chat(
    *,
    prompt: str | None,
    images: tuple[str, ...],
    videos: tuple[str, ...],
    system: str,
    settings: tuple[str, ...],
    as_json: bool,
    source: EngineSource,
) -> None:
    """Talk with a model about pictures and videos.

    With PROMPT, that one question is answered; `-` takes the whole standard input for it. Without, a terminal opens a
    conversation (/help lists its commands), and anything else is read as one question per line.
    """
    conversation = Conversation()
    conversation.set_system(system)
    for setting in settings:
        _set(conversation, setting)
    for part in [*(media_part("image", item) for item in images), *(media_part("video", item) for item in videos)]:
        conversation.attach(part)
    at_terminal = prompt is None and not as_json and sys.stdin.isatty() and sys.stdout.isatty()
    with source.open() as engine:
        if at_terminal:
            _talk(engine, conversation, source)
        elif not _answer_all(engine, conversation, _questions(prompt), as_json=as_json):
            sys.exit(1)


def _set(conversation: Conversation, setting: str) -> None:
    name, equals, value = setting.partition("=")
    if not equals:
        raise ConfigError(f"`--set {setting}` has no value: write --set NAME=VALUE, as in --set temperature=0.")
    conversation.set(name.strip(), value.strip())


def _questions(prompt: str | None) -> Iterator[str]:
    """What is asked. Lines that come from elsewhere are questions and nothing else: no commands, no paths."""
    if prompt == WHOLE_INPUT:
        yield sys.stdin.read().strip()
    elif prompt is not None:
        yield prompt
    else:
        yield from filter(None, (line.strip() for line in sys.stdin))


def _answer_all(engine: AnyEngine, conversation: Conversation, questions: Iterator[str], *, as_json: bool) -> bool:
    """Answer one question after the other; whether all were."""
    answered = [_answer(engine, conversation, question, as_json=as_json) for question in questions]
    return all(answered)


def _answer(engine: AnyEngine, conversation: Conversation, question: str, *, as_json: bool) -> bool:
    conversation.add_user(question)
    show: Callable[[str], None] = _nothing if as_json else _shown
    try:
        answer = complete(engine, conversation.request, show)
    except DashInferVLMError as error:
        conversation.undo()
        if as_json:
            fault = {"message": error.message, "param": error.param, "code": error.code}
            click.echo(json.dumps({"question": question, "error": fault}))
        else:
            click.echo(f"dashinfer-vlm: {error.message}", err=True)
        return False
    conversation.add_assistant(answer.text)
    click.echo(json.dumps({"question": question, **answer.as_json()}) if as_json else "")
    return True


def _nothing(_: str) -> None:
    """JSON is printed when the answer is whole."""


def _shown(text: str) -> None:
    click.echo(printable(text) if sys.stdout.isatty() else text, nl=False)


def _talk(engine: AnyEngine, conversation: Conversation, source: EngineSource) -> None:
    """A conversation at the terminal, until the person leaves."""
    from .line_reader import line_reader
    from .repl import COMMANDS, Repl

    talk = Repl(engine=engine, conversation=conversation, write=_shown, note=show_aside)
    read = line_reader(source.config.cache_folder, [f"/{name}" for name in COMMANDS])
    show_aside(f"{engine.status().model}: ask, drop pictures, or type /help. Ctrl-C stops an answer, Ctrl-D ends.")
    while not talk.over:
        with contextlib.suppress(KeyboardInterrupt):  # at the prompt: the line is dropped
            talk.take(read())
