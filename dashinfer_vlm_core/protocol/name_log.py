"""A log of names that come from clients: each name once, and a bounded number of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from .validation_errors import show

MAX_LOGGED = 100
"""Maximum number of names that are logged, since they are remembered."""


class NameLog:
    """Logs each name once, shortened, up to `MAX_LOGGED` names; thread-safe.

    Args:
        logger: the logger.
        message: the message, with a placeholder for the names.
        last_message: the message after the last name.
    """

    def __init__(self, logger: logging.Logger, message: str, last_message: str) -> None:
        self._logger = logger
        self._message = message
        self._last_message = last_message
        self._logged: set[str] = set()
        self._lock = threading.Lock()

    def log(self, names: Iterable[str]) -> None:
        with self._lock:
            free = MAX_LOGGED - len(self._logged)
            new = list(dict.fromkeys(name for name in map(show, names) if name not in self._logged))[:free]
            self._logged.update(new)
        if new:
            self._logger.warning(self._message, ", ".join(new))
        if new and len(new) == free:
            self._logger.warning(self._last_message)
