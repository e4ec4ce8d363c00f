"""Base classes of whole requests, as opposed to the objects in them.

Misspelled top-level fields are rejected, and other unknown ones are ignored and logged once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from pydantic import ValidationError, model_validator
from typing_extensions import Self

from ..errors import InvalidParameter
from .base import RequestModel
from .fields import RejectedFields, reject_fields
from .name_log import NameLog
from .validation_errors import explain

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


class RequestBody(RequestModel):
    """Base class of requests."""

    @classmethod
    def parse(cls, data: object) -> Self:
        """Validate a request from JSON. An instance is returned unchanged.

        Raises:
            InvalidParameter: a value has the wrong type, range or shape; `param` is the innermost invalid field, in
                OpenAI's notation, such as `messages[1].content[0].image_url.url`.
            UnsupportedParameter: a known field requests an unsupported feature.
        """
        if isinstance(data, Mapping) and not isinstance(data, dict):
            data = dict(data)
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise explain(error) from None


class CheckedBody(RequestBody):
    """Base class of requests whose unsupported and misspelled fields are rejected, and unknown ones logged.

    Attributes:
        _rejected_fields: the unsupported fields.
        _accepted_fields: further fields that may be set.
    """

    _rejected_fields: ClassVar[RejectedFields]
    _accepted_fields: ClassVar[Collection[str]]

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: object) -> object:
        given = data if isinstance(data, dict) else {}
        reject_fields(given, cls._rejected_fields)
        known = {*cls.model_fields, *cls._rejected_fields, *cls._accepted_fields}
        unknown = [name for name, value in given.items() if value is not None and name not in known]
        _handle_unknown(unknown, cls.model_fields)
        return data


def _handle_unknown(names: Sequence[object], known: Collection[str]) -> None:
    checked = [name for name in names[:MAX_CHECKED] if isinstance(name, str)]
    for name in checked:
        if meant := _meant(name, tuple(known)):
            raise InvalidParameter(f"`{name}` is not a known field. Did you mean `{meant}`?", param=name)
    _LOG.log(checked)


def _meant(name: str, known: tuple[str, ...]) -> str | None:
    """Return the known field that a name equals but for case, `_` and `-`, or for one letter that is missing, added,
    changed or swapped with the next one."""
    if len(name) > MAX_CHECKED_CHARACTERS or not (name.isascii() and name.isprintable()):
        return None
    exact, near = _spellings(known)
    letters = _letters(name)
    if letters in exact or len(letters) < MIN_LETTERS:
        return exact.get(letters)
    return next((near[item] for item in _without_a_letter(letters) if item in near), None)


@functools.lru_cache(maxsize=8)
def _spellings(known: tuple[str, ...]) -> tuple[dict[str, str], dict[str, str]]:
    # Two words that differ by one letter, or by the order of two, have a word in common among those that result from
    # deleting at most one letter.
    exact = {_letters(name): name for name in known}
    return exact, {variant: name for letters, name in exact.items() for variant in _without_a_letter(letters)}


def _letters(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _without_a_letter(letters: str) -> list[str]:
    return [letters, *(letters[:index] + letters[index + 1 :] for index in range(len(letters)))]
