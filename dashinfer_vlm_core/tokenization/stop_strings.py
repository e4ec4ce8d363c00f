"""Strings that end a text, found while it is written."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class _Matcher:
    """Knuth, Morris and Pratt's search for one string, a character at a time.

    Attributes:
        state: length of the longest beginning of the string that the text ends with.
        fallback: for each length of a beginning, that of the longest shorter one that it ends with.
    """

    string: str
    state: int = 0
    fallback: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.fallback = [0, 0]
        for character in self.string[1:]:
            self.fallback.append(self._next(self.fallback[-1], character))

    def _next(self, state: int, character: str) -> int:
        while state and self.string[state] != character:
            state = self.fallback[state]
        return state + (self.string[state] == character)

    def step(self, character: str) -> bool:
        """Whether the text, with this character, ends with the string."""
        self.state = self._next(self.state, character)
        return self.state == len(self.string)


class StopStringMatcher:
    """Cuts a text, given piece by piece, before the first stop string.

    First is the one that is complete first, whatever the pieces; of several that end at one character, the longest.

    Attributes:
        matched: whether one was found; all later text is dropped.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.matched: bool = False
        self._matchers = [_Matcher(string) for string in strings]
        self._held = ""

    def feed(self, text: str) -> str:
        """What can be shown for sure: all but what a stop string may begin with."""
        if not self._matchers or self.matched:
            return "" if self.matched else text
        held, self._held = self._held + text, ""
        for index, character in enumerate(text, start=len(held) - len(text) + 1):
            if found := [len(matcher.string) for matcher in self._matchers if matcher.step(character)]:
                self.matched = True
                return held[: index - max(found)]
        kept = max(matcher.state for matcher in self._matchers)
        self._held = held[len(held) - kept :]
        return held[: len(held) - kept]

    def flush(self) -> str:
        """What was held back: at the end of the text it is no stop string."""
        held, self._held = self._held, ""
        return held
