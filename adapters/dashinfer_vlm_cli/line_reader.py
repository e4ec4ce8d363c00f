"""Lines that a person types: with history, editing and completion, as good as what is installed allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path

HISTORY = "chat_history"


def line_reader(folder: Path, commands: Iterable[str]) -> Callable[[], str]:
    """A function that reads a line; at the end of the input, `/exit`. It raises KeyboardInterrupt at Ctrl-C.

    Args:
        folder: where the history is kept; one that cannot be written costs the history alone.
        commands: words that are completed at the beginning of a line.
    """
    history = _history_file(folder)
    read = _toolkit_reader(history, list(commands)) if _has_toolkit() else _plain_reader()

    def line() -> str:
        try:
            return read()
        except EOFError:
            return "/exit"

    return line


def _has_toolkit() -> bool:
    """Whether prompt_toolkit is there, and the terminal knows the escapes by which it edits."""
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
    takes_file = {"/image", "/video", "/save", "/load"}
    session: PromptSession[str] = PromptSession(
        history=FileHistory(str(history)) if history else InMemoryHistory(),
        auto_suggest=AutoSuggestFromHistory(),
        completer=NestedCompleter({command: files if command in takes_file else None for command in commands}),
        complete_while_typing=False,
    )
    return lambda: session.prompt("> ")


def _plain_reader() -> Callable[[], str]:
    """Python's own `input`, which edits lines and keeps a history while it runs once readline is imported."""
    import readline  # noqa: F401 - importing it is what makes `input` so

    return lambda: input("> ")
