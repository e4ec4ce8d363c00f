"""Line input at the terminal, with history, editing and completion if prompt_toolkit is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path

HISTORY = "chat_history"


def line_reader(folder: Path, commands: Iterable[str]) -> Callable[[], str]:
    """Return a function that reads a line. It raises EOFError at the end of the input, and KeyboardInterrupt on Ctrl-C.

    Args:
        folder: the folder of the history file. If it is not writable, the history is not stored.
        commands: words to complete at the beginning of a line.
    """
    history = _history_file(folder)
    return _toolkit_reader(history, list(commands)) if _has_toolkit() else _plain_reader()


def _has_toolkit() -> bool:
    if find_spec("prompt_toolkit") is None:
        return False
    from prompt_toolkit.utils import is_dumb_terminal

    return not is_dumb_terminal()


def _history_file(folder: Path) -> Path | None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / HISTORY).touch(mode=0o600)
    except OSError:
        return None
    return folder / HISTORY


def _toolkit_reader(history: Path | None, commands: list[str]) -> Callable[[], str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
    from prompt_toolkit.completion import NestedCompleter, PathCompleter
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    files = PathCompleter(expanduser=True)
    file_commands = {"/image", "/video", "/save", "/load"}
    session: PromptSession[str] = PromptSession(
        history=FileHistory(str(history)) if history else InMemoryHistory(),
        auto_suggest=AutoSuggestFromHistory(),
        completer=NestedCompleter({command: files if command in file_commands else None for command in commands}),
        complete_while_typing=False,
    )
    return lambda: session.prompt("> ")


def _plain_reader() -> Callable[[], str]:
    """Use Python's `input`, which edits lines and has a history in memory if readline is imported."""
    import readline  # noqa: F401 - imported for its side effect on `input`

    return lambda: input("> ")
