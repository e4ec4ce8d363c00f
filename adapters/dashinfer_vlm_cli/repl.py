"""The talk at a terminal: lines go in, answers and what was done come out."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from dashinfer_vlm_core.errors import DashInferVLMError, InvalidParameter

from .completion_stats import Completion, complete
from .conversation import Conversation
from .media import clipboard_part, find_media, media_part

if TYPE_CHECKING:
    from .engines import AnyEngine


@dataclass(kw_only=True)
class Repl:
    """A conversation with the person at a terminal.

    Attributes:
        engine: what answers.
        conversation: what was said.
        write: shows a piece of an answer, as it comes.
        note: shows a line about what was done, or went wrong.
        files: files that this talk wrote or read: these it may write again.
        over: whether the person has ended it.
    """

    engine: AnyEngine
    conversation: Conversation
    write: Callable[[str], None]
    note: Callable[[str], None]
    files: set[Path] = field(default_factory=set)
    over: bool = False

    def take(self, line: str) -> None:
        """Do what a line says: a command, or a question with the pictures that it names."""
        try:
            self._take(line.strip())
        except DashInferVLMError as error:
            self.note(error.message)
        except OSError as error:
            self.note(f"{error.filename or 'The file'}: {error.strerror or error}.")

    def _take(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        if name[:1] == "/" and name[1:] in COMMANDS:
            return COMMANDS[name[1:]].run(self, argument.strip())
        text, parts = find_media(line)
        for part in parts:
            self.conversation.attach(part)
        if text.startswith("/") and not parts:
            return self.note(f"There is no {name}. /help lists what there is.")
        if text:
            return self._question(text)
        return self._say_what_waits() if parts else None

    def _question(self, text: str) -> None:
        self.conversation.add_user(text)
        self._answer()

    def _answer(self) -> None:
        """Ask what was said last. What fails is taken back, so that it does not weigh on the next question."""
        answer = Completion(started=time.perf_counter())
        try:
            complete(self.engine, self.conversation.request, self.write, into=answer)
        except KeyboardInterrupt:
            self._stopped(answer)
        except DashInferVLMError as error:
            self.conversation.undo()
            self.write("\n" if answer.text else "")
            self.note(f"{error.message} The question was taken back.")
        else:
            self.conversation.add_assistant(answer.text)
            self.write("\n")
            self.note(answer.as_text())

    def _stopped(self, answer: Completion) -> None:
        if not answer.text:
            self.conversation.undo()
            self.note("Stopped; the question was taken back.")
        else:
            self.conversation.add_assistant(answer.text)
            self.write("\n")
            self.note(f"Stopped. {answer.as_text()}")

    def _say_what_waits(self) -> None:
        kinds = [part["type"].partition("_")[0] for part in self.conversation.waiting]
        self.note(f"{' and '.join(kinds)} attached: ask about it.")

    # Commands

    def image(self, argument: str) -> None:
        self.conversation.attach(media_part("image", _needed(argument, "/image PATH or URL")))
        self._say_what_waits()

    def video(self, argument: str) -> None:
        self.conversation.attach(media_part("video", _needed(argument, "/video PATH or URL")))
        self._say_what_waits()

    def paste(self, _: str) -> None:
        self.conversation.attach(clipboard_part())
        self._say_what_waits()

    def reset(self, _: str) -> None:
        self.conversation.reset()
        self.note("Everything that was said is forgotten.")

    def undo(self, _: str) -> None:
        done = self.conversation.undo()
        self.note("The last question and its answer are taken back." if done else "Nothing was asked yet.")

    def retry(self, _: str) -> None:
        if self.conversation.retry():
            self._answer()
        else:
            self.note("Nothing was asked yet.")

    def save(self, argument: str) -> None:
        path = Path(_needed(argument, "/save PATH")).expanduser()
        if path.exists() and path.resolve() not in self.files:
            raise InvalidParameter(f"{path} is there already: choose another name.")
        self.conversation.save(path)
        self.files.add(path.resolve())
        self.note(f"Saved to {path}, {self.conversation.turns} questions.")

    def load(self, argument: str) -> None:
        path = Path(_needed(argument, "/load PATH")).expanduser()
        self.conversation = Conversation.load(path)
        self.files.add(path.resolve())
        self.note(f"Loaded {path}, {self.conversation.turns} questions.")

    def system(self, argument: str) -> None:
        if argument:
            self.conversation.set_system("" if argument == "-" else argument)
        self.note(f"The model is told: {self.conversation.system or 'what its template says'}")

    def set(self, argument: str) -> None:
        if not argument:
            return self.note(", ".join(f"{key} {value}" for key, value in self.conversation.options.items()) or "none")
        name, text = [*re.split(r"\s*=\s*|\s+", argument, maxsplit=1), ""][:2]  # as /set, and as --set have it
        value = self.conversation.set(name, text.strip())
        return self.note(f"{name} is {'what the engine takes by itself' if value is None else value}")

    def help(self, _: str) -> None:
        self.note("\n".join(help_lines()))

    def leave(self, _: str) -> None:
        self.over = True


def _needed(argument: str, usage: str) -> str:
    """An argument of a command, without the quotes that a terminal puts around dropped files."""
    if not argument:
        raise InvalidParameter(f"Write: {usage}")
    quoted = argument[0] in "'\"" and argument[-1] == argument[0] and len(argument) > 1
    return argument[1:-1] if quoted else argument.replace("\\ ", " ")


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command of the talk: what is typed behind its name, what it does, for `/help`."""

    run: Callable[[Repl, str], None]
    takes: str = ""
    does: str


COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "image": Command(run=Repl.image, takes="PATH|URL", does="attach a picture to the next question"),
        "video": Command(run=Repl.video, takes="PATH|URL", does="attach a video to the next question"),
        "paste": Command(run=Repl.paste, does="attach the picture in the clipboard"),
        "retry": Command(run=Repl.retry, does="ask the last question again"),
        "undo": Command(run=Repl.undo, does="take the last question and its answer back"),
        "reset": Command(run=Repl.reset, does="forget everything that was said"),
        "system": Command(run=Repl.system, takes="[TEXT|-]", does="say how the model is to behave; - takes it back"),
        "set": Command(run=Repl.set, takes="[NAME [VALUE]]", does="set or unset an option, as in: /set temperature 0"),
        "save": Command(run=Repl.save, takes="PATH", does="write the conversation to a file"),
        "load": Command(run=Repl.load, takes="PATH", does="go on with a conversation from a file"),
        "help": Command(run=Repl.help, does="show this"),
        "exit": Command(run=Repl.leave, does="end; so does Ctrl-D. Ctrl-C stops an answer"),
    }
)


def help_lines() -> Iterator[str]:
    for name, command in COMMANDS.items():
        yield f"{f'/{name} {command.takes}'.rstrip():22} {command.does}"
    yield "Paths and addresses of pictures and videos may also stand in a question: drop a file on the terminal."
