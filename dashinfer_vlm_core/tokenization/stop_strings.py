"""Stop strings, matched incrementally while text is generated."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class _Matcher:
    """Knuth-Morris-Pratt search for one string, one character at a time.

    Attributes:
        state: length of the longest prefix of the string that is a suffix of the text.
        fallback: for each prefix length, the length of the longest shorter prefix that is a suffix of it.
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
        """Append a character to the text; return whether the text now ends with the string."""
        self.state = self._next(self.state, character)
        return self.state == len(self.string)


class StopStringMatcher:
    """Truncates streamed text before the first stop string.

    The first match is the one that ends first, however the text is split; of several that end at the same character,
    the longest.

    Attributes:
        matched: whether a stop string was found; all later text is discarded.
        match: the stop string that was found; None if none was.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.matched: bool = False
        self.match: str | None = None
        self._matchers = [_Matcher(string) for string in strings]
        self._held = ""

    def feed(self, text: str) -> str:
        """Add text; return what can be output, which excludes a possible beginning of a stop string."""
        if not self._matchers or self.matched:
            return "" if self.matched else text
        held, self._held = self._held + text, ""
        for index, character in enumerate(text, start=len(held) - len(text) + 1):
            if lengths := [len(matcher.string) for matcher in self._matchers if matcher.step(character)]:
                begin = index - max(lengths)
                self.matched, self.match = True, held[begin:index]
                return held[:begin]
        kept = max(matcher.state for matcher in self._matchers)
        self._held = held[len(held) - kept :]
        return held[: len(held) - kept]

    @property
    def num_held(self) -> int:
        """How many characters are held back."""
        return len(self._held)

    def flush(self) -> str:
        """Return the text held back, which at the end of the text is not a stop string; other text may follow."""
        held, self._held = self._held, ""
        for matcher in self._matchers:
            matcher.state = 0
        return held
