"""Unknown fields of objects in a request: misspelled or misplaced ones, and media that nothing reads, are errors."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from .fields import NO_AUDIO
from .validation_errors import field_error, show

MAX_CHECKED = 1024
"""Maximum number of unknown fields of a request that are examined, which takes about 10 ms."""

MAX_CHECKED_CHARACTERS = 32
MIN_LETTERS = 5
"""Minimum length of a name that may be misspelled: `top_a` of another server is not a misspelled `top_k`."""

MISPLACED: Mapping[str, str] = {
    "pruning_rate": "is an option of an image or a video. Set it next to `url` in Chat Completions, next to `image_url`"
    " or `video_url` in the Responses API, or in `source` in the Messages API.",
}
"""Options of content parts that are errors in other objects, since responses would differ from what is expected."""

_MEDIA_NAME = re.compile(
    r"(input_?)?(image|picture|photo|video|audio|media|file|attachment|document|pdf)s?(_?(urls?|data|base64))?",
    re.IGNORECASE,
)
_DOCUMENT = re.compile(r"(?i:data:application/pdf)|JVBERi")
_MEDIA_VALUE = re.compile(
    rf"(?i:data:(image|video|audio)/|https?://)|iVBORw0KGgo|/9j/|R0lGOD|UklGR|GkXfo|AAAA..Z0eX|{_DOCUMENT.pattern}"
)
"""The beginning of a URL, or of a PNG, JPEG, GIF, WebP, WebM, MP4 or PDF file in base64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnknownMedia:
    """Detects media in unknown fields, which the model would not receive.

    Attributes:
        image: an example of a content part with an image, for the next step of errors.
        video: the same for a video.
        document: the same for a PDF.
        by_value: whether the value of a field can show that it is meant as media, in addition to its name.
    """

    image: str
    video: str
    document: str
    by_value: bool = False

    def next_step(self, name: str, value: object) -> str | None:
        """Return the next step for a client that sends media in a field; None for other fields."""
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        has_media_name = isinstance(first, (str, dict)) and first and _MEDIA_NAME.fullmatch(name)
        if not has_media_name and not (self.by_value and isinstance(first, str) and _MEDIA_VALUE.match(first)):
            return None
        if "audio" in name.lower():
            return NO_AUDIO
        part = self.video if "video" in name.lower() else self.image
        if re.search("document|pdf", name, re.IGNORECASE) or (isinstance(first, str) and _DOCUMENT.match(first)):
            part = self.document
        return f"Send a content part such as {part}, or remove the field."


class FieldNames:
    """The names of the fields of an object in a request.

    Args:
        fields: the fields that have an effect.
        accepted: further fields that may be set.
        media: detects media in other fields, if the object can contain any.
    """

    def __init__(self, fields: Collection[str], accepted: Collection[str], media: UnknownMedia | None) -> None:
        self._known = frozenset(fields) | frozenset(accepted)
        self._media = media
        # Two words that differ by one letter, or by the order of two, have a word in common among those that result
        # from deleting at most one letter.
        self._exact = {_letters(name): name for name in fields}
        self._near = {item: name for letters, name in self._exact.items() for item in _without_a_letter(letters)}

    def check(self, given: Mapping[str, object], unknown: list[str]) -> None:
        """Raise an error, to which `explain` adds the path, for a field that is misspelled, misplaced or media.

        Args:
            given: the object.
            unknown: the names of other unknown fields of the request, to which those of the object are added.
        """
        if len(unknown) >= MAX_CHECKED or given.keys() <= self._known:
            return
        names = (name for name in given if isinstance(name, str) and name not in self._known)
        for name in itertools.islice(names, MAX_CHECKED - len(unknown)):
            if name in MISPLACED:
                raise field_error(name, MISPLACED[name])
            if meant := self._meant(name):
                raise field_error(name, f"is not a known field. Did you mean `{meant}`?")
            if self._media and (next_step := self._media.next_step(name, given[name])):
                raise field_error(show(name)[1:-1], f"is not a known field. {next_step}")
            unknown.append(name)

    def _meant(self, name: str) -> str | None:
        """Return the known field that a name equals but for case, `_` and `-`, or for one letter that is missing,
        added, changed or swapped with the next one."""
        if len(name) > MAX_CHECKED_CHARACTERS or not (name.isascii() and name.isprintable()):
            return None
        letters = _letters(name)
        if letters in self._exact or len(letters) < MIN_LETTERS:
            return self._exact.get(letters)
        return next((self._near[item] for item in _without_a_letter(letters) if item in self._near), None)


def _letters(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _without_a_letter(letters: str) -> list[str]:
    return [letters, *(letters[:index] + letters[index + 1 :] for index in range(len(letters)))]
