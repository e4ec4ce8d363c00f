"""Lark rules in the making."""

from __future__ import annotations

import json

from .bounds import MAX_RULES


class TooManyRules(Exception):
    """The grammar outgrew its bound."""


class Rules:
    """Named rules, in llguidance's dialect of Lark; equal ones are one.

    Attributes:
        patterns: regular expressions of the request, as the rules that they became, by their place in it; a fault is
            told by its place.
    """

    def __init__(self) -> None:
        self._names: dict[tuple[str, str], str] = {}
        self.patterns: dict[str, str] = {}

    def add(self, body: str) -> str:
        """The name of the rule with this body."""
        return self._named(body, "r")

    def terminal(self, body: str) -> str:
        """The name of a rule that the lexer matches as one piece: only such bodies may hold `&` and `~`."""
        return self._named(body, "T")

    def lazy(self, body: str) -> str:
        """The name of a rule that the lexer matches as one piece, ending as soon as it can."""
        return self._named(body, "r", "[lazy]")

    def either(self, bodies: list[str]) -> str:
        """The name of a rule that is one of `bodies`; at least one."""
        return bodies[0] if len(bodies) == 1 else self.add(" | ".join(dict.fromkeys(bodies)))

    def text(self, start: str) -> str:
        """The whole grammar, from the rule or body `start` on."""
        rules = (f"{name}{option}: {body}" for (body, option), name in self._names.items())
        return "\n".join([f"start: {start}", *rules])

    def _named(self, body: str, kind: str, option: str = "") -> str:
        if len(self._names) >= MAX_RULES:
            raise TooManyRules
        return self._names.setdefault((body, option), f"{kind}{len(self._names)}")


def literal(text: str) -> str:
    """A piece of a rule's body that matches `text` and nothing else."""
    return json.dumps(text, ensure_ascii=False)


def regex(pattern: str) -> str:
    """A piece of a rule's body that matches a regular expression; `/` must be escaped in it."""
    return f"/{pattern}/"
