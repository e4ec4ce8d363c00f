"""`dashinfer-vlm chat`."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from dashinfer_vlm_core.cli.command import EngineCommand
from dashinfer_vlm_core.cli.options import MODEL_ARGUMENT, ModelArgument, model_names
from dashinfer_vlm_core.cli.terminal import printable, show_note, show_reasoning
from dashinfer_vlm_core.config.folders import expand_user
from dashinfer_vlm_core.errors import ConfigError, DashInferVLMError

from .completion_stats import Completion, complete
from .conversation import Conversation
from .engines import EngineSource, engine_source_options
from .media import media_part

if TYPE_CHECKING:
    from .engines import AnyEngine

STANDARD_INPUT = "-"


class ChatCommand(EngineCommand):
    """A command whose only argument is a prompt, unless it is a model."""

    def use_model_argument(self, ctx: click.Context) -> None:
        only = ctx.params[MODEL_ARGUMENT]
        if only is not None and ctx.params["prompt"] is None and not self.is_model(only):
            ctx.params.update({MODEL_ARGUMENT: None, "prompt": only})
        super().use_model_argument(ctx)

    def is_model(self, text: str) -> bool:
        """Return whether a single argument is MODEL."""
        with contextlib.suppress(OSError):  # a long text is not a path
            if text and (expand_user(text) / "config.json").is_file():
                return True
        return len(text.split()) == 1 and text in model_names()


@click.command(cls=ChatCommand, params=[ModelArgument()])
@click.argument("prompt", required=False)
@click.option("--image", "images", multiple=True, metavar="PATH|URL", help="Image for the first prompt; repeatable.")
@click.option("--video", "videos", multiple=True, metavar="PATH|URL", help="Video for the first prompt; repeatable.")
@click.option("--file", "files", multiple=True, metavar="PATH|URL", help="PDF for the first prompt; repeatable.")
@click.option("--system", default="", metavar="TEXT", help="System prompt.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE",
              help="Request field, such as temperature=0; repeatable.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print each response as a line of JSON.")
@engine_source_options
def chat(
    *,
    prompt: str | None,
    images: tuple[str, ...],
    videos: tuple[str, ...],
    files: tuple[str, ...],
    system: str,
    settings: tuple[str, ...],
    as_json: bool,
    source: EngineSource,
) -> None:
    """Chat with a model about images, videos and documents.

    With PROMPT, send that prompt; `-` reads it from standard input. Without PROMPT, start a conversation if standard
    input is a terminal (/help lists its commands), and read one prompt per line otherwise. A single argument is MODEL
    if it is a model on this machine: a registered name, a checkpoint folder, or a downloaded one.
    """
    conversation = Conversation()
    conversation.set_system(system)
    for setting in settings:
        _set(conversation, setting)
    conversation.attachments += [media_part("image", item) for item in images]
    conversation.attachments += [media_part("video", item) for item in videos]
    conversation.attachments += [media_part("file", item) for item in files]
    at_terminal = prompt is None and not as_json and sys.stdin.isatty() and sys.stdout.isatty()
    if at_terminal:
        with source.open() as engine:
            _converse(engine, conversation, source)
        return
    prompts = _prompts(prompt)
    first = next(prompts, None)  # before the model is loaded, which takes long
    if first is None:
        command = click.get_current_context().info_name
        raise click.UsageError(
            f'Standard input has no prompt. Pass one, as in dashinfer-vlm {command} demo "What is this?".'
        )
    with source.open() as engine:
        succeeded = [
            _complete(engine, conversation, each, as_json=as_json) for each in itertools.chain([first], prompts)
        ]
    if not all(succeeded):
        sys.exit(1)


def _set(conversation: Conversation, setting: str) -> None:
    name, equals, value = setting.partition("=")
    if not equals:
        raise ConfigError(f"`--set {setting}` has no value. Write --set NAME=VALUE, as in --set temperature=0.")
    conversation.set(name.strip(), value.strip())


def _prompts(prompt: str | None) -> Iterator[str]:
    # Commands and paths in lines from standard input are not interpreted.
    if prompt == STANDARD_INPUT:
        yield from filter(None, [sys.stdin.read().strip()])
    elif prompt is not None:
        yield prompt
    else:
        yield from filter(None, (line.strip() for line in sys.stdin))


def _complete(engine: AnyEngine, conversation: Conversation, prompt: str, *, as_json: bool) -> bool:
    conversation.add_user(prompt)
    completion = Completion()
    try:
        complete(engine, conversation.request, completion, None if as_json else _show, show_reasoning)
    except DashInferVLMError as error:
        conversation.undo()
        if as_json:
            details = {"message": error.message, "param": error.param, "code": error.code}
            click.echo(json.dumps({"prompt": prompt, "error": details}))
        else:
            click.echo(f"dashinfer-vlm: {error.message}", err=True)
        return False
    conversation.add_assistant(completion.text)
    click.echo(json.dumps({"prompt": prompt, **completion.as_json()}) if as_json else "")
    if completion.warning and not as_json:
        click.echo(f"dashinfer-vlm: {completion.warning}", err=True)
    return bool(completion.text)


def _show(text: str) -> None:
    click.echo(printable(text) if sys.stdout.isatty() else text, nl=False)


def _converse(engine: AnyEngine, conversation: Conversation, source: EngineSource) -> None:
    from .line_reader import line_reader
    from .repl import COMMANDS, Repl

    repl = Repl(engine=engine, conversation=conversation, write=_show, write_reasoning=show_reasoning, notify=show_note)
    read = line_reader(source.config.cache_folder, [f"/{name}" for name in COMMANDS])
    show_note(
        f"{engine.status().model}: type a prompt, drop images, or type /help. Ctrl-C stops a response, Ctrl-D exits."
    )
    with contextlib.suppress(EOFError):
        while not repl.done:
            with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C while typing discards the line
                repl.handle(read())
