"""The interactive chat: it reads lines, and shows responses and status messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dashinfer_vlm_core.cli.terminal import counted
from dashinfer_vlm_core.errors import DashInferVLMError, InvalidParameter

from .completion_stats import Completion, complete
from .conversation import Conversation
from .media import Part, clipboard_part, find_media, local_path, media_part

if TYPE_CHECKING:
    from .engines import AnyEngine

NO_PROMPT = "There is no prompt yet."
EXIT = ("exit", "quit", "/quit", "/bye")
"""Lines that end the chat, as `/exit` does: those of Python, and of other chats."""


@dataclass(kw_only=True)
class Repl:
    """An interactive chat.

    Attributes:
        engine: the engine that completes the conversation.
        conversation: the conversation so far.
        write: shows a part of a response as it streams.
        write_reasoning: the same for its reasoning.
        notify: shows a status or error message.
        files: files that this chat has written or read, which it may overwrite.
        done: whether the user has ended the chat.
    """

    engine: AnyEngine
    conversation: Conversation
    write: Callable[[str], None]
    write_reasoning: Callable[[str], None]
    notify: Callable[[str], None]
    files: set[Path] = field(default_factory=set)
    done: bool = False

    def handle(self, line: str) -> None:
        """Handle a line: a command, or a prompt with paths and URLs of images, videos and PDFs."""
        try:
            self._handle(line.strip())
        except DashInferVLMError as error:
            self.notify(error.message)
        except OSError as error:
            self.notify(f"{error.filename or 'The file'}: {error.strerror or error}.")

    def _handle(self, line: str) -> None:
        name, _, argument = ("/exit" if line in EXIT else line).partition(" ")
        if name[:1] == "/" and name[1:] in COMMANDS:
            COMMANDS[name[1:]].run(self, argument.strip())
            return
        text, parts = find_media(line)
        if text.startswith("/") and not parts:
            self.notify(f"Unknown command {name}. /help lists all commands.")
        elif text:
            self.conversation.add_user(text, parts)
            self._complete()
        elif parts:
            self._attach(*parts)

    def _complete(self) -> None:
        """Complete the conversation. A prompt that fails is removed, so that it does not affect the next one."""
        completion = Completion()
        try:
            complete(self.engine, self.conversation.request, completion, self.write, self.write_reasoning)
        except KeyboardInterrupt:
            self._end(completion, "Stopped.")
        except DashInferVLMError as error:
            self.conversation.undo()
            self.write("\n" if completion.text else "")
            self.notify(f"{error.message} The prompt was removed.")
        else:
            self._end(completion, completion.warning)

    def _end(self, completion: Completion, remark: str) -> None:
        self.conversation.add_assistant(completion.text)
        self.write("\n" if completion.text else "")
        note = completion.as_text() if completion.text else "The prompt was removed."
        self.notify(f"{remark} {note}".lstrip())

    def _attach(self, *parts: Part) -> None:
        self.conversation.attachments += parts
        kinds = [part["type"].partition("_")[0] for part in self.conversation.attachments]
        self.notify(f"Attached to the next prompt: {', '.join(kinds)}.")

    # Commands

    def image(self, argument: str) -> None:
        self._attach(media_part("image", _required(argument, "/image PATH or URL")))

    def video(self, argument: str) -> None:
        self._attach(media_part("video", _required(argument, "/video PATH or URL")))

    def file(self, argument: str) -> None:
        self._attach(media_part("file", _required(argument, "/file PATH or URL")))

    def paste(self, _: str) -> None:
        self._attach(clipboard_part())

    def reset(self, _: str) -> None:
        self.conversation.reset()
        self.notify("The conversation was cleared.")

    def undo(self, _: str) -> None:
        removed = self.conversation.undo()
        self.notify("The last prompt and its response were removed." if removed else NO_PROMPT)

    def retry(self, _: str) -> None:
        if self.conversation.retry():
            self._complete()
        else:
            self.notify(NO_PROMPT)

    def save(self, argument: str) -> None:
        path = local_path(_required(argument, "/save PATH"))
        if path.exists() and path.resolve() not in self.files:
            raise InvalidParameter(f"{path} already exists. Choose another name.")
        self.conversation.save(path)
        self.files.add(path.resolve())
        self.notify(f"Saved to {path}, {counted(self.conversation.num_prompts, 'prompt')}.")

    def load(self, argument: str) -> None:
        path = local_path(_required(argument, "/load PATH"))
        self.conversation = Conversation.load(path)
        self.files.add(path.resolve())
        self.notify(f"Loaded {path}, {counted(self.conversation.num_prompts, 'prompt')}.")

    def system(self, argument: str) -> None:
        if argument:
            self.conversation.set_system("" if argument == "-" else argument)
        self.notify(f"System prompt: {self.conversation.system or 'the default of the chat template'}")

    def set(self, argument: str) -> None:
        if not argument:
            fields = ", ".join(f"{key} {value}" for key, value in self.conversation.options.items())
            self.notify(fields or "none")
            return
        name, text = [*re.split(r"\s*=\s*|\s+", argument, maxsplit=1), ""][:2]  # as in /set and in --set
        value = self.conversation.set(name, text.strip())
        self.notify(f"{name} is {'the default' if value is None else value}")

    def help(self, _: str) -> None:
        self.notify("\n".join(help_lines()))

    def leave(self, _: str) -> None:
        self.done = True


def _required(argument: str, usage: str) -> str:
    """Return the argument of a command without the quotes that terminals put around dropped files."""
    if not argument:
        raise InvalidParameter(f"Usage: {usage}")
    quoted = argument[0] in "'\"" and argument[-1] == argument[0] and len(argument) > 1
    return argument[1:-1] if quoted else argument.replace("\\ ", " ")


class ChatCommand(NamedTuple):
    """A command of the chat; `/help` shows its arguments and its summary."""

    run: Callable[[Repl, str], None]
    arguments: str
    summary: str


COMMANDS: Mapping[str, ChatCommand] = {
    "image": ChatCommand(Repl.image, "PATH|URL", "attach an image to the next prompt"),
    "video": ChatCommand(Repl.video, "PATH|URL", "attach a video to the next prompt"),
    "file": ChatCommand(Repl.file, "PATH|URL", "attach a PDF to the next prompt"),
    "paste": ChatCommand(Repl.paste, "", "attach the image in the clipboard"),
    "retry": ChatCommand(Repl.retry, "", "regenerate the last response"),
    "undo": ChatCommand(Repl.undo, "", "remove the last prompt and its response"),
    "reset": ChatCommand(Repl.reset, "", "clear the conversation"),
    "system": ChatCommand(Repl.system, "[TEXT|-]", "set the system prompt; - removes it"),
    "set": ChatCommand(Repl.set, "[NAME [VALUE]]", "set or unset a request field, such as /set temperature 0"),
    "save": ChatCommand(Repl.save, "PATH", "save the conversation to a file"),
    "load": ChatCommand(Repl.load, "PATH", "load a conversation from a file"),
    "help": ChatCommand(Repl.help, "", "show this help"),
    "exit": ChatCommand(Repl.leave, "", "exit (also exit, quit, /bye or Ctrl-D); Ctrl-C stops a response"),
}


def help_lines() -> Iterator[str]:
    for name, command in COMMANDS.items():
        yield f"{f'/{name} {command.arguments}'.rstrip():22} {command.summary}"
    yield "A prompt may also contain paths and URLs of images, videos and PDFs. To add a path, drop a file here."
