"""Line input at the terminal, with history, editing and completion if prompt_toolkit is installed."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from dashinfer_vlm_core.config.folders import cache_problem, write_error

if TYPE_CHECKING:
    from prompt_toolkit.history import History

logger: logging.Logger = logging.getLogger(__name__)

HISTORY = "chat_history"


def line_reader(folder: Path, commands: Iterable[str]) -> Callable[[], str]:
    """Return a function that reads a line. It raises EOFError at the end of the input, and KeyboardInterrupt on Ctrl-C.

    Args:
        folder: the folder of the history file. If it is not writable, a warning says so, and the history is not stored.
        commands: words to complete at the beginning of a line.
    """
    return _toolkit_reader(folder, list(commands)) if _has_toolkit() else _plain_reader()


def _has_toolkit() -> bool:
    if find_spec("prompt_toolkit") is None:
        return False
    from prompt_toolkit.utils import is_dumb_terminal

    return not is_dumb_terminal()


@functools.cache
def _warn(folder: Path, reason: str) -> None:
    logger.warning("Prompts are not stored for later. %s", cache_problem(folder, reason))


def _history(folder: Path) -> History:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class StoredHistory(FileHistory):
        def store_string(self, string: str) -> None:
            try:
                super().store_string(string)
            except OSError as error:
                _warn(folder, error.strerror or str(error))

    file = folder / HISTORY
    try:
        problem = write_error(folder)
        if not problem:
            file.touch(mode=0o600)
            return StoredHistory(file)
    except OSError as error:
        problem = error.strerror or str(error)
    _warn(folder, problem)
    return InMemoryHistory()


def _toolkit_reader(folder: Path, commands: list[str]) -> Callable[[], str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
    from prompt_toolkit.completion import NestedCompleter, PathCompleter

    files = PathCompleter(expanduser=True)
    file_commands = {"/image", "/video", "/save", "/load"}
    session: PromptSession[str] = PromptSession(
        history=_history(folder),
        auto_suggest=AutoSuggestFromHistory(),
        completer=NestedCompleter({command: files if command in file_commands else None for command in commands}),
        complete_while_typing=False,
    )
    return lambda: session.prompt("> ")


def _plain_reader() -> Callable[[], str]:
    """Use Python's `input`, which edits lines and has a history in memory if readline is imported."""
    import readline  # noqa: F401 - imported for its side effect on `input`

    return lambda: input("> ")
