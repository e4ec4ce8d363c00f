"""Stop strings, matched incrementally while text is generated."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """Truncates streamed text at the first stop string.

    The first match is the one that ends first, however the text is split; of several that end at the same character,
    the longest.

    Args:
        strings: the stop strings.
        include: whether the text ends with the stop string, instead of before it.

    Attributes:
        matched: whether a stop string was found; all later text is discarded.
        match: the stop string that was found; None if none was.
    """

    def __init__(self, strings: Sequence[str], *, include: bool = False) -> None:
        self.matched: bool = False
        self.match: str | None = None
        self._strings = strings
        self._include = include
        self._held = ""

    def feed(self, text: str, *, ignored: int = 0) -> str:
        """Add text; return what can be output, which excludes a possible beginning of a stop string.

        Args:
            text: the text.
            ignored: the number of its first characters at which no stop string ends.
        """
        if self.matched:
            return ""
        begin = len(self._held) + ignored
        text = self._held + text
        starts = {string: text.find(string, max(begin - len(string) + 1, 0)) for string in self._strings}
        found = [(start + len(string), string) for string, start in starts.items() if start >= 0]
        if found:
            end, self.match = min(found, key=lambda match: (match[0], -len(match[1])))
            self.matched = True
            self._held = ""
            return text[: end if self._include else end - len(self.match)]
        length = len(text) - length_held(text, self._strings)
        self._held = text[length:]
        return text[:length]

    @property
    def num_held(self) -> int:
        """How many characters are held back."""
        return len(self._held)

    def flush(self) -> str:
        """Return the text held back, which at the end of the text is not a stop string; other text may follow."""
        held = self._held
        self._held = ""
        return held


def length_held(text: str, strings: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that begins one of `strings` and is shorter than the longest."""
    longest = max(map(len, strings), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(string.startswith(end) for string in strings):
            return length
    return 0
