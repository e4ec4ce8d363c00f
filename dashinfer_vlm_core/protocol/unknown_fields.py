"""Unknown top-level fields of a request: misspelled ones are rejected, others are ignored and logged once."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Sequence

from ..errors import InvalidParameter
from .name_log import NameLog

logger: logging.Logger = logging.getLogger(__name__)

MAX_CHECKED = 32
"""Maximum number of unknown fields of a request that are compared with the known ones."""

MAX_CHECKED_CHARACTERS = 64
MIN_LETTERS = 5
"""Minimum length of a name that may be misspelled: `top_a` of another server is not a misspelled `top_k`."""


_LOG = NameLog(
    logger,
    "Requests have unknown fields, which are ignored: %s.",
    "Further unknown fields of requests are not logged.",
)


def handle_unknown_fields(names: Sequence[object], known: Collection[str]) -> None:
    """Reject a misspelled field, and log the others.

    A name is misspelled if it equals a known one but for case, `_` and `-`, or for one letter that is missing, added,
    changed or swapped with the next one.

    Args:
        names: the unknown fields that a request sets.
        known: the fields that it could set.

    Raises:
        InvalidParameter: a field is misspelled; the message has the right name.
    """
    checked = [name for name in names[:MAX_CHECKED] if isinstance(name, str)]
    if not checked:
        return
    index = _spelling_index(tuple(known))
    for name in checked:
        if meant := index.find(name):
            raise InvalidParameter(f"`{name}` is not a known field. Did you mean `{meant}`?", param=name)
    _LOG.log(checked)


class _SpellingIndex:
    """Finds the known name that a name is a misspelling of.

    Two words that differ by one letter, or by the order of two, have a word in common among those that result from
    deleting at most one letter.
    """

    def __init__(self, known: tuple[str, ...]) -> None:
        self._exact = {_letters(name): name for name in known}
        self._near = {variant: name for name in known for variant in _without_a_letter(_letters(name))}

    def find(self, name: str) -> str | None:
        if len(name) > MAX_CHECKED_CHARACTERS or not (name.isascii() and name.isprintable()):
            return None
        letters = _letters(name)
        if letters in self._exact or len(letters) < MIN_LETTERS:
            return self._exact.get(letters)
        return next((self._near[item] for item in _without_a_letter(letters) if item in self._near), None)


_spelling_index = functools.lru_cache(maxsize=8)(_SpellingIndex)


def _letters(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _without_a_letter(letters: str) -> list[str]:
    return [letters, *(letters[:index] + letters[index + 1 :] for index in range(len(letters)))]
